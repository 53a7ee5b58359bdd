"""From what processes report to the samples that a policy is asked with. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from multiworld.serve.scaling.snapshot import Sample, StageSeen
from multiworld.serve.transport.protocol import GatewayReport, Reports, WorkerReport

R = TypeVar("R")

PERIODS = 2.5
"""Samples of so many look-back periods are kept."""


@dataclass(slots=True)
class _Stage:
    requests: int = 0
    batches: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ObservedReplica:
    """A replica of the model: its stage, and whether it is ready."""

    name: str
    stage: int
    is_ready: bool


@dataclass(slots=True)
class SampleWindow:
    """The samples of one model.

    Processes count from their own start, and may be lost: sums go on over all of them.
    """

    model: str
    stages: int
    look_back_s: float
    samples: deque[Sample] = field(default_factory=deque)
    _totals: list[_Stage] = field(default_factory=list)
    _arrived: int = 0
    _missed: int = 0
    _refused: int = 0
    _before: dict[str, tuple[float, ...]] = field(default_factory=dict)
    _gateways: dict[str, GatewayReport] = field(default_factory=dict)
    _workers: dict[str, WorkerReport] = field(default_factory=dict)
    _older: set[str] | None = None

    def __post_init__(self) -> None:
        """Begin at nothing."""
        self._totals = [_Stage() for _ in range(self.stages)]

    def note(
        self,
        now: float,
        gateways: Sequence[str],
        replicas: Iterable[ObservedReplica],
        reports: Reports,
    ) -> Sample:
        """Take note of what everybody reports; who does not answer is as before."""
        replicas = list(replicas)
        known = {*gateways, *(replica.name for replica in replicas)}
        if self._older is None:
            self._older = known  # what these counted before is no news
        self._gateways = _kept(self._gateways, reports.gateways, known)
        self._workers = _kept(self._workers, reports.workers, known)
        waiting = 0
        for name in gateways:
            gateway = self._gateways.get(name)
            if gateway is not None:
                waiting += gateway.pending.get(self.model, 0)
                arrived = float(gateway.arrived.get(self.model, 0))
                missed = float(gateway.missed.get(self.model, 0))
                refused = float(gateway.refused.get(self.model, 0))
                more = self._more(name, arrived, missed, refused)
                self._arrived += int(more[0])
                self._missed += int(more[1])
                self._refused += int(more[2])
        ongoing = [float(waiting), *([0.0] * self.stages)]
        ready = [0] * self.stages
        for replica in replicas:
            ready[replica.stage] += replica.is_ready
            worker = self._workers.get(replica.name)
            if worker is not None:
                at_work = worker.computing - worker.probing
                ongoing[replica.stage] += worker.queued + at_work
                ongoing[replica.stage + 1] += worker.waiting_for_next
                self._add(replica, worker)
        for name in self._before.keys() - known:
            del self._before[name]
        seen = [
            StageSeen(
                ongoing=ongoing[k],
                ready=ready[k],
                requests=total.requests,
                batches=total.batches,
                busy_s=total.busy_s,
            )
            for k, total in enumerate(self._totals)
        ]
        sample = Sample(
            at=now,
            arrived=self._arrived,
            stages=tuple(seen),
            missed=self._missed,
            refused=self._refused,
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
        requests, batches, busy_s = self._more(
            replica.name,
            counts.get("requests", 0),
            counts.get("batches", 0),
            worker.computed_s,
        )
        total = self._totals[replica.stage]
        total.requests += int(requests)
        total.batches += int(batches)
        total.busy_s += busy_s

    def _more(self, name: str, *counts: float) -> tuple[float, ...]:
        """Return what was added since the last report."""
        is_older = self._older is not None and name in self._older
        nothing = counts if is_older else (0.0,) * len(counts)
        before = self._before.get(name, nothing)
        self._before[name] = counts
        return tuple(
            max(0.0, now - then) for now, then in zip(counts, before, strict=True)
        )


def _kept(before: dict[str, R], now: Mapping[str, R], known: set[str]) -> dict[str, R]:
    """Return the latest report of each process that is still known."""
    return {name: one for name, one in {**before, **now}.items() if name in known}
