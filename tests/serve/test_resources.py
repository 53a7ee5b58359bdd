"""Declared resources, which are booked and limited, and replicas without room."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from multiworld.config import MIB
from multiworld.errors import PlacementError, ServeError
from multiworld.serve.machines.amounts import Location, Need
from multiworld.serve.machines.assignment import Plan
from multiworld.serve.machines.bookings import Bookings
from tests.serve.harness import (
    ROOT,
    WAIT_S,
    Served,
    body,
    served,
    spec_with,
    traffic,
)
from tests.serve.models import GROW, expected

pytestmark = pytest.mark.timeout(240)

LIMIT_MB = 200
STAGES = [
    {"name": "double"},
    {"name": "add", "replicas": 2, "memory_mb": LIMIT_MB, "cpus": 0.25},
    {"name": "square", "memory_mb": 100},
]
MACHINE = {"name": "here", "cpus": 1, "memory_mb": 1000}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    spec = spec_with(m_stages=STAGES, machine=MACHINE)
    with served(tmp_path_factory.mktemp("resources"), spec) as found:
        yield found


async def test_replica_that_outgrows_its_memory_is_ended_and_named(
    service: Served,
) -> None:
    booked = {
        row["name"]: row["booked_memory_bytes"]
        for row in service.command("resources", "--state", str(service.state))[
            "replicas"
        ]
    }
    assert sorted(booked.values()) == [0, 100 * MIB, 200 * MIB, 200 * MIB]
    async with traffic(service):
        answer = await asyncio.to_thread(service.infer, 1.0, GROW)
        await asyncio.to_thread(
            service.until, lambda: service.stages() == [1, 2, 1], "all are back"
        )
    assert answer.status_code == 500, answer.text
    assert "2 replicas died" in answer.text
    ended = {e.name for e in service.events("outgrown")}
    # Twice in company, as the stage is quick at first, perhaps hedged; twice alone.
    assert 2 <= len(ended) <= 7
    assert all(name.startswith("m/1/") for name in ended)
    text = service.events("outgrown")[0].text
    assert f"books {LIMIT_MB} MiB" in text
    lost = {e.name for e in service.events("lost")}
    assert lost == ended, "nobody else was ended"
    _nothing_is_over_committed(service)


def _nothing_is_over_committed(service: Served) -> None:
    (node,) = service.command("nodes", "--state", str(service.state))
    assert node["name"] == "here"
    assert node["free_memory_bytes"] == (1000 - 2 * LIMIT_MB - 100) * MIB
    assert node["free_cpus"] == pytest.approx(0.5)


def test_change_that_does_not_fit_is_refused_and_nothing_changes(
    service: Served,
) -> None:
    def names() -> list[str]:
        return [p.name for p in service.status().processes]

    service.until(lambda: len(names()) == 5, "four replicas and a gateway")
    before = names()
    with pytest.raises(ServeError, match=r"4 of 5 replicas can be placed.*here: "):
        service.scale("add", 5)
    bigger = spec_with(m_stages=STAGES, machine=MACHINE, m_version="2")
    bigger["models"]["m"]["stages"][1]["memory_mb"] = 300
    text = yaml.safe_dump(bigger)
    with pytest.raises(ServeError, match="runs in both versions"):
        service.update(text)
    assert names() == before
    service.scale("add", 4)
    service.until(lambda: service.stages() == [1, 4, 1], "there was room for it")
    assert service.infer(1.0).status_code == 200
    service.scale("add", 2)
    service.until(lambda: service.stages() == [1, 2, 1], "as it was")


def test_service_that_does_not_fit_is_not_started(tmp_path: Path) -> None:
    spec = spec_with(m_stages=STAGES, machine={"name": "tiny", "memory_mb": 350})
    path = tmp_path / "app.yaml"
    path.write_text(yaml.safe_dump(spec))
    done = _multiworld("serve", str(path), "--state", str(tmp_path / "state"))
    assert done.returncode == 1
    assert "stage add of m (1): 1 of 2 replicas can be placed" in done.stderr
    assert "tiny: 50 MiB short" in done.stderr
    assert "Traceback" not in done.stderr


def refuse(ledger: Bookings, post: object, need: Need, plan: Plan) -> Location:
    """Refuse every replica: a placement policy for the tests."""
    raise PlacementError("closed on Sundays")


@pytest.mark.heavy
def test_placement_policy_comes_from_the_spec(tmp_path: Path) -> None:
    for policy, words in (
        ("tests.serve.test_resources:refuse", "closed on Sundays"),
        ("tests.serve.test_resources:nothing", "cannot be imported"),
    ):
        path = tmp_path / "app.yaml"
        path.write_text(yaml.safe_dump(spec_with(placement=policy)))
        done = _multiworld("serve", str(path), "--state", str(tmp_path / "state"))
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr
        # The next service starts at once, because the first one left no process behind.


async def test_models_come_and_go_while_others_serve(tmp_path: Path) -> None:
    spec = spec_with()
    with served(tmp_path, spec) as service:

        async def update(models: dict[str, object]) -> None:
            text = yaml.safe_dump({**spec, "models": models})
            await asyncio.to_thread(service.update, text)

        def runs(name: str, version: str, count: int) -> bool:
            mine = [p for p in service.status().processes if p.model == name]
            return len(mine) == count and all(
                (p.version, p.phase) == (version, "ready") for p in mine
            )

        async def until(name: str, version: str, count: int) -> None:
            what = f"{count} of {name} {version}"
            await asyncio.to_thread(
                service.until, lambda: runs(name, version, count), what
            )

        async with traffic(service):
            both = {**spec["models"], "other": spec["models"]["m"]}
            await update(both)
            await until("other", "1", 4)
            url = f"{service.url}/v2/models/other/infer"
            answer = await asyncio.to_thread(httpx.post, url, json=body(2.0))
            assert answer.json()["outputs"][0]["data"] == [expected(2.0)]
            both["other"] = {**both["other"], "version": "2"}
            await update(both)
            await until("other", "2", 4)
            await update(spec["models"])
            await until("other", "2", 0)
            answer = await asyncio.to_thread(httpx.post, url, json=body(2.0))
            assert answer.status_code == 404
        assert runs("m", "1", 4)


@pytest.mark.heavy
def test_profile_is_measured_and_then_booked(tmp_path: Path) -> None:
    spec = spec_with(m_profile="needs.json")
    path = tmp_path / "app.yaml"
    path.write_text(yaml.safe_dump(spec_with()))
    out = tmp_path / "needs.json"
    words = ("profile", str(path), "--batch", "1", "--batch", "8", "--out", str(out))
    assert "memory_mb" in _multiworld(*words).stdout
    found = json.loads(out.read_text())
    assert [stage["name"] for stage in found["stages"]] == ["double", "add", "square"]
    assert set(found["stages"][0]["seconds"]) == {"1", "8"}
    assert found["base_bytes"] > 10 * MIB
    path.write_text(yaml.safe_dump(spec))
    plan = json.loads(_multiworld("plan", str(path), "--json").stdout)
    assert all(stage["memory_mb"] > 10 for stage in plan["stages"])
    out.write_text("{}")
    assert "is not a profile" in _multiworld("plan", str(path)).stderr


def _multiworld(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "multiworld.cli.main", *words],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=WAIT_S * 3,
        check=False,
    )
