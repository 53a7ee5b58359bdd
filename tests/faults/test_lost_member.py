"""Losses of members: each way to be lost, in each phase, on each backend."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

from multiworld import (
    MemberLost,
    MemberLostError,
    World,
    WorldConfig,
    WorldManager,
)
from multiworld.liveness.control_link import Link
from multiworld.liveness.heartbeat_links import HeartbeatLinks
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Child, ProcessFleet, no_leaks
from tests import bodies
from tests.traffic import Traffic

CONFIGS = {
    "direct": ("direct", WorldConfig(join_s=20, silence_s=2.0)),
    "gloo": ("gloo", WorldConfig(join_s=20, silence_s=2.0)),
    "gloo-own-p2p": (
        "gloo",
        WorldConfig(join_s=20, silence_s=2.0, host_p2p="backend"),
    ),
}
NOTICE_S = 20.0
"""Hang bound in seconds, not a timing."""

Mode = Callable[[Child], None]
MODES: dict[str, Mode] = {
    "SIGKILL": Child.kill,
    "os._exit": lambda child: child.order("exit"),
    "segfault": lambda child: child.order("segfault"),
    "SIGSTOP": Child.stop,
}


async def _nothing(world: World) -> None:
    await world.wait_over()
    await world.recv(src=1)


async def _large_send(world: World) -> None:
    while True:
        await world.send(torch.ones(8_000_000), dst=1)


PHASES: dict[str, Callable[[World], Awaitable[Any]]] = {
    "idle": _nothing,
    "in recv": lambda world: world.recv(src=1),
    "in recv into": lambda world: world.recv(torch.empty(5), src=1),
    "in a large send": _large_send,
    "in all_reduce": lambda world: world.all_reduce(torch.ones(4)),
    "in a large all_reduce": lambda world: world.all_reduce(torch.ones(3_000_000)),
    "in barrier": lambda world: world.barrier(),
}


class Stage:
    """Two worlds with this process as rank 0 and a child as rank 1 of each."""

    def __init__(self, fleet: ProcessFleet, manager: WorldManager, store: str) -> None:
        self.fleet, self.manager, self.store = fleet, manager, store

    async def other(self) -> World:
        """Return the world that the fault must not disturb."""
        child = self.fleet.start(bodies.echo, "other", self.store, "direct")
        world = await self.manager.join("other", rank=0, size=2, store=self.store)
        assert await child.report() == "ready"
        return world

    async def affected(self, backend: str, config: WorldConfig) -> tuple[World, Child]:
        args = ("affected", 1, 2, self.store, backend, config)
        child = self.fleet.start(bodies.member, *args)
        world = await self.manager.join(
            "affected", rank=0, size=2, store=self.store, backend=backend, config=config
        )
        assert await child.report() == "ready"
        return world, child


@pytest.fixture
async def stage(fork_server: None) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(no_leaks(allow=("asyncio_", "forkserver")))
        server = await StoreServer.listen("127.0.0.1", 0)
        stack.push_async_callback(server.close)
        fleet = await stack.enter_async_context(ProcessFleet())
        manager = await stack.enter_async_context(WorldManager())
        yield Stage(fleet, manager, f"tcp://127.0.0.1:{server.port}")


def _cases() -> list[Any]:
    """Return all cases; a stop lasts until silence is noticed, so most are heavy."""
    cases = [pytest.param("SIGKILL", phase) for phase in PHASES]
    for phase in PHASES:
        is_light = phase in ("in recv", "in a large all_reduce")
        marks = () if is_light else (pytest.mark.heavy,)
        cases.append(pytest.param("SIGSTOP", phase, marks=marks))
    return cases


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("mode", "phase"), _cases())
async def test_lost_member_in_every_phase(
    stage: Stage, mode: str, phase: str, config: str
) -> None:
    await _lose(stage, mode, phase, *CONFIGS[config])


@pytest.mark.parametrize("mode", ["os._exit", "segfault"])
async def test_lost_member_in_every_mode(stage: Stage, mode: str) -> None:
    await _lose(stage, mode, "in recv", *CONFIGS["direct"])


@pytest.mark.parametrize("end", ["raise", "return"])
async def test_program_that_ends_without_closing_is_lost(
    stage: Stage, end: str
) -> None:
    child = stage.fleet.start(bodies.careless, "w", stage.store)
    world = await stage.manager.join("w", rank=0, size=2, store=stage.store)
    assert await child.report() == "ready"
    child.order(end)
    async with asyncio.timeout(NOTICE_S):
        error = await _error_of(world.recv(src=1))
    assert isinstance(error, MemberLostError), error
    assert "ended" in error.reason


async def _lose(
    stage: Stage, mode: str, phase: str, backend: str, config: WorldConfig
) -> None:
    """Check the named error, the traffic of another world, rejoining and leaks."""
    other = await stage.other()
    async with Traffic(other) as traffic:
        world, child = await stage.affected(backend, config)
        events = stage.manager.events()
        noticing = asyncio.ensure_future(_next_loss(events))
        pending = asyncio.ensure_future(_error_of(PHASES[phase](world)))
        await traffic.advances(20)
        assert not pending.done()
        MODES[mode](child)
        async with asyncio.timeout(NOTICE_S):
            while not pending.done():
                await traffic.advances(5)
            error, event = await pending, await noticing
        assert isinstance(error, MemberLostError), error
        assert (error.rank, error.world, error.epoch) == (1, "affected", 1)
        assert (event.rank, event.world) == (1, "affected")
        if mode == "SIGSTOP":
            assert "stopped" in error.reason
            assert error.silent_s >= config.silence_s
        assert isinstance(await _error_of(world.barrier()), MemberLostError)
        await traffic.advances()
        child.end()
        again, child = await stage.affected(backend, config)
        assert again.epoch == 2
        child.order("all_reduce")
        assert (await again.all_reduce(torch.ones(8)))[0] == 2
        assert await child.report() == 2
        await traffic.advances()
        child.order("leave")
        await child.done()
    assert other.is_ready


async def _error_of(step: Awaitable[Any]) -> BaseException | None:
    try:
        await step
    except Exception as error:
        return error
    return None


async def _next_loss(events: AsyncIterator[Any]) -> MemberLost:
    async for event in events:
        if isinstance(event, MemberLost):
            return event
    raise AssertionError("no loss was reported")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("mode", ["SIGKILL", "SIGSTOP"])
async def test_survivors_name_the_same_rank(
    stage: Stage, mode: str, config: str
) -> None:
    backend, settings = CONFIGS[config]
    children = [
        stage.fleet.start(
            bodies.member, "four", rank, 4, stage.store, backend, settings
        )
        for rank in (1, 2, 3)
    ]
    world = await stage.manager.join(
        "four", rank=0, size=4, store=stage.store, backend=backend, config=settings
    )
    for child in children:
        assert await child.report() == "ready"
    for child in (children[0], children[2]):
        child.order("all_reduce")
    pending = asyncio.ensure_future(_error_of(world.all_reduce(torch.ones(8))))
    MODES[mode](children[1])
    errors = [await pending, await children[0].report(), await children[2].report()]
    for error in errors:
        assert isinstance(error, MemberLostError), error
        assert error.rank == 2, error
    for child in (children[0], children[2]):
        child.order("leave")
        await child.done()


async def test_member_with_living_forked_child_is_noticed_at_once(
    stage: Stage,
) -> None:
    """A forked child does not keep a dead member's connections open."""
    for backend in ("direct", "gloo"):
        world, child = await stage.affected(backend, WorldConfig(silence_s=60))
        child.order("all_reduce")
        await world.all_reduce(torch.ones(8))
        await child.report()
        child.order("fork")
        await child.report()
        pending = asyncio.ensure_future(_error_of(world.all_reduce(torch.ones(8))))
        child.kill()
        async with asyncio.timeout(5):  # the forked child lives on for 8 s
            assert isinstance(await pending, MemberLostError)
        child.end()


