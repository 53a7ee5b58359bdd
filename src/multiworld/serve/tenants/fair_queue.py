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

PRUNE_AT = 1024
"""Tenants that are remembered before those without claims are forgotten."""

MIN_COST = 1.0
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


DEFAULT_SHARE = Share()


@dataclass(frozen=True, slots=True)
class _Piece:
    share: Share
    cost: float
    number: int


class FairQueue(Generic[K]):
    """Work that waits, of all tenants."""

    def __init__(self) -> None:
        self._virtual_time = 0.0
        self._finish_tags: dict[str, float] = {}
        self._pieces: dict[K, _Piece] = {}
        self._queues: dict[str, list[tuple[int, K]]] = {}
        self._prune_at = PRUNE_AT

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def is_shared(self) -> bool:
        """Whether work of several tenants waits."""
        return len(self._queues) > 1

    def put(self, key: K, share: Share, cost: float, number: int) -> None:
        """Have a piece of work wait.

        Args:
            cost: What it takes, in any unit: rows, say.
            number: Orders the work of one tenant; no two have the same.
        """
        self.drop(key)
        self._pieces[key] = _Piece(share, max(cost, MIN_COST), number)
        bisect.insort(self._queues.setdefault(share.tenant, []), (number, key))

    def drop(self, key: K) -> None:
        """Forget a piece of work; nothing happens if it does not wait."""
        piece = self._pieces.pop(key, None)
        if piece is None:
            return
        queue = self._queues[piece.share.tenant]
        del queue[bisect.bisect_left(queue, (piece.number,))]
        if not queue:
            del self._queues[piece.share.tenant]

    def next(self) -> K | None:
        """Return whose turn it is."""
        best: tuple[int, float, int] | None = None
        found: K | None = None
        for tenant, queue in self._queues.items():
            number, key = queue[0]
            start = max(self._virtual_time, self._finish_tags.get(tenant, 0.0))
            rank = -self._pieces[key].share.priority, start, number
            if best is None or rank < best:
                best, found = rank, key
        return found

    def take(self, key: K) -> None:
        """Take out a piece of work that is served: its tenant is charged for it."""
        piece = self._pieces[key]
        tenant = piece.share.tenant
        start = max(self._virtual_time, self._finish_tags.get(tenant, 0.0))
        self._virtual_time = start
        self._finish_tags[tenant] = start + piece.cost / piece.share.weight
        self.drop(key)
        if len(self._finish_tags) > self._prune_at:
            self._finish_tags = {
                n: end
                for n, end in self._finish_tags.items()
                if end > self._virtual_time
            }
            self._prune_at = max(PRUNE_AT, 2 * len(self._finish_tags))

    def order(self) -> Iterator[K]:
        """Yield all that waits in the order in which it would be served.

        Nothing may be put or taken meanwhile.
        """
        if not self.is_shared:
            for queue in self._queues.values():
                yield from (key for _, key in queue)
            return
        now, ends = self._virtual_time, dict(self._finish_tags)
        positions = dict.fromkeys(self._queues, 0)
        while positions:
            best: tuple[int, float, int] | None = None
            chosen = ""
            for tenant, position in positions.items():
                number, key = self._queues[tenant][position]
                start = max(now, ends.get(tenant, 0.0))
                rank = -self._pieces[key].share.priority, start, number
                if best is None or rank < best:
                    best, chosen = rank, tenant
            _, key = self._queues[chosen][positions[chosen]]
            piece = self._pieces[key]
            now = max(now, ends.get(chosen, 0.0))
            ends[chosen] = now + piece.cost / piece.share.weight
            positions[chosen] += 1
            if positions[chosen] == len(self._queues[chosen]):
                del positions[chosen]
            yield key
