"""Batching of work at a replica. Pure.

The work of a single tenant is taken in order of arrival, that of several tenants by
fair queueing. A batch is due when it is full, or when its oldest work has waited
``max_wait_s``, which is 0 by default. Only work of the same group runs together: its
tensors agree in names, dtypes and shapes, except for the batch and the ragged
dimension. A suspect runs in isolation. After the model has raised an error for a
request, its tenant's work shares no batch with other tenants' work for ``APART_S``,
because a batch with a failing request is computed again in parts.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

import msgspec

from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, FairQueue, Share
from multiworld.serve.wire.inference_messages import NOTHING_SPENT, Spent
from multiworld.serve.wire.origin import NOWHERE, Origin
from multiworld.serve.wire.protocol import Key

# Seconds after a failure during which a tenant's work shares no batch with other
# tenants' work.
APART_S = 30.0


# A msgspec struct, because each request creates and replaces one, which takes 8 us with
# a frozen dataclass.
class Work(msgspec.Struct, frozen=True, eq=False):
    """One attempt of a request, at one stage; times are monotonic seconds."""

    key: Key  # gateway, request and attempt
    group: Hashable  # work with equal groups may share a batch
    rows: int  # number of rows, which counts towards ``max_batch_size``
    deadline_at: float
    # Time at which it was queued: here for a batch, or to be sent to the next stage.
    arrived_at: float
    is_isolated: bool = False  # if True, it must be alone in its batch
    session: str | None = None  # work of the same session prefers the same replica
    # For a probe: the replica to use at each stage, by stage. None: this is no probe.
    via: dict[str, str] | None = None
    content: Any = None
    share: Share = DEFAULT_SHARE
    spent: Spent = NOTHING_SPENT  # time that it took at earlier stages
    origin: Origin = NOWHERE


class BatchQueue:
    """Queue of one replica; ``max_batch_size`` counts rows."""

    def __init__(self, max_batch_size: int, max_wait_s: float) -> None:
        self._max_rows, self._max_wait_s = max_batch_size, max_wait_s
        self._waiting: OrderedDict[Key, Work] = OrderedDict()
        self._probes: dict[Key, None] = {}  # keys of the probes in ``_waiting``
        self._fair: FairQueue[Key] = FairQueue()
        self._numbers = itertools.count()
        # By tenant: time until which its work shares no batch with other tenants' work.
        self._apart: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Work) -> None:
        """Queue ``work``; replace work with the same key."""
        self._waiting.pop(work.key, None)
        self._waiting[work.key] = work
        if work.via is not None:
            self._probes[work.key] = None
        self._fair.put(work.key, work.share, work.rows, next(self._numbers))

    @property
    def probes(self) -> int:
        """Number of waiting probes (no client sent them)."""
        return len(self._probes)

    def cancel(self, key: Key) -> Work | None:
        self._fair.drop(key)
        self._probes.pop(key, None)
        return self._waiting.pop(key, None)

    def _cancel_all(self, keys: list[Key]) -> list[Work]:
        return [work for key in keys if (work := self.cancel(key)) is not None]

    def cancel_of(self, gateway: str) -> list[Work]:
        return self._cancel_all([key for key in self._waiting if key[0] == gateway])

    def expired(self, now: float) -> list[Work]:
        """Remove and return the work whose deadline has passed."""
        return self._cancel_all(
            [w.key for w in self._waiting.values() if w.deadline_at <= now]
        )

    def failed(self, shares: set[Share], now: float, batches: int) -> None:
        """Keep the tenants of failed requests apart, and charge them for extra calls.

        ``batches``: number of calls of the model that the batch took.
        """
        self._apart = {t: until for t, until in self._apart.items() if until > now}
        for share in shares:
            if share.tenant:
                self._apart[share.tenant] = now + APART_S
            self._fair.charge(share, max(0, batches - 1) * self._max_rows / len(shares))

    def due_at(self) -> float | None:
        """Return when the next batch is due; None without work."""
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting.values()))
        return oldest.arrived_at + (0.0 if oldest.is_isolated else self._max_wait_s)

    def take_probe(self) -> list[Work]:
        first = next(iter(self._probes), None)
        work = self.cancel(first) if first is not None else None
        return [work] if work is not None else []

    def take(self, now: float) -> list[Work]:
        """Remove and return the next batch; empty if none is due."""
        due_at = self.due_at()
        if due_at is None:
            return []
        batch = self._fitting(now)
        rows = sum(work.rows for work in batch)
        if now < due_at and rows < self._max_rows:
            batch = self._full(now) if len(batch) < len(self._waiting) else []
        for work in batch:
            self._fair.take(work.key)
            self._probes.pop(work.key, None)
            del self._waiting[work.key]
        return batch

    def _full(self, now: float) -> list[Work]:
        """Return a full batch of any group; empty if there is none."""
        groups: dict[Hashable, list[Work]] = {}
        rows: Counter[Hashable] = Counter()
        for key in self._fair.order():
            work = self._waiting[key]
            group = self._group(work, now)
            if work.is_isolated or rows[group] + work.rows > self._max_rows:
                continue
            groups.setdefault(group, []).append(work)
            rows[group] += work.rows
            if rows[group] == self._max_rows:
                return groups[group]
        return []

    def _group(self, work: Work, now: float) -> Hashable:
        tenant = work.share.tenant
        return work.group, tenant if self._apart.get(tenant, 0.0) > now else ""

    def _fitting(self, now: float) -> list[Work]:
        waiting: Iterator[Work] = iter(self._waiting.values())
        if self._fair.is_shared:
            waiting = (self._waiting[key] for key in self._fair.order())
        # Probes skip the queue: queued work may be waiting for the replica that a probe
        # makes ready.
        probes = [self._waiting[key] for key in self._probes]
        waiting = itertools.chain(probes, (w for w in waiting if w.via is None))
        oldest = next(waiting)
        if oldest.is_isolated:
            return [oldest]
        group = self._group(oldest, now)
        batch: list[Work] = []
        rows = 0
        for work in itertools.chain([oldest], waiting):
            if work.is_isolated or self._group(work, now) != group:
                continue
            if batch and rows + work.rows > self._max_rows:
                break
            batch.append(work)
            rows += max(1, work.rows)
            if rows >= self._max_rows:
                break
        return batch
