"""Metrics of all processes of a service, collected at its controller."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from multiworld.serve.fleet.history import History
from multiworld.serve.fleet.state import Process
from multiworld.serve.fleet.totals import REMEMBERED, Totals
from multiworld.serve.transport.protocol import (
    Counted,
    FleetReport,
    Report,
    Reports,
    WorkerReport,
)

ASK_S = 1.0
"""Seconds to wait for the counts of a process; then its last known counts are used."""


class FleetMetrics:
    """Counts of all processes, including those that have exited."""

    def __init__(
        self,
        ask: Callable[[float], Awaitable[Reports]],
        processes: Mapping[str, Process],
        history: History,
    ) -> None:
        self._ask, self._processes, self._history = ask, processes, history
        self._totals = Totals()
        self._stages: dict[str, tuple[str, str, str]] = {}

    async def collect(self) -> Reports:
        reports = await self._ask(ASK_S)
        for name, worker in reports.workers.items():
            self.heard(name, Report(0, worker=worker))
        for name, gateway in reports.gateways.items():
            counted = reports.counted[name]
            self.heard(name, Report(0, gateway=gateway, counted=counted))
        self._totals.keep_apart(self._processes)
        while len(self._stages) > len(self._processes) + REMEMBERED:
            del self._stages[next(iter(self._stages))]
        return reports

    async def report(self, name: str, number: int) -> FleetReport:
        """Return the state of all processes for the metrics of gateway `name`."""
        reports = await self.collect()
        gateways = {
            other: report for other, report in reports.gateways.items() if other != name
        }
        return FleetReport(
            number,
            dict(self._history.kinds),
            reports.workers,
            gateways,
            (*self._totals.sums(without=name), *self._events()),
        )

    def _events(self) -> Iterator[Counted]:
        for labels, count in self._history.counts.items():
            yield "fleet_events", labels, count

    def heard(self, name: str, report: Report) -> None:
        """Store the counts of a process; the last ones may arrive after its exit."""
        if report.gateway is not None:
            self._totals.heard(name, report.counted)
        elif report.worker is not None and (stage := self._stage_of(name)):
            self._totals.heard(name, _counted(report.worker, stage))

    def _stage_of(self, name: str) -> tuple[str, str, str] | None:
        process = self._processes.get(name)
        if process is not None:
            stage = process.model, process.version, str(process.stage)
            self._stages[name] = stage
        return self._stages.get(name)

    def keep_tenants(self, names: Iterable[str]) -> None:
        self._totals.keep_tenants(set(names))


def _counted(report: WorkerReport, stage: tuple[str, ...]) -> Iterable[Counted]:
    for what, count in report.counts.items():
        yield f"stage_{what}", stage, count
    yield "stage_seconds", stage, report.computed_s
