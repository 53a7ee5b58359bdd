"""Weighted fair queueing between tenants. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). A tenant's finish tag is
a virtual time that advances by cost / weight with every piece of its work that is
served. A tenant's start tag is the later of its finish tag and the current virtual
time, which is the start tag of the piece served last. The tenant with the earliest
start tag is served next. So a tenant with a long queue gets only its share, a tenant
that seldom sends work is served soon, and unused shares go to the other tenants.

Unlike in the paper, a tenant is charged when its work is served, not when it arrives:
withdrawn work costs nothing.
"""

from __future__ import annotations

import bisect
import copy
import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Annotated, Generic, NamedTuple, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)

# With more finish tags than this, drop those that the virtual time has reached.
PRUNE_AT = 1024
MIN_COST = 1.0  # without a minimum, work without rows would be free
SPARE = 64  # outdated heap entries to tolerate beyond the number of waiting tenants


class Share(NamedTuple):
    """Tenant of a piece of work, and its weight."""

    tenant: str = ""  # "" for clients without a key
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    priority: int = 0  # work of a higher priority is always served first


DEFAULT_SHARE = Share()  # for clients without a key


@dataclass(frozen=True, slots=True)
class _Piece:
    share: Share
    cost: float
    number: int


class _Head(NamedTuple):
    """First waiting piece of a tenant; the smallest head is served first."""

    rank: int  # the tenant's priority, negated
    finish: float  # finish tag of the tenant
    number: int  # number of the piece
    since: int  # number of the tenant, in the order in which tenants began to wait
    tenant: str


class _Schedule:
    """Virtual times, finish tags, and the order of the waiting tenants.

    Each priority has its own virtual time: if priorities shared one, serving a tenant
    of a higher priority would make the heads of all other tenants due.
    """

    def __init__(self) -> None:
        self._virtual_times: dict[int, float] = {}  # by rank
        self._finish_tags: dict[tuple[int, str], float] = {}
        self._prune_at = PRUNE_AT
        # A heap entry that is no longer the head of its tenant is dropped when it
        # reaches the top. ``_due`` holds the heads whose finish tag the virtual time
        # has reached: all have the same start tag, so their piece numbers order them.
        self._heads: dict[str, _Head] = {}
        self._later: list[_Head] = []
        self._due: list[tuple[int, int, int, _Head]] = []
        self._arrived = 0

    def copy(self) -> _Schedule:
        made = copy.copy(self)
        made._finish_tags, made._heads = self._finish_tags.copy(), self._heads.copy()
        made._virtual_times = self._virtual_times.copy()
        made._later, made._due = self._later.copy(), self._due.copy()
        return made

    def put(self, tenant: str, priority: int, number: int) -> None:
        """Set the first waiting piece of a tenant."""
        known = self._heads.get(tenant)
        if known is None:
            self._arrived += 1
        since = self._arrived if known is None else known.since
        finish = self._finish_tags.get((-priority, tenant), 0.0)
        head = _Head(-priority, finish, number, since, tenant)
        if head == known:
            return
        self._heads[tenant] = head
        if len(self._later) + len(self._due) > 2 * len(self._heads) + SPARE:
            self._later, self._due = list(self._heads.values()), []
            heapq.heapify(self._later)
        else:
            heapq.heappush(self._later, head)

    def remove(self, tenant: str) -> None:
        """Remove a tenant that has no waiting work."""
        del self._heads[tenant]

    def _virtual_time(self, rank: int) -> float:
        return self._virtual_times.get(rank, 0.0)

    def charge(self, tenant: str, priority: int, amount: float) -> None:
        """Advance a served tenant's finish tag; call ``put`` or ``remove`` next."""
        key = -priority, tenant
        finish = self._finish_tags.get(key, 0.0)
        now = max(self._virtual_time(-priority), finish)
        self._virtual_times[-priority] = now
        self._finish_tags[key] = now + amount
        if len(self._finish_tags) > self._prune_at:
            self._finish_tags = {
                key: end
                for key, end in self._finish_tags.items()
                if end > self._virtual_time(key[0])
            }
            self._prune_at = max(PRUNE_AT, 2 * len(self._finish_tags))

    def first(self) -> str | None:
        """Return the tenant to serve next; None if none waits."""
        heads, later, due = self._heads, self._later, self._due
        while later:
            head = later[0]
            is_current = heads.get(head.tenant) == head
            if is_current and head.finish > self._virtual_time(head.rank):
                break
            heapq.heappop(later)
            if is_current:
                heapq.heappush(due, (head.rank, head.number, head.since, head))
        while due and heads.get(due[0][3].tenant) != due[0][3]:
            heapq.heappop(due)
        if due and (not later or due[0][0] <= later[0].rank):
            return due[0][3].tenant
        return later[0].tenant if later else None


