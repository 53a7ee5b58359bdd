"""Batches of one replica, and their counts. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.deadlines import HUNG_S, OVERDUE_S
from multiworld.serve.replica.batches.batch_queue import Work
from multiworld.serve.wire import control_messages as messages


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that are computed together."""

    works: list[Work]
    # It failed on the event loop, so that it is repeated in the stage's thread.
    has_failed: bool = False
    began_at: float = 0.0  # monotonic time of its start; 0 before
    # Calls of the model before this batch. A batch may take several calls: if one
    # fails, its requests are computed in smaller parts.
    calls_before: int = 0
    wanted_at: float = 0.0  # monotonic time at which a client last waited for it
    _calls: int = 0  # number of the latest call of the model that a check has seen
    _called_at: float = 0.0  # monotonic time at which a check first saw that call

    @property
    def rows(self) -> int:
        return sum(work.rows for work in self.works)

    @property
    def is_isolated(self) -> bool:
        return self.works[0].is_isolated

    def begin(self, now: float, calls: int) -> None:
        self.began_at = self.wanted_at = now
        self.calls_before, self._calls = calls, calls + 1

    def is_hung(
        self,
        now: float,
        # Monotonic time at which this process last resumed after a pause.
        resumed_at: float,
        calls: int,  # number of calls of the model so far
        compute_s: float | None,  # maximum seconds of a call, from the spec
        # Deadlines of the requests that clients still wait for.
        deadlines: Sequence[float],
    ) -> bool:
        if calls > self._calls:
            self._calls, self._called_at = calls, now
        running_s = now - max(self.began_at, self._called_at, resumed_at)
        if compute_s is not None:
            return running_s > compute_s
        if deadlines:
            self.wanted_at = now
        last = max(deadlines, default=self.wanted_at)
        return running_s > HUNG_S and now - max(last, resumed_at) > OVERDUE_S


class BatchCounts:
    """Counts and histograms of all batches since the replica started."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.computed_s = 0.0
        self.rows = [0] * (len(messages.ROWS_BOUNDS) + 1)
        self.seconds = [0] * (len(messages.SECONDS_BOUNDS) + 1)

    def add(self, batch: Batch, took_s: float) -> None:
        rows = batch.rows
        self.computed_s += took_s
        self.events["batches"] += 1
        self.events["rows"] += rows
        self.events["requests"] += len(batch.works)
        self.rows[bisect_left(messages.ROWS_BOUNDS, rows)] += 1
        self.seconds[bisect_left(messages.SECONDS_BOUNDS, took_s)] += 1
