"""The Ray launcher and the messages of its bridge, tested without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import msgspec
import pytest

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers.local import LocalLauncher
from multiworld.serve.controller.launchers.protocol import (
    ActorOrder,
    AdoptActor,
    BridgeNews,
    ClusterNode,
    ClusterNodes,
    ClusterReady,
    Exited,
    KillActor,
    LaunchActor,
    Launched,
    Sweep,
)
from multiworld.serve.controller.launchers.ray import launcher as module
from multiworld.serve.controller.launchers.ray.launcher import RayLauncher, bundle_of
from multiworld.serve.machines.amounts import Gpu, Location, Need, Node
from multiworld.serve.wire.process_args import ProcessArgs
from tests.recorded import recorded
from tests.unit.serve.controller.launchers.contexts import context
from tests.until import until

Kind = TypeVar("Kind")

NODE = ClusterNode("n1", "abc", "192.0.2.77", 4.0, 2**30)
ARGS = ProcessArgs(
    app="app", name="m/0/1", role="worker", store="", silence_s=2.0, orphan_s=9.0
)


class Bridge:
    """A bridge that records orders and carries none out."""

    def __init__(
        self,
        module: str,
        log: Path,
        decoder: msgspec.json.Decoder[BridgeNews],
        on_news: Callable[[BridgeNews], None],
        on_end: Callable[[], None],
        on_hang: Callable[[], None],
        *,
        is_replaceable: bool,
    ) -> None:
        self.hear, self.end, self.hang = on_news, on_end, on_hang
        self.orders: list[ActorOrder] = []
        self.is_running = True

    def send(self, order: ActorOrder) -> None:
        self.orders.append(order)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [order for order in self.orders if isinstance(order, kind)]

    async def start(self, *_: object) -> ClusterReady:
        self.is_running = True
        return ClusterReady((NODE,))

    async def close(self) -> None:
        pass


class Bench:
    def __init__(self) -> None:
        self.exits: list[tuple[str, int | None]] = []
        local = mock.AsyncMock(LocalLauncher)
        with recorded(module, Bridge, "HelperProcess") as bridges:
            given = context(
                "ray",
                Path("/nowhere"),
                on_exit=lambda name, code: self.exits.append((name, code)),
            )
            self.launcher = RayLauncher(given, local)
        (self.bridge,) = bridges
        self.hear = self.bridge.hear
        self.hear(ClusterNodes((NODE,), False))

    def launch(self, name: str) -> asyncio.Future[Any]:
        body = self.launcher.launch(
            name, ARGS, Path("/x"), Location("n1"), Need(cpus=1)
        )
        return asyncio.ensure_future(body)

    async def launched(self, name: str) -> Any:
        starting = self.launch(name)
        await asyncio.sleep(0)
        self.hear(Launched(name, 1, 2))
        return await starting


async def test_replica_is_started_where_it_was_placed_and_exits_once() -> None:
    """The bridge may report an exit twice."""
    bench = Bench()
    running = await bench.launched("m/0/1")
    assert (running.pid, running.node) == (1, "n1")
    (order,) = bench.bridge.of(LaunchActor)
    assert (order.key, order.bundle) == ("abc", {"CPU": 1.0})
    for _ in range(2):
        bench.hear(Exited("m/0/1", 0))
    assert bench.exits == [("m/0/1", 0)]


async def test_cancelled_launch_is_ended_once_it_has_started() -> None:
    """Otherwise the replica would run beside its successor."""
    bench = Bench()
    starting = bench.launch("m/0/1")
    await asyncio.sleep(0)
    bench.bridge.hang()
    with pytest.raises(LaunchError, match="m/0/1: the Ray bridge hangs"):
        await starting
    with pytest.raises(LaunchError, match="m/0/2: the Ray bridge hangs"):
        await bench.launched("m/0/2")
    bench.hear(ClusterNodes((NODE,), True))
    assert bench.launcher.trouble() == ""
    bench.hear(Launched("m/0/1", 1, 2))
    assert [order.name for order in bench.bridge.of(KillActor)] == ["m/0/1"]
    bench.hear(Exited("m/0/1", None))
    assert bench.exits == [("m/0/1", None)]


async def test_new_bridge_keeps_what_runs_and_forgets_what_was_to_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill order may have been lost with the old bridge."""
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    bench = Bench()
    await bench.launcher.start()
    stays, goes = await bench.launched("m/0/1"), await bench.launched("m/0/2")
    assert stays.name == "m/0/1"
    bench.launcher.kill(goes)
    bench.bridge.is_running = False
    bench.bridge.end()
    assert "lost" in bench.launcher.trouble()
    await until(lambda: not bench.launcher.trouble())
    (sweep,) = bench.bridge.of(Sweep)
    assert sweep.known == ("m/0/1",)
    (adopt,) = bench.bridge.of(AdoptActor)
    assert (adopt.name, adopt.must_be_known) == ("m/0/1", False)
    assert bench.exits == [("m/0/2", None)]
    await bench.launcher.close()


async def test_launch_on_a_lost_machine_fails() -> None:
    bench = Bench()
    bench.hear(ClusterNodes((), False))
    with pytest.raises(LaunchError, match="n1 is not in the cluster"):
        await bench.launch("m/0/1")
    assert bench.bridge.of(LaunchActor) == []


def test_bundle_is_what_the_ledger_books_and_never_more() -> None:
    """Ray counts resources in ten-thousandths."""
    node = Node("g", 8, 2**30, (Gpu(0, "L4", 3000), Gpu(1, "L4", 3000)))
    assert bundle_of(Need(), node) == {}
    need = Need(cpus=3, memory_bytes=300, ranks=3)
    assert bundle_of(need, node) == {"CPU": 1.0, "memory": 100.0}
    third = bundle_of(Need(gpus=1, gpu_memory_bytes=1000), node)["GPU"]
    assert third == 0.3333
    assert bundle_of(Need(gpus=1), node)["GPU"] == 0.0001
    assert bundle_of(Need(gpus=1, whole_gpus=True), node)["GPU"] == 1.0
    assert bundle_of(Need(gpus=2, gpu_memory_bytes=1000), node)["GPU"] == 2.0
