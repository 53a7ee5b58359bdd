"""Weighted fair queueing between tenants. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each tenant has a finish
tag: a virtual time that advances by cost / weight with every piece of its work that is
served. The next piece comes from the tenant with the earliest start tag, which is its
finish tag, but not before the current virtual time, the start tag of the piece served
last. So a tenant with a long queue gets its share and no more, a tenant that seldom
sends work is served next, and others may use a share that its tenant leaves unused. The
work of one tenant is served in the order of its numbers.

Unlike in the paper, a tenant is charged when its work is served, not when it arrives:
withdrawn work costs nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Annotated, Generic, NamedTuple, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)

PRUNE_AT = 1024
"""Number of finish tags at which those not after the virtual time are dropped."""

MIN_COST = 1.0
"""Minimum cost of a piece of work; otherwise work without rows would be free."""


class Share(NamedTuple):
    """Tenant of a piece of work ("" without a key), with its relative weight.

    Work of a higher priority is always served first.
    """

    tenant: str = ""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    priority: int = 0


DEFAULT_SHARE = Share()
"""Share of clients without a key."""


@dataclass(frozen=True, slots=True)
class _Piece:
    share: Share
    cost: float
    number: int


class FairQueue(Generic[K]):
    """Queue of work of all tenants, in fair order."""

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
        """True if work of several tenants waits."""
        return len(self._queues) > 1

    def put(self, key: K, share: Share, cost: float, number: int) -> None:
        """Queue a piece of work, replacing any with the same key.

        The work of one tenant is served in the order of its numbers, which are unique.
        """
        self.drop(key)
        self._pieces[key] = _Piece(share, max(cost, MIN_COST), number)
        bisect.insort(self._queues.setdefault(share.tenant, []), (number, key))

    def drop(self, key: K) -> None:
        """Remove a piece of work without charge; do nothing if it does not wait."""
        piece = self._pieces.pop(key, None)
        if piece is None:
            return
        queue = self._queues[piece.share.tenant]
        del queue[bisect.bisect_left(queue, (piece.number,))]
        if not queue:
            del self._queues[piece.share.tenant]

    def next(self) -> K | None:
        """Return the key of the next piece of work, without removing it."""
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
        """Remove a piece of work that is served, and charge its tenant."""
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
        """Yield all keys in service order; the queue must not change meanwhile."""
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