class FairQueue(Generic[K]):
    """Queue of all tenants' work, in fair order."""

    def __init__(self) -> None:
        self._schedule = _Schedule()
        self._pieces: dict[K, _Piece] = {}
        self._queues: dict[str, list[tuple[int, K]]] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def is_shared(self) -> bool:
        """True if work of several tenants waits."""
        return len(self._queues) > 1

    def put(self, key: K, share: Share, cost: float, number: int) -> None:
        """Queue a piece of work; replace waiting work that has the same key."""
        self.drop(key)
        self._pieces[key] = _Piece(share, max(cost, MIN_COST), number)
        queue = self._queues.setdefault(share.tenant, [])
        # ``number`` is unique and orders a tenant's work.
        bisect.insort(queue, (number, key))
        if queue[0][0] == number:
            self._put_head(self._schedule, share.tenant, queue[0][1])

    def drop(self, key: K) -> None:
        """Remove a piece of work without charge; do nothing if it does not wait."""
        piece = self._pieces.pop(key, None)
        if piece is None:
            return
        tenant = piece.share.tenant
        queue = self._queues[tenant]
        del queue[bisect.bisect_left(queue, (piece.number,))]
        if queue:
            self._put_head(self._schedule, tenant, queue[0][1])
        else:
            del self._queues[tenant]
            self._schedule.remove(tenant)

    def _put_head(self, schedule: _Schedule, tenant: str, key: K) -> None:
        piece = self._pieces[key]
        schedule.put(tenant, piece.share.priority, piece.number)

    def _charge(self, schedule: _Schedule, piece: _Piece) -> None:
        share = piece.share
        schedule.charge(share.tenant, share.priority, piece.cost / share.weight)

    def next(self) -> K | None:
        """Return the key of the next piece of work, without removing it."""
        tenant = self._schedule.first()
        return None if tenant is None else self._queues[tenant][0][1]

    def take(self, key: K) -> None:
        """Remove a piece of work to serve it, and charge its tenant."""
        piece = self._pieces[key]
        self._charge(self._schedule, piece)
        self.drop(key)

    def charge(self, share: Share, cost: float) -> None:
        """Charge a tenant an additional cost for work that was taken."""
        tenant = share.tenant
        self._schedule.charge(tenant, share.priority, cost / share.weight)
        if queue := self._queues.get(tenant):
            self._put_head(self._schedule, tenant, queue[0][1])

    def order(self) -> Iterator[K]:
        """Yield all keys in service order; the queue must not change meanwhile."""
        if not self.is_shared:
            for queue in self._queues.values():
                yield from (key for _, key in queue)
            return
        self._schedule.first()  # moves due heads once, instead of in each copy
        schedule, positions = self._schedule.copy(), dict.fromkeys(self._queues, 0)
        while (tenant := schedule.first()) is not None:
            queue, position = self._queues[tenant], positions[tenant]
            _, key = queue[position]
            piece = self._pieces[key]
            self._charge(schedule, piece)
            positions[tenant] = position + 1
            if position + 1 < len(queue):
                self._put_head(schedule, tenant, queue[position + 1][1])
            else:
                schedule.remove(tenant)
            yield key
