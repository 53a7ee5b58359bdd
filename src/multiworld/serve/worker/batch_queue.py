"""Which pieces of work run together, and when. Pure.

Work waits in arrival order, or in that of fair shares where it is that of several
tenants. A batch is due when it is full, when its oldest has waited ``max_wait_s``, or
when the replica would idle otherwise and no wait was asked for. Only work of the same
group (names, dtypes and shapes but for the batch and the ragged dimension) runs
together; a suspect runs alone.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, FairQueue, Share

Key = tuple[str, int, int]
"""Router, number of the request, number of the attempt."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One attempt at one request, at one stage.

    Attributes:
        key: Whose it is.
        group: What can run together is equal here.
        rows: How much of ``max_batch_size`` it takes.
        deadline_at: When its answer is worth nothing any more.
        arrived_at: When this replica got it.
        is_solo: It runs alone.
        session: What keeps it at one replica of a stateful stage.
        via: Replicas that a probe must go through, by stage.
        content: The tensors; not looked at here.
        share: Whose it is.
    """

    key: Key
    group: Hashable
    rows: int
    deadline_at: float
    arrived_at: float
    is_solo: bool = False
    session: str | None = None
    via: dict[str, str] | None = None
    content: Any = None
    share: Share = DEFAULT_SHARE


class BatchQueue:
    """The queue of one replica.

    Args:
        max_batch_size: Most rows in a batch.
        max_wait_s: How long the oldest may wait for company.
    """

    def __init__(self, max_batch_size: int, max_wait_s: float) -> None:
        self._max_rows, self._max_wait_s = max_batch_size, max_wait_s
        self._waiting: OrderedDict[Key, Work] = OrderedDict()
        self._fair: FairQueue[Key] = FairQueue()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, work: Work) -> None:
        """Queue ``work``."""
        self._waiting.pop(work.key, None)
        self._waiting[work.key] = work
        self._fair.put(work.key, work.share, work.rows, next(self._numbers))

    @property
    def probes(self) -> int:
        """How many of those that wait are probes, which nobody asked for."""
        return sum(work.via is not None for work in self._waiting.values())

    def cancel(self, key: Key) -> Work | None:
        """Forget work that nobody wants any more; None if it does not wait here."""
        self._fair.drop(key)
        return self._waiting.pop(key, None)

    def _cancel_all(self, keys: list[Key]) -> list[Work]:
        return [work for key in keys if (work := self.cancel(key)) is not None]

    def cancel_of(self, router: str) -> list[Work]:
        """Forget all work of one router."""
        return self._cancel_all([key for key in self._waiting if key[0] == router])

    def expired(self, now: float) -> list[Work]:
        """Take out what is past its deadline."""
        return self._cancel_all(
            [w.key for w in self._waiting.values() if w.deadline_at <= now]
        )

    def due_at(self) -> float | None:
        """Return when the next batch is due if nothing more comes; None if never."""
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting.values()))
        return oldest.arrived_at + (0.0 if oldest.is_solo else self._max_wait_s)

    def take(self, now: float) -> list[Work]:
        """Return the next batch if one is due; nothing otherwise."""
        due_at = self.due_at()
        if due_at is None:
            return []
        batch = self._fitting()
        is_full = sum(work.rows for work in batch) >= self._max_rows
        if now < due_at and not is_full:
            return []
        for work in batch:
            self._fair.take(work.key)
            del self._waiting[work.key]
        return batch

    def _fitting(self) -> list[Work]:
        """Return what would run with the one whose turn it is, in order."""
        everything: Iterable[Work] = self._waiting.values()
        if self._fair.is_shared:
            everything = [self._waiting[key] for key in self._fair.order()]
        oldest = next(iter(everything))
        if oldest.is_solo:
            return [oldest]
        batch: list[Work] = []
        rows = 0
        for work in everything:
            if work.is_solo or work.group != oldest.group:
                continue
            if batch and rows + work.rows > self._max_rows:
                break
            batch.append(work)
            rows += max(1, work.rows)
            if rows >= self._max_rows:
                break
        return batch