async def test_busy_main_thread_is_no_loss(stage: Stage) -> None:
    config = WorldConfig(join_s=20, silence_s=2.0)
    world, child = await stage.affected("direct", config)
    child.order("block")
    over = asyncio.ensure_future(world.wait_over())
    done, _ = await asyncio.wait((over,), timeout=5.0)
    assert not done
    assert world.is_ready
    child.kill()
    async with asyncio.timeout(5):
        await over


@pytest.mark.heavy
async def test_stuck_helper_accuses_nobody_and_is_replaced(stage: Stage) -> None:
    other = await stage.other()
    config = WorldConfig(join_s=20, silence_s=2.0)
    world, child = await stage.affected("direct", config)
    before = stage.manager.watchdog.helper_pid
    assert before is not None
    async with Traffic(other) as traffic:
        os.kill(before, signal.SIGSTOP)
        end = asyncio.get_running_loop().time() + 4.0
        while asyncio.get_running_loop().time() < end:
            await traffic.advances(20)
        assert world.is_ready
        assert stage.manager.watchdog.helper_pid not in (None, before)
    child.order("leave")
    await child.done()


@pytest.mark.heavy
async def test_lost_heartbeat_connection_is_no_loss_and_is_replaced(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorldConfig(join_s=20, silence_s=2.0)
    lines: list[socket.socket] = []
    begin = HeartbeatLinks.begin

    def noted(
        links: HeartbeatLinks, link: Link, sock: socket.socket, *args: Any, **more: Any
    ) -> None:
        lines.append(sock)
        begin(links, link, sock, *args, **more)

    monkeypatch.setattr(HeartbeatLinks, "begin", noted)
    world, child = await stage.affected("direct", config)
    for _ in range(2):
        open_lines = [line for line in lines if line.fileno() >= 0]
        assert open_lines
        for line in open_lines:
            line.shutdown(socket.SHUT_RDWR)
        over = asyncio.ensure_future(world.wait_over())
        done, _ = await asyncio.wait((over,), timeout=4.0)
        assert not done
        over.cancel()
    assert world.is_ready
    child.stop()  # so that heartbeats over the new connection are checked
    async with asyncio.timeout(NOTICE_S):
        await world.wait_over()
    child.end()
