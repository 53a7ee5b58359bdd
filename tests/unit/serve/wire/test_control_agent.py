"""The process's side of its control world, as controllers come, break and go."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from multiworld.config import WorldConfig
from multiworld.serve.wire.control_agent import ControlAgent, control_world
from multiworld.serve.wire.control_messages import (
    NEWS,
    ORDERS,
    Finish,
    Hello,
    ModelNeeded,
    News,
    Order,
    ReportRequest,
    StageLoaded,
    TableApplied,
)
from multiworld.testing import FakeClock
from multiworld.world.manager import WorldManager
from multiworld.world.world import World
from tests.unit.serve.edges import HANG_S, Controller, break_world, settle, until
from tests.unit.serve.wire.test_edges import MemoryManager

_numbers = itertools.count()

CONFIG = WorldConfig(join_s=20)
HELLO = Hello(os.getpid())


class Control:
    def __init__(self, store: str) -> None:
        self._store = store
        self.manager = MemoryManager(config=CONFIG)
        self.manager.failures = []
        self._controllers: list[WorldManager] = []
        self.clock = FakeClock()
        self.obeyed: list[Order] = []
        self.agent = ControlAgent(
            self.manager,
            "app",
            "m/0/1",
            store,
            CONFIG,
            self._obey,
            lambda: self.clock.now,
        )
        self.running = asyncio.ensure_future(self.agent.run())

    async def _obey(self, order: Order) -> None:
        if order == ReportRequest(13):
            raise ValueError("as asked")
        self.obeyed.append(order)

    async def controller(self) -> Controller:
        manager = WorldManager(config=CONFIG)
        self._controllers.append(manager)
        world = await manager.join(
            control_world("app", "m/0/1"),
            rank=0,
            size=2,
            store=self._store,
            backend="memory",
        )
        await until(lambda: self.agent.lost_at is None)
        return Controller(world, 1)

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        for manager in (self.manager, *self._controllers):
            await manager.close()


@pytest.fixture
async def control() -> AsyncIterator[Control]:
    made = Control(f"memory://agent-{next(_numbers)}")
    yield made
    await made.close()


async def news(peer: Controller, count: int) -> list[News]:
    """Return this many messages of the agent, and check that there are no more."""
    found = [await peer.receive(NEWS) for _ in range(count)]
    assert not await peer.has_sent(NEWS)
    return found


def over(world: World) -> bool:
    return world.is_broken or world.is_closed


async def test_agent_reports_and_obeys(control: Control) -> None:
    assert control.agent.joined_at is None
    assert control.agent.lost_at == 1000.0
    control.clock.advance(5.0)
    peer = await control.controller()
    assert control.agent.joined_at == 1005.0
    control.agent.fact(StageLoaded())
    control.agent.send(ModelNeeded("m"))
    assert await news(peer, 3) == [HELLO, StageLoaded(), ModelNeeded("m")]
    for order in (ReportRequest(1), Finish(), ReportRequest(2)):
        await peer.send(ORDERS, order)
    await until(lambda: len(control.obeyed) == 3)
    assert control.obeyed == [ReportRequest(1), Finish(), ReportRequest(2)]


async def test_facts_are_sent_to_every_controller_and_once_to_each(
    control: Control,
) -> None:
    """A new controller gets the latest fact of each kind, but no other news."""
    await settle()
    control.agent.fact(StageLoaded())
    control.agent.fact(TableApplied(1))
    control.agent.fact(TableApplied(2))
    control.agent.send(ModelNeeded("nobody hears this"))
    peer = await control.controller()
    assert await news(peer, 3) == [HELLO, StageLoaded(), TableApplied(2)]
    control.agent.fact(TableApplied(3))
    assert await news(peer, 1) == [TableApplied(3)]
    await break_world(peer.world)
    await until(lambda: control.agent.lost_at is not None)
    control.agent.fact(TableApplied(4))
    peer = await control.controller()
    assert await news(peer, 3) == [HELLO, StageLoaded(), TableApplied(4)]


async def test_last_messages_are_sent_before_a_process_ends(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting has a limit; without a controller there is no wait."""
    await control.agent.flush(HANG_S)
    peer = await control.controller()
    control.agent.send(ModelNeeded("m"))
    await control.agent.flush(HANG_S)
    assert await news(peer, 2) == [HELLO, ModelNeeded("m")]
    held = asyncio.Event()

    async def never(*args: Any, **more: Any) -> None:
        await held.wait()

    world = control.manager.world(control_world("app", "m/0/1"))
    monkeypatch.setattr(world, "send_object", never)
    control.agent.send(ModelNeeded("n"))
    await control.agent.flush(0.02)


@pytest.mark.parametrize("is_polite", [True, False])
async def test_agent_outlives_its_controller(control: Control, is_polite: bool) -> None:
    peer = await control.controller()
    control.clock.advance(7.0)
    if is_polite:
        await peer.world.close()
    else:
        await break_world(peer.world)
    await until(lambda: control.agent.lost_at is not None)
    assert control.agent.lost_at == 1007.0
    assert control.agent.joined_at is not None
    control.clock.advance(1.0)
    peer = await control.controller()
    assert control.agent.joined_at == 1008.0
    await peer.send(ORDERS, Finish())
    await until(lambda: control.obeyed == [Finish()])


@pytest.mark.parametrize("text", ['1 ["Vanish",1]', "9 []", "", "1 [", None, 7, {}])
async def test_order_that_is_not_understood_is_skipped(
    control: Control, text: object, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer controller may send orders that are unknown here."""
    peer = await control.controller()
    await peer.world.send_object(text, dst=1)
    await peer.send(ORDERS, ReportRequest(1))
    await until(lambda: control.obeyed)
    assert control.obeyed == [ReportRequest(1)]
    assert "ignored an order that this release does not know" in caplog.text


async def test_order_that_fails_ends_the_agent_with_its_error(control: Control) -> None:
    """It is a bug: the process must exit instead of running on."""
    peer = await control.controller()
    await peer.send(ORDERS, ReportRequest(13))
    with pytest.raises(ValueError, match="as asked"):
        await asyncio.wait_for(control.running, HANG_S)
    assert control.agent.lost_at is not None


async def test_cancelling_leaves_no_sender_behind(control: Control) -> None:
    peer = await control.controller()
    assert await news(peer, 1) == [HELLO]
    control.running.cancel()
    await asyncio.gather(control.running, return_exceptions=True)
    control.agent.send(ModelNeeded("m"))
    control.agent.fact(StageLoaded())
    assert not await peer.has_sent(NEWS)
