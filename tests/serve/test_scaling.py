"""Autoscaling up, down and to zero, without a lost request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from multiworld.serve.controller.answers import DecisionsAnswer
from multiworld.serve.controller.fleet.entries import Assessment
from multiworld.serve.controller.scaling import default_policy
from multiworld.serve.controller.scaling.snapshot import Decision, Snapshot
from multiworld.serve.controller.scaling.snapshot_json import snapshot_from_json
from multiworld.serve.load.generator import Load, inference
from tests.serve.harness import Served, Traffic, body, served, spec_with, traffic
from tests.serve.models import SLOW

pytestmark = pytest.mark.timeout(240)

QUICK = {
    "min_replicas": 1,
    "max_replicas": 3,
    "target_ongoing_requests": 1.0,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2.0,
    "look_back_period_s": 2.0,
    "metrics_interval_s": 0.25,
}
ON_DEMAND = {**QUICK, "min_replicas": 0}


def stages(config: dict[str, Any], **second: Any) -> list[dict[str, Any]]:
    """Return stages; the second one computes one row at a time."""
    return [
        {"name": "double", "autoscaling_config": config},
        {"name": "add", "autoscaling_config": config, "max_batch_size": 1, **second},
        {"name": "square", "autoscaling_config": config},
    ]


async def test_stage_scales_up_and_down_with_its_load(tmp_path: Path) -> None:
    """A new controller continues from the state of one that was lost meanwhile."""
    # A replica that starts while the controller is away has to wait for the next one.
    spec = spec_with(m_stages=stages(QUICK), m_objective_ms=200, orphan_s=20.0)
    with served(tmp_path, spec) as service:
        assert service.stages() == [1, 1, 1]
        until = service.until
        async with traffic(service, 10.0), traffic(service, 75.0, SLOW):
            await asyncio.to_thread(
                until, lambda: service.stages()[1] == 3, "the second stage has three"
            )
            before = _ready(service)
            await asyncio.to_thread(service.kill_controller)
            await asyncio.to_thread(service.start)
            assert before.items() <= _ready(service).items(), "all are adopted"
            # Longer than the stabilization window for scaling down; nothing happens.
            await asyncio.sleep(QUICK["downscale_delay_s"] + 1.0)
            assert service.stages()[1] >= 2, "one does not carry it"
        async with traffic(service, 5.0):
            await asyncio.to_thread(
                until, lambda: service.stages() == [1, 1, 1], "one of each"
            )
        _decisions_can_be_replayed(service.folder / "state" / "decisions.jsonl")
        _every_answer_was_in_time_or_not(service)
        said = service.command("explain", "--state", str(service.state))
        assert "requests/s" in said["thoughts"][0]["what"]
        assert any("drain" in e.kind for e in service.events())
        assert not service.events("lost")


def _ready(service: Served) -> dict[str, int | None]:
    return {p.name: p.pid for p in service.status().processes if p.phase == "ready"}


def _every_answer_was_in_time_or_not(service: Served) -> None:
    gateway = service.status(reports=True).gateway_report("gateway/1")
    assert gateway is not None
    attained, missed = gateway.attained["m"], gateway.missed["m"]
    assert missed > 0, "one replica was too few at first"
    assert attained + missed == gateway.arrived["m"]


def _decisions_can_be_replayed(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    scaled = [line for line in lines if line["kind"] == "scaling"]
    assert len(scaled) >= 2
    for line in scaled:
        again = default_policy.decide(snapshot_from_json(line["snapshot"]))
        assert list(again.replicas) == line["facts"]["after"]


def test_no_replica_runs_without_requests(tmp_path: Path) -> None:
    """A model at zero replicas counts as healthy and ready."""
    spec = spec_with(m_stages=stages({**ON_DEMAND, "downscale_delay_s": 1.0}))
    with served(tmp_path, spec) as service:
        assert service.stages() == [0, 0, 0]
        assert httpx.get(f"{service.url}/health").status_code == 200
        answer = service.infer(1.0)
        assert answer.status_code == 200, answer.text
        service.until(lambda: service.stages() == [0, 0, 0], "nothing runs again")
        assert httpx.get(f"{service.url}/v2/models/m/ready").status_code == 200
        assert not service.events("lost")


@pytest.mark.heavy
async def test_no_more_is_started_than_there_is_room_for(tmp_path: Path) -> None:
    spec = spec_with(
        m_stages=stages({**QUICK, "max_replicas": 4}, cpus=0.5),
        machine={"name": "here", "cpus": 1},
    )
    with served(tmp_path, spec) as service:
        bodies = [json.dumps(body(1.0, SLOW)).encode()]
        load = Load(inference(service.url, "m", bodies), 120.0)
        running = asyncio.ensure_future(load.run())
        try:
            await asyncio.to_thread(
                service.until, lambda: service.stages()[1] == 2, "two can be placed"
            )
            await asyncio.to_thread(
                service.until,
                lambda: any("no room" in t.what for t in _thoughts(service)),
                "it is said",
            )
        finally:
            load.end()
            await running
        assert service.stages()[1] == 2
        assert not [s for s in load.samples if s.status not in (200, 429)]


def _thoughts(service: Served) -> tuple[Assessment, ...]:
    return service.ask("GET", "/decisions", DecisionsAnswer).thoughts


def two(snapshot: Snapshot) -> Decision:
    """Return two replicas for each stage: a scaling policy of a user."""
    return Decision(replicas=tuple(2 for _ in snapshot.stages), why="two, always")


@pytest.mark.heavy
async def test_policy_is_replaced_by_its_path(tmp_path: Path) -> None:
    spec = spec_with(m_stages=stages(QUICK), m_scaling="tests.serve.test_scaling:two")
    with served(tmp_path, spec) as service:
        made = Traffic(service, 20.0)
        running = asyncio.ensure_future(made.load.run())
        await asyncio.to_thread(
            service.until, lambda: service.stages() == [2, 2, 2], "two of each"
        )
        made.load.end()
        await running
        assert not made.bad
        assert "two, always" in service.events("scaled")[0].text


async def test_spare_takes_over_when_a_replica_dies(tmp_path: Path) -> None:
    """It is loaded already, and another one starts to take its place."""
    spared = [{"name": "double", "spares": 1}, {"name": "add"}, {"name": "square"}]
    with served(tmp_path, spec_with(m_stages=spared)) as service:

        def named(phase: str) -> list[str]:
            found = service.status().processes
            return [
                p.name for p in found if p.phase == phase and p.stage == 0 and p.model
            ]

        service.until(lambda: len(named("spare")) == 1, "a spare is loaded")
        (spare,) = named("spare")
        async with traffic(service, 20.0):
            await asyncio.to_thread(service.break_replica, "kill", "double")
            await asyncio.to_thread(
                service.until, lambda: named("ready") == [spare], "the spare is ready"
            )
            await asyncio.to_thread(
                service.until,
                lambda: len(named("spare")) == 1 and named("spare") != [spare],
                "there is another one",
            )
        taken = [e.text for e in service.events("ready") if "takes over" in e.text]
        assert taken == [f"{spare}, a spare, takes over"]
