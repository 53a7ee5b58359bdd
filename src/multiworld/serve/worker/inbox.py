"""Work that waits at a stage: steps, and rows that refill it. Shell.

Both take turns, so that sequences which are moved here do not hold up those that are
here. A step with a sequence that is being refilled waits for that.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from multiworld.serve.transport.generation_messages import Preempted, Refill, Step
from multiworld.serve.transport.protocol import Key


@dataclass(frozen=True, slots=True)
class ArrivedStep:
    """A step that waits.

    Attributes:
        step: The step.
        hidden: Rows of all its parts, [rows, hidden].
    """

    step: Step
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class RefillRows:
    """Rows that refill this stage for a sequence.

    Attributes:
        key: The sequence.
        begin: Position of the first row.
        rows: Shape [rows, hidden]; there may be none.
        is_end: True if these are the last ones.
    """

    key: Key
    begin: int
    rows: Tensor
    is_end: bool


class Inbox:
    """Steps and refills in the order of their arrival.

    Args:
        rows: Most rows to compute at once.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._steps: deque[ArrivedStep | Preempted] = deque()
        self._refills: deque[RefillRows] = deque()
        self._refilled: Counter[Key] = Counter()
        self._is_turn_of_refills = False

    def __len__(self) -> int:
        return len(self._steps) + len(self._refills)

    def add(self, arrived: ArrivedStep | Preempted) -> None:
        """Queue a step."""
        self._steps.append(arrived)

    def refill(self, message: Refill, hidden: Tensor) -> None:
        """Queue rows that refill this stage, in pieces of the size of a step."""
        for piece in self._pieces(message, hidden):
            self._refills.append(piece)
            self._refilled[piece.key] += 1

    def _pieces(self, message: Refill, hidden: Tensor) -> Iterator[RefillRows]:
        offset = 0
        while True:
            rows = hidden[offset : offset + self._rows]
            is_end = offset + len(rows) == len(hidden)
            begin = message.begin + offset
            yield RefillRows(message.key, begin, rows, is_end and message.is_end)
            if is_end:
                return
            offset += len(rows)

    def next(self) -> ArrivedStep | Preempted | list[RefillRows] | None:
        """Return what to compute next, and remove it; None if there is nothing."""
        if not self._steps and not self._refills:
            return None
        if self._refills and (self._is_turn_of_refills or not self._can_step()):
            self._is_turn_of_refills = False
            return self._next_refills()
        self._is_turn_of_refills = True
        return self._steps.popleft()

    def _can_step(self) -> bool:
        if not self._steps:
            return False
        first = self._steps[0]
        keys = (
            first.keys
            if isinstance(first, Preempted)
            else [part.key for part in first.step.parts]
        )
        return not any(self._refilled[key] for key in keys)

    def _next_refills(self) -> list[RefillRows]:
        """Return as many refills as fit into one step; each sequence once."""
        found: list[RefillRows] = []
        keys: set[Key] = set()
        rows = 0
        while self._refills:
            piece = self._refills[0]
            is_full = found and rows + len(piece.rows) > self._rows
            if piece.key in keys or is_full:
                break
            self._refills.popleft()
            self._refilled[piece.key] -= 1
            if not self._refilled[piece.key]:
                del self._refilled[piece.key]
            keys.add(piece.key)
            found.append(piece)
            rows += len(piece.rows)
        return found
