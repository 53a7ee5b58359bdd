"""Work that waits at a stage: steps, and rows that refill it.

Both take turns, and refills come in small pieces, so that sequences which are moved
here do not hold up those that are here. If nothing else is here, a piece is as large as
a step may be. A step with a sequence that is being refilled waits for that. What is
prepared for a sequence that goes on elsewhere comes last.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from torch import Tensor

from multiworld.serve.generation.replica.recovery import Links
from multiworld.serve.transport.generation_messages import Preempted, Refill, Step
from multiworld.serve.transport.protocol import Key

PIECE = 64
"""Rows of a refill that are computed between two steps of other sequences. A step costs
about as much as nine rows besides, so a refill in such pieces takes 14 % longer."""


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

    def first(self, count: int) -> RefillRows:
        """Return the first rows, which are not the last ones."""
        return RefillRows(self.key, self.begin, self.rows[:count], is_end=False)

    def after(self, count: int) -> RefillRows:
        """Return the rows after the first ones."""
        begin, rows = self.begin + count, self.rows[count:]
        return RefillRows(self.key, begin, rows, self.is_end)


class Inbox:
    """Steps and refills in the order of their arrival.

    Args:
        rows: Most rows to compute at once.
        links: The sequences of the stage.
    """

    def __init__(self, rows: int, links: Links) -> None:
        self._rows, self._links = rows, links
        self._steps: deque[ArrivedStep | Preempted] = deque()
        self._refills: deque[RefillRows] = deque()
        self._prepared: deque[RefillRows] = deque()  # of sequences that go on elsewhere
        self._refilled: Counter[Key] = Counter()
        self._moved: set[Key] = set()  # refilled since there was nothing to refill
        self._is_turn_of_refills = False

    def __len__(self) -> int:
        return len(self._steps) + len(self._refills) + len(self._prepared)

    def add(self, arrived: ArrivedStep | Preempted) -> None:
        """Queue a step."""
        self._steps.append(arrived)

    def refill(self, message: Refill, hidden: Tensor) -> None:
        """Queue rows that refill this stage."""
        if not self._refills:
            self._moved.clear()
        rows = RefillRows(message.key, message.begin, hidden, message.is_end)
        self._refilled[message.key] += 1
        link = self._links.get(message.key)
        if link is not None and link.stages:
            self._prepared.append(rows)
        else:
            self._moved.add(message.key)
            self._refills.append(rows)

    def next(self) -> ArrivedStep | Preempted | list[RefillRows] | None:
        """Return what to compute next, and remove it; None if there is nothing."""
        refills = self._refills or self._prepared
        if refills and (self._is_turn_of_refills or not self._can_step()):
            self._is_turn_of_refills = False
            return self._next_refills(refills, self._piece())
        self._is_turn_of_refills = True
        return self._steps.popleft() if self._steps else None

    def _piece(self) -> int:
        """Return the most rows to refill at once.

        Sequences that were refilled just now wait for those that still are, but not for
        those that are prepared.
        """
        waits = self._moved if self._refills else ()
        are_others_here = any(
            link.held and not (link.is_known or link.stages) and link.key not in waits
            for link in self._links
        )
        return min(PIECE, self._rows) if are_others_here else self._rows

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

    def _next_refills(self, refills: deque[RefillRows], most: int) -> list[RefillRows]:
        """Return refills to compute now, each sequence once.

        Args:
            refills: Those that wait.
            most: Most rows of all together.
        """
        found: list[RefillRows] = []
        keys: set[Key] = set()
        while refills and refills[0].key not in keys:
            whole = refills[0]
            count = min(most, len(whole.rows))
            if found and not count and len(whole.rows):
                break
            is_all = count == len(whole.rows)
            keys.add(whole.key)
            most -= count
            found.append(whole if is_all else whole.first(count))
            if not is_all:
                refills[0] = whole.after(count)
                break
            refills.popleft()
            self._refilled[whole.key] -= 1
            if not self._refilled[whole.key]:
                del self._refilled[whole.key]
        return found
