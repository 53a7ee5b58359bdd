"""Our alert rules, tried by promtool on what a gateway shows as its service changes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.state import Process
from multiworld.serve.controller.fleet_metrics import FleetMetrics
from multiworld.serve.gateway.http.metrics import render
from multiworld.serve.wire.control_messages import FleetReport, Reports
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)
from tests.serve.harness import ROOT

RULES = ROOT / "examples" / "monitoring" / "alerts.yaml"
PROMTOOL = shutil.which("promtool")
SCRAPE_S = 15
READY, STARTING, DRAINING = (
    ReplicaState.READY,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
)

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(PROMTOOL is None, reason="there is no Prometheus here"),
]

Shown = dict[str, float]  # what one scrape finds, by the name of the series


def scraped(report: FleetReport, table: RoutingTable) -> Shown:
    sums: dict[tuple[str, tuple[str, ...]], float] = {}
    for kind, labels, value in report.others:
        sums[kind, labels] = sums.get((kind, labels), 0.0) + value
    text = render(sums, {}, report, table).decode()
    pairs = (
        line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("multi")
    )
    return {name: float(value) for name, value in pairs}


def stage(*replicas: tuple[str, ReplicaState], active: str = "1") -> Shown:
    """Return what is shown of a stage, whose replicas have versions and states."""
    known = {
        f"m/0/{n}": Replica(f"m/0/{n}", "m", version, 0, state)
        for n, (version, state) in enumerate(replicas)
    }
    versions = dict.fromkeys([active, *(version for version, _ in replicas)], 1)
    table = RoutingTable(1, ("g",), {"m": Route(active, versions)}, known)
    return scraped(FleetReport(), table)


def fires(alert: str, snapshots: Sequence[tuple[int, Shown]], folder: Path) -> bool:
    """Return whether an alert fires at the end of ``snapshots``, each with scrapes."""
    every = [shown for count, shown in snapshots for _ in range(count)]
    names = sorted({name for shown in every for name in shown})
    series = [
        {
            "series": name,
            "values": " ".join(str(shown.get(name, "stale")) for shown in every),
        }
        for name in names
    ]
    at_s = SCRAPE_S * (len(every) - 1)
    expected = {"eval_time": f"{at_s}s", "alertname": alert, "exp_alerts": []}
    test: dict[str, Any] = {
        "interval": f"{SCRAPE_S}s",
        "input_series": series,
        "alert_rule_test": [expected],
    }
    file = folder / "test.yaml"
    found = {
        "rule_files": [str(RULES)],
        "evaluation_interval": f"{SCRAPE_S}s",
        "tests": [test],
    }
    file.write_text(yaml.safe_dump(found))
    command = [str(PROMTOOL), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or f"alertname: {alert}" in done.stdout + done.stderr
    return done.returncode != 0


@pytest.mark.parametrize(
    ("replicas", "active", "is_alarming"),
    [
        ((), "1", True),  # its replica is lost, and no other finds room
        ((("1", STARTING),), "1", True),
        ((("1", READY), ("2", STARTING)), "1", False),  # an update loads
        ((("1", DRAINING), ("2", READY)), "2", False),  # long streams end
        ((("1", READY), ("1", STARTING)), "1", False),
    ],
)
def test_stage_is_empty_if_its_active_version_has_no_ready_replica(
    replicas: tuple[tuple[str, ReplicaState], ...],
    active: str,
    is_alarming: bool,
    tmp_path: Path,
) -> None:
    before = stage(("1", READY))
    now = stage(*replicas, active=active)
    snapshots = [(4, before), (12, now)]
    assert fires("MultiworldStageEmpty", snapshots, tmp_path) == is_alarming
    after = [*snapshots, (8, before)]
    assert not fires("MultiworldStageEmpty", after, tmp_path)


@pytest.mark.parametrize("kind", ["rolled back", "quarantined", "changed", "node lost"])
async def test_first_event_that_needs_a_person_alerts(
    kind: str, tmp_path: Path
) -> None:
    history = History()

    async def reports(limit_s: float) -> Reports:
        return Reports()

    processes = {"m/0/1": Process("m/0/1", "m", "1", 0)}
    metrics, table = FleetMetrics(reports, processes, history), RoutingTable()
    before = scraped(await metrics.report("g", 1), table)
    history.say(kind, "m: a reason")
    after = scraped(await metrics.report("g", 2), table)
    alert = "MultiworldNeedsAPerson"
    assert not fires(alert, [(8, before)], tmp_path)
    assert fires(alert, [(8, before), (4, after)], tmp_path)
    assert not fires(alert, [(8, before), (70, after)], tmp_path)


def test_replica_without_room_alerts_until_it_has_some(tmp_path: Path) -> None:
    table = RoutingTable()
    before = scraped(FleetReport(), table)
    now = scraped(FleetReport(unplaced=(("m", "0"), ("", ""))), table)
    alert = "MultiworldUnplaced"
    assert fires(alert, [(4, before), (5, now)], tmp_path)
    assert not fires(alert, [(4, before), (5, now), (20, before)], tmp_path)
