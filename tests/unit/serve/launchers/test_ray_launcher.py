"""What the launcher makes of the news of its bridge, without any Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import LaunchError
from multiworld.serve.launchers.ray.launcher import RayLauncher, bundle_of
from multiworld.serve.resources.amounts import Gpu, Location, Need, Node
from multiworld.serve.spec.schema import RaySpec

NODES = {
    "name": "n1",
    "key": "abc",
    "address": "192.0.2.77",
    "cpus": 4.0,
    "memory_bytes": 2**30,
    "gpus": [],
}


class Bridge:
    """Takes orders, and carries none out."""

    def __init__(self) -> None:
        self.orders: list[dict[str, Any]] = []
        self.is_running = True

    def tell(self, order: dict[str, Any]) -> None:
        """Note an order."""
        self.orders.append(order)

    def of(self, op: str) -> list[dict[str, Any]]:
        """Return the orders of a kind."""
        return [order for order in self.orders if order["op"] == op]

    async def start(self, *_: object) -> dict[str, Any]:
        """Be there again."""
        self.is_running = True
        return {"nodes": [NODES]}

    async def close(self) -> None:
        """Be gone."""


class Bench:
    """A launcher, its bridge, and who has exited."""

    def __init__(self) -> None:
        self.exits: list[tuple[str, int | None]] = []
        local: Any = None
        self.launcher = RayLauncher(
            "app",
            local,
            RaySpec(address="auto"),
            {},
            Path("/nowhere"),
            lambda name, code: self.exits.append((name, code)),
            lambda: None,
        )
        self.bridge = Bridge()
        made: Any = self.launcher
        made._bridge = self.bridge
        self.hear: Callable[[dict[str, Any]], None] = made._told
        self.hear({"kind": "nodes", "nodes": [NODES], "same": False})

    def launch(self, name: str) -> asyncio.Future[Any]:
        """Begin to start a replica."""
        body = self.launcher.launch(name, {}, Path("/x"), Location("n1"), Need(cpus=1))
        return asyncio.ensure_future(body)

    async def launched(self, name: str) -> Any:
        """Start a replica."""
        starting = self.launch(name)
        await asyncio.sleep(0)
        self.hear({"kind": "launched", "name": name, "pid": 1, "began": 2})
        return await starting


async def test_replica_is_started_where_it_was_placed_and_exits_once() -> None:
    """The bridge may tell of an end twice."""
    bench = Bench()
    running = await bench.launched("m/0/1")
    assert (running.pid, running.node) == (1, "n1")
    (order,) = bench.bridge.of("launch")
    assert (order["key"], order["bundle"]) == ("abc", {"CPU": 1.0})
    for _ in range(2):
        bench.hear({"kind": "exited", "name": "m/0/1", "code": 0})
    assert bench.exits == [("m/0/1", 0)]


async def test_launch_that_was_given_up_is_ended_when_it_is_there() -> None:
    """The head was silent meanwhile: the replica would run beside its successor."""
    bench = Bench()
    starting = bench.launch("m/0/1")
    await asyncio.sleep(0)
    made: Any = bench.launcher
    made._set_trouble("the head is silent")
    with pytest.raises(LaunchError, match="the head is silent"):
        await starting
    with pytest.raises(LaunchError, match="the head is silent"):
        await bench.launched("m/0/2")
    bench.hear({"kind": "nodes", "nodes": [NODES], "same": True})
    assert bench.launcher.trouble() == ""
    bench.hear({"kind": "launched", "name": "m/0/1", "pid": 1, "began": 2})
    assert [order["name"] for order in bench.bridge.of("kill")] == ["m/0/1"]
    bench.hear({"kind": "exited", "name": "m/0/1", "code": None})
    assert bench.exits == [("m/0/1", None)]


async def test_new_bridge_keeps_what_runs_and_forgets_what_was_to_end() -> None:
    """An order to end one may have been lost with the old bridge."""
    bench = Bench()
    stays, goes = await bench.launched("m/0/1"), await bench.launched("m/0/2")
    assert stays.name == "m/0/1"
    bench.launcher.kill(goes)
    bench.bridge.is_running = False
    made: Any = bench.launcher
    made._bridge_ended()
    assert "ended" in bench.launcher.trouble()
    await made._connect_again()
    assert bench.launcher.trouble() == ""
    (sweep,) = bench.bridge.of("sweep")
    assert sweep["known"] == ["m/0/1"]
    (adopt,) = bench.bridge.of("adopt")
    assert (adopt["name"], adopt["must_be_known"]) == ("m/0/1", False)
    assert bench.exits == [("m/0/2", None)]


async def test_machine_that_is_gone_is_no_place() -> None:
    """Nothing of the try is left."""
    bench = Bench()
    bench.hear({"kind": "nodes", "nodes": [], "same": False})
    with pytest.raises(LaunchError, match="n1 is gone"):
        await bench.launch("m/0/1")
    assert bench.bridge.of("launch") == []


def test_bundle_is_what_the_ledger_books_and_never_more() -> None:
    """Ray counts in ten-thousandths."""
    node = Node("g", 8, 2**30, (Gpu(0, "L4", 3000), Gpu(1, "L4", 3000)))
    assert bundle_of(Need(), node) == {}
    need = Need(cpus=3, memory_bytes=300, ranks=3)
    assert bundle_of(need, node) == {"CPU": 1.0, "memory": 100.0}
    third = bundle_of(Need(on_gpu=True, gpu_memory_bytes=1000), node)["GPU"]
    assert third == 0.3333
    assert bundle_of(Need(on_gpu=True), node)["GPU"] == 0.0001
