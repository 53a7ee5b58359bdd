"""Metrics of all processes of a service, collected at its controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping

from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.start_order import StageKey
from multiworld.serve.controller.fleet.state import Process
from multiworld.serve.controller.observe.paces import Paces
from multiworld.serve.wire import control_messages as messages

ASK_S = 1.0  # seconds to wait for a process's report; then its previous one is used

Label = tuple[str, tuple[str, ...]]

# Kinds of counts whose first label is a tenant.
OF_TENANT = ("tenant_requests", "tenant_seconds", "refused")

# Kinds of events that alert rules count. Prometheus sees an increase only of a count
# that it has read before, so these are reported from 0 on.
ALERTED = ("rolled back", "quarantined", "changed", "node lost", "lost", "outgrown")

# Number of exited processes whose counts stay separate, so that a late last report can
# still replace the previous one.
REMEMBERED = 64


class Totals:
    """Sums of counts that processes report since their start; a sum never falls."""

    def __init__(self) -> None:
        # Last counts of each process. Exited ones are included: their names are never
        # reused.
        self._latest: dict[str, dict[Label, float]] = {}
        self._folded: Counter[Label] = Counter()

    def heard(self, name: str, counted: Iterable[messages.Counted]) -> None:
        # A process's last counts may arrive before an earlier answer of it.
        latest = self._latest.setdefault(name, {})
        for kind, labels, value in counted:
            latest[kind, labels] = max(value, latest.get((kind, labels), 0.0))

    def keep_apart(self, names: Container[str]) -> None:
        """Fold the counts of the earliest exited processes into one sum."""
        ended = [name for name in self._latest if name not in names]
        for name in ended[: max(0, len(ended) - REMEMBERED)]:
            for label, value in self._latest.pop(name).items():
                self._folded[label] += value  # type: ignore[assignment]

    def keep_tenants(self, names: Container[str]) -> None:
        counts: dict[Label, float]
        for counts in (self._folded, *self._latest.values()):  # type: ignore[assignment]
            for label in list(counts):
                kind, labels = label
                if kind in OF_TENANT and labels[0] and labels[0] not in names:
                    del counts[label]

    def sums(self, without: str = "") -> tuple[messages.Counted, ...]:
        sums = Counter(self._folded)
        for name, counts in self._latest.items():
            if name != without:
                for label, value in counts.items():
                    sums[label] += value  # type: ignore[assignment]
        return tuple((kind, labels, value) for (kind, labels), value in sums.items())


class FleetMetrics:
    def __init__(
        self,
        ask: Callable[[float], Awaitable[messages.Reports]],
        processes: Mapping[str, Process],
        history: History,
        paces: Callable[[], Paces] = Paces,
        unplaced: Callable[[], Iterable[StageKey]] = tuple,
    ) -> None:
        self._ask, self._processes, self._history = ask, processes, history
        self._paces, self._unplaced = paces, unplaced
        self._totals = Totals()
        self._stages: dict[str, tuple[str, str, str]] = {}

    async def collect(self) -> messages.Reports:
        reports = await self._ask(ASK_S)
        for name, worker in reports.workers.items():
            self.heard(name, messages.Report(0, worker=worker))
        for name, gateway in reports.gateways.items():
            counted = reports.counted[name]
            self.heard(name, messages.Report(0, gateway=gateway, counted=counted))
        self._totals.keep_apart(self._processes)
        while len(self._stages) > len(self._processes) + REMEMBERED:
            del self._stages[next(iter(self._stages))]
        return reports

    async def report(self, name: str, number: int) -> messages.FleetReport:
        reports = await self.collect()
        gateways = {
            other: report for other, report in reports.gateways.items() if other != name
        }
        counts = {**self._alerted(), **self._history.counts}
        events = [("fleet_events", labels, count) for labels, count in counts.items()]
        return messages.FleetReport(
            number,
            reports.workers,
            gateways,
            (*self._totals.sums(without=name), *events),
            self._paces().slow,
            self._paces().steps_s,
            tuple(sorted(set(map(_post_of, self._unplaced())))),
        )

    def _alerted(self) -> dict[tuple[str, str, str], int]:
        """Return 0 for each kind of event that alerts, and for each stage."""
        stages = {(p.model, str(p.stage)) for p in self._processes.values() if p.model}
        return {(kind, *of): 0 for of in (("", ""), *stages) for kind in ALERTED}

    def sums(self) -> tuple[messages.Counted, ...]:
        """Return the counts of all processes since the service started."""
        return self._totals.sums()

    def heard(self, name: str, report: messages.Report) -> None:
        """Store the counts of a process; its last counts may arrive after its exit."""
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


def _post_of(key: StageKey) -> tuple[str, str]:
    model, _, stage = key
    return (model, str(stage)) if model else ("", "")


def _counted(
    report: messages.WorkerReport, stage: tuple[str, ...]
) -> Iterable[messages.Counted]:
    for what, count in report.counts.items():
        yield f"stage_{what}", stage, count
    yield "stage_seconds", stage, report.computed_s
