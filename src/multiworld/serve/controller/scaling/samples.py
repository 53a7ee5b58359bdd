"""Samples for scaling policies, built from the reports of all processes. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from multiworld.serve.controller.scaling.snapshot import Sample, StageSeen
from multiworld.serve.wire.control_messages import (
    GatewayReport,
    Reports,
    WorkerReport,
)

R = TypeVar("R")

# Counters of a sample that are summed over the gateways.
COUNTED = (
    "arrived",
    "missed",
    "refused",
    "completions",
    "prompt_tokens",
    "generated_tokens",
)

PERIODS = 2.5  # look-back periods for which samples are kept


@dataclass(slots=True)
class _Stage:
    requests: int = 0
    batches: int = 0
    busy_s: float = 0.0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class ObservedReplica:
    name: str
    stage: int
    is_ready: bool


@dataclass(slots=True)
class SampleWindow:
    """Recent samples of one model."""

    model: str
    stages: int
    look_back_s: float
    samples: deque[Sample] = field(default_factory=deque)
    # Totals never decrease, although processes exit and count from their own start.
    _totals: list[_Stage] = field(default_factory=list)
    _sums: Counter[str] = field(default_factory=Counter)
    _last_counts: dict[str, tuple[float, ...]] = field(default_factory=dict)
    _gateways: dict[str, GatewayReport] = field(default_factory=dict)
    _workers: dict[str, WorkerReport] = field(default_factory=dict)
    _preexisting: set[str] | None = None

    def __post_init__(self) -> None:
        self._totals = [_Stage() for _ in range(self.stages)]

    def note(
        self,
        now: float,
        gateways: Sequence[str],
        replicas: Iterable[ObservedReplica],
        reports: Reports,
    ) -> Sample:
        """Add and return a sample; silent processes count with their last report."""
        replicas = list(replicas)
        known = {*gateways, *(replica.name for replica in replicas)}
        if self._preexisting is None:
            self._preexisting = known  # earlier counts of these are ignored
        self._gateways = _kept(self._gateways, reports.gateways, known)
        self._workers = _kept(self._workers, reports.workers, known)
        waiting = 0
        for name in gateways:
            gateway = self._gateways.get(name)
            if gateway is not None:
                waiting += gateway.pending.get(self.model, 0)
                counts = [getattr(gateway, what).get(self.model, 0) for what in COUNTED]
                more = self._increase(name, *map(float, counts))
                for what, count in zip(COUNTED, more, strict=True):
                    self._sums[what] += int(count)
        kv_usage = 0.0
        ongoing = [float(waiting), *([0.0] * self.stages)]
        ready = [0] * self.stages
        for replica in replicas:
            ready[replica.stage] += replica.is_ready
            worker = self._workers.get(replica.name)
            if worker is not None:
                at_work = worker.computing - worker.probing
                ongoing[replica.stage] += worker.queued + at_work
                ongoing[replica.stage + 1] += worker.waiting_for_next
                kv_usage = max(kv_usage, worker.kv_usage)
                self._add(replica, worker)
        for name in self._last_counts.keys() - known:
            del self._last_counts[name]
        seen = [
            StageSeen(
                ongoing=ongoing[k],
                ready=ready[k],
                requests=total.requests,
                batches=total.batches,
                busy_s=total.busy_s,
                rows=total.rows,
            )
            for k, total in enumerate(self._totals)
        ]
        sample = Sample(
            at=now,
            stages=tuple(seen),
            kv_usage=kv_usage,
            tokens=self._sums["tokens"],
            **{what: self._sums[what] for what in COUNTED},
        )
        self.samples.append(sample)
        while (
            len(self.samples) > 2
            and self.samples[1].at < now - PERIODS * self.look_back_s
        ):
            self.samples.popleft()
        return sample

    def _add(self, replica: ObservedReplica, worker: WorkerReport) -> None:
        counts = worker.counts
        requests, batches, busy_s, rows, tokens = self._increase(
            replica.name,
            counts.get("requests", 0),
            counts.get("batches", 0) + counts.get("steps", 0),
            worker.computed_s,
            counts.get("rows", 0),
            counts.get("tokens", 0),
        )
        total = self._totals[replica.stage]
        total.requests += int(requests)
        total.batches += int(batches)
        total.busy_s += busy_s
        total.rows += int(rows)
        self._sums["tokens"] += int(tokens)

    def _increase(self, name: str, *counts: float) -> tuple[float, ...]:
        """Return how much a process's counters grew since its last report."""
        is_older = self._preexisting is not None and name in self._preexisting
        nothing = counts if is_older else (0.0,) * len(counts)
        before = self._last_counts.get(name, nothing)
        self._last_counts[name] = counts
        return tuple(
            max(0.0, now - then) for now, then in zip(counts, before, strict=True)
        )


def _kept(before: dict[str, R], now: Mapping[str, R], known: set[str]) -> dict[str, R]:
    return {name: one for name, one in {**before, **now}.items() if name in known}
