"""Who is next where several tenants wait: weighted fair shares. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Every tenant has a time
up to which it has had its share; serving a piece of its work moves that on by what the
work costs, divided by its weight. Next is whoever has had least, and nobody's time is
before that of the piece that was served last. So a tenant with much that waits gets its
share and no more, one that asks seldom is next as soon as it asks, and what nobody else
wants is had by whoever wants it. Of one tenant's work, what came first is first.

Time is charged when work is served, and not when it comes: what is withdrawn costs
nothing, and leaves nothing behind it.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MANY = 1024
"""Tenants that are remembered before those without claims are forgotten."""

LEAST = 1.0
"""What any work costs, at least."""


@dataclass(frozen=True, slots=True)
class Share:
    """Whose work it is, and what that counts.

    Attributes:
        tenant: Its name; empty for whoever has none.
        weight: Of its share beside others'.
        priority: Work of a higher one comes first, always.
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0


NOBODYS = Share()


@dataclass(frozen=True, slots=True)
class _Piece:
    share: Share
    cost: float
    number: int


class FairQueue(Generic[K]):
    """Work that waits, of all tenants."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}
        self._pieces: dict[K, _Piece] = {}
        self._lines: dict[str, list[tuple[int, K]]] = {}
        self._many = MANY

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def is_shared(self) -> bool:
        """Whether work of several tenants waits."""
        return len(self._lines) > 1

    def put(self, key: K, share: Share, cost: float, number: int) -> None:
        """Have a piece of work wait.

        Args:
            cost: What it takes, in any unit: rows, say.
            number: Orders the work of one tenant; no two have the same.
        """
        self.drop(key)
        self._pieces[key] = _Piece(share, max(cost, LEAST), number)
        bisect.insort(self._lines.setdefault(share.tenant, []), (number, key))

    def drop(self, key: K) -> None:
        """Forget a piece of work; nothing happens if it does not wait."""
        piece = self._pieces.pop(key, None)
        if piece is None:
            return
        line = self._lines[piece.share.tenant]
        del line[bisect.bisect_left(line, (piece.number,))]
        if not line:
            del self._lines[piece.share.tenant]

    def next(self) -> K | None:
        """Return whose turn it is."""
        best: tuple[int, float, int] | None = None
        found: K | None = None
        for tenant, line in self._lines.items():
            number, key = line[0]
            start = max(self._now, self._ends.get(tenant, 0.0))
            turn = -self._pieces[key].share.priority, start, number
            if best is None or turn < best:
                best, found = turn, key
        return found

    def take(self, key: K) -> None:
        """Take out a piece of work that is served: its tenant is charged for it."""
        piece = self._pieces[key]
        tenant = piece.share.tenant
        start = max(self._now, self._ends.get(tenant, 0.0))
        self._now = start
        self._ends[tenant] = start + piece.cost / piece.share.weight
        self.drop(key)
        if len(self._ends) > self._many:
            self._ends = {n: end for n, end in self._ends.items() if end > self._now}
            self._many = max(MANY, 2 * len(self._ends))

    def order(self) -> Iterator[K]:
        """Yield all that waits in the order in which it would be served.

        Nothing may be put or taken meanwhile.
        """
        if not self.is_shared:
            for line in self._lines.values():
                yield from (key for _, key in line)
            return
        now, ends = self._now, dict(self._ends)
        places = dict.fromkeys(self._lines, 0)
        while places:
            best: tuple[int, float, int] | None = None
            chosen = ""
            for tenant, place in places.items():
                number, key = self._lines[tenant][place]
                start = max(now, ends.get(tenant, 0.0))
                turn = -self._pieces[key].share.priority, start, number
                if best is None or turn < best:
                    best, chosen = turn, tenant
            _, key = self._lines[chosen][places[chosen]]
            piece = self._pieces[key]
            now = max(now, ends.get(chosen, 0.0))
            ends[chosen] = now + piece.cost / piece.share.weight
            places[chosen] += 1
            if places[chosen] == len(self._lines[chosen]):
                del places[chosen]
            yield key
