"""Metrics at the controller, summed for a gateway over all other processes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.state import Process
from multiworld.serve.controller.fleet_metrics import (
    ALERTED,
    REMEMBERED,
    FleetMetrics,
    Totals,
)
from multiworld.serve.wire.control_messages import (
    Counted,
    GatewayReport,
    Report,
    Reports,
    WorkerReport,
)
from tests.memory import objects_in
from tests.unit.inner_state import apart_count


def alerted(model: str, stage: str) -> list[Counted]:
    return [("fleet_events", (kind, model, stage), 0) for kind in sorted(ALERTED)]


class Fleet:
    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.reports = Reports()
        self.history = History()
        self.metrics = FleetMetrics(self.ask, self.processes, self.history)

    async def ask(self, limit_s: float) -> Reports:
        return self.reports

    def gateway(self, name: str, count: float) -> None:
        self.processes[name] = Process(name)
        counted: tuple[Counted, ...] = (("requests", ("m", "200"), count),)
        self.reports.gateways[name] = GatewayReport(in_flight=1)
        self.reports.counted[name] = counted

    def replica(self, name: str, count: int) -> None:
        self.processes[name] = Process(name, "m", "1", 0)
        report = WorkerReport(counts={"requests": count}, computed_s=0.5)
        self.reports.workers[name] = report

    def end(self, name: str) -> None:
        del self.processes[name]
        self.reports.gateways.pop(name, None)
        self.reports.workers.pop(name, None)


async def test_gateway_gets_the_sums_of_all_others() -> None:
    fleet = Fleet()
    fleet.gateway("g1", 1)
    fleet.gateway("g2", 10)
    fleet.gateway("g3", 100)
    fleet.replica("a", 7)
    fleet.replica("b", 70)
    await fleet.metrics.collect()
    fleet.end("g3")
    fleet.end("b")
    report = await fleet.metrics.report("g1", 5)
    assert report.number == 5
    assert report.gateways == {"g2": GatewayReport(in_flight=1)}
    assert report.replicas.keys() == {"a"}
    assert sorted(report.others) == [
        *sorted(alerted("", "") + alerted("m", "0")),
        ("requests", ("m", "200"), 110.0),
        ("stage_requests", ("m", "1", "0"), 77.0),
        ("stage_seconds", ("m", "1", "0"), 1.0),
    ]
    assert (await fleet.metrics.report("g2", 6)).others[0][2] in (101.0, 77.0)


async def test_events_that_alert_are_counted_from_zero() -> None:
    """Prometheus sees no increase of a count that begins at 1."""
    fleet = Fleet()
    fleet.replica("m/0/1", 7)
    fleet.history.say("rolled back", "m: to version 1")
    fleet.history.say("lost", "m/0/1: SIGKILL", "m/0/1")
    report = await fleet.metrics.report("g", 1)
    events = {labels: n for kind, labels, n in report.others if kind == "fleet_events"}
    assert events.pop(("rolled back", "", "")) == 1
    assert events.pop(("lost", "m", "0")) == 1
    assert events[("quarantined", "", "")] == events[("outgrown", "m", "0")] == 0
    assert not any(events.values())


async def test_stages_without_room_are_reported_until_they_have_some() -> None:
    history, unplaced = History(), [("m", "1", 0), ("m", "2", 0), ("", "", 0)]
    fleet = Fleet()
    made = FleetMetrics(fleet.ask, {}, history, unplaced=lambda: unplaced)
    assert (await made.report("g", 1)).unplaced == (("", ""), ("m", "0"))
    unplaced.clear()
    assert (await made.report("g", 2)).unplaced == ()


async def test_process_that_does_not_answer_counts_with_its_last_report() -> None:
    """It may hang, and sums must not fall."""
    fleet = Fleet()
    fleet.gateway("g1", 1)
    fleet.gateway("g2", 10)
    await fleet.metrics.collect()
    del fleet.reports.gateways["g2"]
    report = await fleet.metrics.report("g1", 1)
    others = sorted(report.others)
    assert others == [*alerted("", ""), ("requests", ("m", "200"), 10.0)]


async def test_last_report_of_a_process_counts_after_its_end() -> None:
    """The report and the news of the exit use different connections."""
    fleet = Fleet()
    fleet.replica("a", 7)
    fleet.gateway("g", 1)
    await fleet.metrics.collect()
    fleet.end("a")
    last = WorkerReport(counts={"requests": 9})
    for name in ("a", "never known"):
        fleet.metrics.heard(name, Report(0, worker=last))
    found = {
        kind: value for kind, _, value in (await fleet.metrics.report("g", 1)).others
    }
    assert found.pop("fleet_events") == 0
    assert found == {"stage_requests": 9.0, "stage_seconds": 0.5}


async def test_little_is_kept_of_processes_that_have_ended() -> None:
    fleet = Fleet()
    sizes = []
    for part in range(1, 4):
        for number in range(REMEMBERED):
            name = f"{part}/{number}"
            fleet.replica(name, 1)
            await fleet.metrics.collect()
            fleet.end(name)
        await fleet.metrics.collect()
        report = await fleet.metrics.report("g", 1)
        sums = {kind: value for kind, _, value in report.others}
        assert sums["stage_requests"] == part * REMEMBERED
        sizes.append(objects_in(fleet.metrics))
    assert sizes[2] == sizes[1]


def summed(totals: Totals, without: str = "") -> dict[tuple[str, ...], float]:
    return {(kind, *labels): value for kind, labels, value in totals.sums(without)}


def test_latest_counts_of_all_processes_are_added_up() -> None:
    totals = Totals()
    totals.heard("a", [("requests", ("m", "200"), 1), ("requests", ("m", "500"), 2)])
    totals.heard("b", [("requests", ("m", "200"), 10)])
    totals.heard("a", [("requests", ("m", "200"), 5), ("requests", ("m", "500"), 2)])
    assert summed(totals) == {
        ("requests", "m", "200"): 15,
        ("requests", "m", "500"): 2,
    }
    assert summed(totals, without="a") == {("requests", "m", "200"): 10}


def test_last_counts_of_a_process_may_come_after_its_end() -> None:
    totals = Totals()
    totals.heard("a", [("rows", (), 1)])
    totals.keep_apart({})
    totals.heard("a", [("rows", (), 3)])
    assert summed(totals) == {("rows",): 3}


def test_answer_that_was_under_way_replaces_no_last_counts() -> None:
    totals = Totals()
    totals.heard("a", [("rows", (), 3), ("failed", (), 1)])
    totals.heard("a", [("rows", (), 2)])
    assert summed(totals) == {("rows",): 3, ("failed",): 1}


@given(
    st.lists(st.tuples(st.integers(0, 300), st.booleans()), min_size=100, max_size=400)
)
def test_sums_never_fall_and_few_processes_are_remembered(
    steps: list[tuple[int, bool]],
) -> None:
    totals = Totals()
    alive: dict[str, int] = {}
    ended: set[str] = set()
    expected = before = 0.0
    for number, is_end in steps:
        name = str(number)
        if is_end and name in alive:
            del alive[name]
            ended.add(name)
        elif name not in ended:
            alive[name] = alive.get(name, 0) + 1
            expected += 1
            totals.heard(name, [("rows", (), alive[name])])
        totals.keep_apart(alive)
        now = summed(totals).get(("rows",), 0.0)
        assert now == expected >= before
        before = now
        assert apart_count(totals) <= len(alive) + REMEMBERED


def test_tenants_that_do_not_exist_any_more_are_forgotten() -> None:
    totals = Totals()
    counts = [
        ("tenant_requests", ("acme", "m", "200"), 1.0),
        ("tenant_seconds", ("acme", "m"), 1.0),
        ("refused", ("acme", "rpm_limit"), 1.0),
        ("refused", ("", "no key"), 1.0),
        ("tenant_requests", ("beta", "m", "200"), 1.0),
        ("requests", ("acme", "200"), 1.0),
    ]
    for number in range(REMEMBERED + 1):
        totals.heard(str(number), counts)
    totals.keep_apart({})
    totals.keep_tenants({"beta"})
    assert summed(totals).keys() == {
        ("refused", "", "no key"),
        ("tenant_requests", "beta", "m", "200"),
        ("requests", "acme", "200"),
    }
