"""Queue of a stage: steps, and rows of KV rebuilds.

Steps alternate with pieces of rebuilds. The pieces are small, so that arriving
sequences do not delay running ones; if none is running, a piece is as large as a step.
A step waits until the KV of all its sequences is rebuilt. Rows that prepare this stage
for a sequence which still runs elsewhere come last.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from torch import Tensor

from multiworld.serve.replica.sequences.sequence_state import SequenceTable
from multiworld.serve.wire.generation_messages import (
    ActivationRows,
    PreemptSequences,
    Step,
)
from multiworld.serve.wire.protocol import Key

# Maximum rows of a KV rebuild between two steps of other sequences. A step has the
# fixed cost of about nine rows, so a rebuild in such pieces takes 14 % longer.
PIECE = 64


@dataclass(frozen=True, slots=True)
class ArrivedStep:
    step: Step
    hidden: Tensor  # hidden states of all its parts, [rows, hidden]


@dataclass(frozen=True, slots=True)
class RebuildRows:
    """Input rows from which this stage rebuilds the KV of a sequence."""

    key: Key
    begin: int  # position of the first row
    rows: Tensor  # [rows, hidden]; may be empty
    is_end: bool  # True if no rows follow

    def first(self, count: int) -> RebuildRows:
        return RebuildRows(self.key, self.begin, self.rows[:count], is_end=False)

    def after(self, count: int) -> RebuildRows:
        begin, rows = self.begin + count, self.rows[count:]
        return RebuildRows(self.key, begin, rows, self.is_end)


class StepQueue:
    """Steps and rebuilds in order of arrival; at most ``rows`` rows at once."""

    def __init__(self, rows: int, table: SequenceTable) -> None:
        self._rows, self._table = rows, table
        self._steps: deque[ArrivedStep | PreemptSequences] = deque()
        self._rebuilds: deque[RebuildRows] = deque()
        # Rebuilds of sequences that are prepared here and still run elsewhere.
        self._prepared: deque[RebuildRows] = deque()
        self._rebuilding: Counter[Key] = Counter()
        # Sequences rebuilt since ``_rebuilds`` was last empty.
        self._moved: set[Key] = set()
        self._is_turn_of_rebuilds = False

    def __len__(self) -> int:
        return len(self._steps) + len(self._rebuilds) + len(self._prepared)

    def add(self, arrived: ArrivedStep | PreemptSequences) -> None:
        self._steps.append(arrived)

    def rebuild(self, message: ActivationRows, hidden: Tensor) -> None:
        if not self._rebuilds:
            self._moved.clear()
        rows = RebuildRows(message.key, message.begin, hidden, message.is_end)
        self._rebuilding[message.key] += 1
        state = self._table.get(message.key)
        if state is not None and state.prepared:
            self._prepared.append(rows)
        else:
            self._moved.add(message.key)
            self._rebuilds.append(rows)

    def next(self) -> ArrivedStep | PreemptSequences | list[RebuildRows] | None:
        """Remove and return the next work; None if the queue is empty."""
        rebuilds = self._rebuilds or self._prepared
        if rebuilds and (self._is_turn_of_rebuilds or not self._can_step()):
            self._is_turn_of_rebuilds = False
            return self._next_rebuilds(rebuilds, self._piece())
        self._is_turn_of_rebuilds = True
        return self._steps.popleft() if self._steps else None

    def _piece(self) -> int:
        """Return the maximum number of rows to rebuild at once."""
        # Rebuild in small pieces only if other sequences could run in between. A
        # sequence whose KV was just rebuilt could not: it waits for the other rebuilds,
        # unless they rebuild sequences that are only prepared.
        waits = self._moved if self._rebuilds else ()
        are_others_here = any(
            state.held
            and not (state.is_cached or state.prepared)
            and state.key not in waits
            for state in self._table
        )
        return min(PIECE, self._rows) if are_others_here else self._rows

    def _can_step(self) -> bool:
        if not self._steps:
            return False
        first = self._steps[0]
        keys = (
            first.keys
            if isinstance(first, PreemptSequences)
            else [part.key for part in first.step.parts]
        )
        return not any(self._rebuilding[key] for key in keys)

    def _next_rebuilds(
        self, rebuilds: deque[RebuildRows], budget: int
    ) -> list[RebuildRows]:
        """Remove and return rebuilds of at most ``budget`` rows, each sequence once."""
        found: list[RebuildRows] = []
        keys: set[Key] = set()
        while rebuilds and rebuilds[0].key not in keys:
            whole = rebuilds[0]
            count = min(budget, len(whole.rows))
            if found and not count and len(whole.rows):
                break
            is_all = count == len(whole.rows)
            keys.add(whole.key)
            budget -= count
            found.append(whole if is_all else whole.first(count))
            if not is_all:
                rebuilds[0] = whole.after(count)
                break
            rebuilds.popleft()
            self._rebuilding[whole.key] -= 1
            if not self._rebuilding[whole.key]:
                del self._rebuilding[whole.key]
        return found
