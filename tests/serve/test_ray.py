"""Replicas as actors of a four-node Ray cluster whose nodes join, leave and freeze."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.cluster.ray_nodes import RayNodes, ray_nodes
from multiworld.errors import ServeError
from multiworld.serve.controller.answers import NodeShown
from tests.serve.harness import ROOT, Served, served, spec_with, traffic

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(400)

WAIT_S = 150.0
"""Seconds of a hang bound; a new process may import torch for most of a minute."""

STAGES = [
    {"name": "double", "replicas": 2},
    {"name": "add", "replicas": 2, "cpus": 1},
    {"name": "square", "replicas": 2},
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes(4) as made:
        yield made


@pytest.fixture(scope="module")
def service(
    cluster: RayNodes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    spec = spec_with(
        m_stages=STAGES, launcher="ray", ray={"address": cluster.address}, host="auto"
    )
    with served(tmp_path_factory.mktemp("ray"), spec) as made:
        yield made


def where(service: Served) -> dict[str, str]:
    processes = service.status().processes
    return {p.name: p.node for p in processes if p.model and p.phase == "ready"}


def is_whole(service: Served) -> bool:
    return service.stages() == [2, 2, 2]


async def until(service: Served, is_so: Any, what: str) -> None:
    """Wait for a condition in a thread, so that traffic continues."""
    await asyncio.to_thread(service.until, is_so, what, WAIT_S)


def test_replicas_are_spread_over_the_nodes(service: Served, cluster: RayNodes) -> None:
    assert service.infer(1.0).status_code == 200
    for stage in range(3):
        nodes = [n for name, n in where(service).items() if name[2] == str(stage)]
        assert len(set(nodes)) == 2, where(service)
    known = service.ask("GET", "/nodes", list[NodeShown])
    assert sorted(n.name for n in known) == sorted(cluster.names)
    assert sum(n.cpus - n.free_cpus for n in known) == pytest.approx(2)


@pytest.mark.heavy
async def test_lost_replica_is_replaced_by_another_actor(service: Served) -> None:
    async with traffic(service):
        harmed = await asyncio.to_thread(service.break_replica, "kill", "add")
        await until(service, lambda: harmed.name not in where(service), "gone")
        await until(service, lambda: is_whole(service), "replaced")


@pytest.mark.heavy
async def test_killed_actors_take_their_replicas_along(
    service: Served, cluster: RayNodes
) -> None:
    victim = next(n for n in where(service).values() if n != "head")
    here = {name for name, node in where(service).items() if node == victim}
    pids = {p.pid for p in service.status().processes if p.name in here}

    def holders() -> list[psutil.Process]:
        found = map(psutil.Process, cluster.pids(victim))
        return [p for p in found if "ReplicaHolder" in " ".join(p.cmdline())]

    async with traffic(service):
        # Ray starts the holder of a replica while the replica runs already.
        await until(service, lambda: len(holders()) == len(here), "held")
        for process in holders():
            process.kill()
        await until(service, lambda: not here & where(service).keys(), "gone")
        await until(service, lambda: not pids & set(psutil.pids()), "ended")
        await until(service, lambda: is_whole(service), "replaced")


async def test_node_that_is_removed_costs_no_request(
    service: Served, cluster: RayNodes
) -> None:
    counts = Counter(where(service).values())
    victim = max((n for n in counts if n != "head"), key=lambda n: counts[n])
    async with traffic(service):
        await asyncio.to_thread(cluster.remove, victim)
        await until(service, lambda: victim not in where(service).values(), "gone")
        await until(service, lambda: is_whole(service), "placed elsewhere")
        await until(
            service, lambda: bool(service.events("node lost")), "the loss is told"
        )
        cluster.add("fresh")  # Ray can start a node in the main thread only
        await until(
            service, lambda: bool(service.events("node added")), "the new one is known"
        )
        await asyncio.to_thread(service.scale, "add", 4)
        await until(service, lambda: service.stages() == [2, 4, 2], "scaled")
        assert "fresh" in where(service).values()
        await asyncio.to_thread(service.scale, "add", 2)
        await until(service, lambda: is_whole(service), "and back")


@pytest.mark.heavy
async def test_service_waits_for_machines_that_join_later(
    cluster: RayNodes, tmp_path: Path
) -> None:
    """On Kubernetes, the head starts first; the service can be ended meanwhile."""
    stages = [{**stage, "replicas": 1, "nodes": ["late"]} for stage in STAGES]
    ray = {"address": cluster.address}
    spec = spec_with(m_stages=stages, launcher="ray", ray=ray, host="auto")
    spec["app"] = "later"
    late = Served(tmp_path, spec)
    log = tmp_path / "serve.log"

    def has_said() -> bool:
        return log.exists() and "waiting for machines" in log.read_text()

    async def waits() -> asyncio.Task[None]:
        starting = asyncio.create_task(asyncio.to_thread(late.start))
        async with asyncio.timeout(WAIT_S):
            # Another process says it.
            while not (has_said() or starting.done()):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        return starting

    starting = await waits()
    assert late.process is not None
    late.process.send_signal(signal.SIGTERM)  # ``start`` reads its output, and ends it
    with pytest.raises(AssertionError):  # it ended, and was never ready
        await starting
    log.unlink()
    starting = await waits()
    cluster.add("late")  # Ray can start a node in the main thread only
    try:
        await starting
        assert list(where(late).values()) == ["late"] * 3
    finally:
        late.end()


@pytest.mark.heavy
async def test_node_that_freezes_costs_no_request(
    service: Served, cluster: RayNodes
) -> None:
    """Ray does not notice a frozen node."""
    counts = Counter(where(service).values())
    victim = max((n for n in counts if n != "head"), key=lambda n: counts[n])
    async with traffic(service):
        frozen = {name for name, node in where(service).items() if node == victim}
        cluster.freeze(victim)
        await until(service, lambda: not frozen & where(service).keys(), "given up")
        await until(service, lambda: is_whole(service), "placed elsewhere")
        cluster.freeze(victim, is_thawed=True)
        await asyncio.sleep(2.0)  # nothing happens, so there is no event
        assert is_whole(service)
        assert not frozen & where(service).keys(), "they stay out"


def test_cluster_too_small_refuses_and_says_what_is_short(service: Served) -> None:
    before = where(service)
    with pytest.raises(ServeError, match=r"of 40 replicas can be placed.*cpus short"):
        service.scale("add", 40)
    assert where(service) == before


@pytest.mark.heavy
def test_second_controller_is_refused(
    service: Served, cluster: RayNodes, tmp_path: Path
) -> None:
    """Another state folder makes no difference."""
    wanted = pytest.raises(
        AssertionError, match="a controller of 'under-test' already runs"
    )
    with wanted, served(tmp_path, service.spec):
        pass
    assert is_whole(service)


@pytest.mark.heavy
async def test_controller_that_is_lost_finds_its_actors_again(service: Served) -> None:
    before = where(service)
    async with traffic(service) as load:
        service.kill_controller()
        await load.goes_on(40)
        await asyncio.to_thread(service.start)
        await until(service, lambda: where(service) == before, "all are adopted")
    assert before.keys() <= {e.name for e in service.events("adopted")}


@pytest.mark.heavy
async def test_head_that_freezes_and_thaws_only_delays_scaling(
    service: Served, cluster: RayNodes
) -> None:
    async with traffic(service):
        cluster.freeze_head()
        await until(service, lambda: bool(service.status().trouble), "it is said")
        before = len(service.events("lost"))
        await asyncio.to_thread(service.scale, "add", 3)
        await until(service, lambda: bool(service.status().unplaced), "it waits")
        cluster.freeze_head(is_thawed=True)
        await until(service, lambda: service.stages() == [2, 3, 2], "it is done")
        assert service.status().trouble == ""
        assert len(service.events("lost")) == before
        await asyncio.to_thread(service.scale, "add", 2)
        await until(service, lambda: is_whole(service), "and back")


def bridge_of(service: Served) -> int:
    assert service.process is not None
    found: list[int] = [
        child.pid
        for child in psutil.Process(service.process.pid).children()
        if "multiworld.serve.controller.launchers.ray.bridge" in child.cmdline()
    ]
    return found[0]


@pytest.mark.heavy
async def test_bridge_that_hangs_is_named_and_replaced(service: Served) -> None:
    async with traffic(service) as load:
        hung = bridge_of(service)
        os.kill(hung, signal.SIGSTOP)
        await until(service, lambda: "Ray" in service.status().trouble, "it is said")
        await load.goes_on()
        await until(service, lambda: not service.status().trouble, "replaced")
        assert bridge_of(service) != hung
        assert not psutil.pid_exists(hung)
        await asyncio.to_thread(service.scale, "add", 3)
        await until(service, lambda: service.stages() == [2, 3, 2], "it is done")
        await asyncio.to_thread(service.scale, "add", 2)
        await until(service, lambda: is_whole(service), "and back")


@pytest.mark.heavy
async def test_lost_head_stops_scaling_and_not_serving(
    service: Served, cluster: RayNodes
) -> None:
    async with traffic(service):
        await asyncio.to_thread(cluster.lose_head)
        await until(service, lambda: "head" in service.status().trouble, "it is said")
        before = where(service)
        await asyncio.sleep(3.0)  # nothing happens, so there is no event
        assert where(service) == before
        said = service.events("launcher")
        assert any("none is started" in e.text for e in said)
        service.kill_controller()
        await asyncio.to_thread(service.start)
        assert where(service) == before, "adopted without a cluster"
        assert "no Ray cluster" in service.status().trouble
    assert service.infer(2.0).status_code == 200


@pytest.mark.heavy
def test_missing_cluster_is_named(tmp_path: Path) -> None:
    spec = spec_with(launcher="ray", ray={"address": "127.0.0.1:1"})
    wanted = pytest.raises(AssertionError, match=r"no Ray cluster at '127.0.0.1:1'")
    with wanted, served(tmp_path, spec):
        pass


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_cluster_example(tmp_path: Path) -> None:
    """It loses nothing, reports moved replicas, and draws its picture."""
    picture = tmp_path / "cluster.png"
    program = ROOT / "examples" / "cluster" / "cluster.py"
    done = subprocess.run(
        [sys.executable, program, "--rate", "3", "--picture", picture, "--json"],
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout)
    assert outcome["is_good"]
    assert not any(tenant["wrong"] for tenant in outcome["tenants"].values())
    assert [scene["title"] for scene in outcome["scenes"]][1:] == [
        outcome["scenes"][0]["title"].replace("lost", "back"),
        "a tenant floods",
        "a third model is added",
        "and removed",
    ]
    assert outcome["moves"]
    assert all(move["why"] for move in outcome["moves"])
    assert picture.stat().st_size > 10_000
