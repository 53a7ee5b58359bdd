"""Citizen: a process that is in several worlds and keeps traffic going in each."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from multiworld import (
    Event,
    JoinTimeoutError,
    MemberStalled,
    MultiWorldError,
    World,
    WorldBrokenError,
    WorldClosedError,
    WorldConfig,
    WorldManager,
)
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Role

PACE_S = 0.005
"""Seconds between two rounds of a world."""


@dataclass(frozen=True)
class Membership:
    name: str
    rank: int
    size: int
    backend: str = "direct"


@dataclass
class Account:
    """State of one world; times are ``time.monotonic()``, which all processes share."""

    epoch: int = 0
    size: int = 0
    rank: int = 0
    rounds: int = 0
    at: float = 0.0
    error: BaseException | None = None
    failed_at: float = 0.0
    lost: frozenset[int] = frozenset()
    phase: str = ""


@dataclass
class Life:
    """The worlds of a citizen."""

    manager: WorldManager
    store: str
    accounts: dict[str, Account] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def join(self, wanted: Membership, join_s: float | None = None) -> None:
        config = None if join_s is None else WorldConfig(join_s=join_s)
        world = await self.manager.join(
            wanted.name,
            rank=wanted.rank,
            size=wanted.size,
            store=self.store,
            backend=wanted.backend,
            config=config,
        )
        self.begin(world)

    def begin(self, world: World) -> None:
        account = Account(world.epoch, world.size, world.rank)
        self.accounts[world.name] = account
        self.tasks[world.name] = asyncio.create_task(
            _traffic(world, account, self.moved)
        )

    def status(self) -> dict[str, Account]:
        for name, account in self.accounts.items():
            world = self.manager.worlds.get(name)
            if world is None:
                continue
            account.phase = world.statistics().phase
            if world.is_broken:
                account.lost = world.lost
        return dict(self.accounts)

    async def watch(self) -> None:
        async for event in self.manager.events():
            self.events.append(event)
            self.moved.set()

    async def until(self, holds: Callable[[], bool]) -> Account | None:
        while not holds():
            self.moved.clear()
            await self.moved.wait()
        return None

    async def advance(self, name: str, rounds: int) -> Any:
        wanted = self.accounts[name].rounds + rounds
        return await self.until(lambda: self.accounts[name].rounds >= wanted)


async def citizen(
    role: Role, store: str, config: WorldConfig, memberships: list[Membership]
) -> None:
    async with WorldManager(config=config) as manager:
        life = Life(manager, store)
        watching = asyncio.create_task(life.watch())
        await asyncio.gather(*(life.join(wanted) for wanted in memberships))
        role.report("ready")
        while (order := await role.order()) != "leave":
            role.report(await _obey(life, order))
        for task in (*life.tasks.values(), watching):
            task.cancel()
        await asyncio.gather(*life.tasks.values(), watching, return_exceptions=True)


async def _obey(life: Life, order: Any) -> Any:
    match order:
        case "status":
            return life.status()
        case ("advance", name, rounds):
            return await life.advance(name, rounds)
        case ("event", kind):
            return await life.until(
                lambda: any(type(event).__name__ == kind for event in life.events)
            )
        case ("lost", name, ranks):
            return await life.until(lambda: life.manager.world(name).lost == ranks)
        case "stalled":
            return [event for event in life.events if isinstance(event, MemberStalled)]
        case "events":
            return list(life.events)
        case ("busy", kind, *seconds):
            return _hold_the_gil(kind, *seconds)
        case ("sleep", seconds):
            time.sleep(seconds)  # noqa: ASYNC251 - the test needs a blocked loop
            return "slept"
        case ("join", wanted, *limit):
            return await _tried(life.join(wanted, *limit))
        case ("store", address):
            life.store = address
            return "noted"
    raise ValueError(order)


async def _tried(step: Any) -> Any:
    try:
        return await step
    except (MultiWorldError, JoinTimeoutError) as error:
        return error


async def _traffic(world: World, account: Account, moved: asyncio.Event) -> None:
    try:
        while True:
            await _round(world, account.rounds)
            account.rounds += 1
            account.at = time.monotonic()
            moved.set()
            await asyncio.sleep(PACE_S)
    except (WorldBrokenError, WorldClosedError) as error:
        account.error, account.failed_at = error, time.monotonic()


async def _round(world: World, number: int) -> None:
    """Send a tensor around the ring and all-reduce one, with content of this round."""
    mine = torch.tensor([world.epoch, world.rank, number])
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sending = asyncio.ensure_future(world.send(mine, dst=after))
    try:
        got = await world.recv(src=before)
        assert got.tolist() == [world.epoch, before, number], (got, number)
    finally:
        await sending
    total = await world.all_reduce(torch.tensor([world.rank + number]))
    ranks = sum(range(world.size))
    assert total.item() == ranks + world.size * number, (total, number)


def _hold_the_gil(kind: str, seconds: float, one_call_s: float = 1.5) -> float:
    """Hold the GIL in C calls for ``seconds``; return the longest call, in seconds."""
    count, took = 100_000, 0.0
    while took < one_call_s:
        call = _long_call(kind, count)
        begin = time.monotonic()
        call()
        took = time.monotonic() - begin
        count = int(count * max(1.3, min(8.0, 1.2 * one_call_s / max(took, 1e-3))))
    longest, end = took, time.monotonic() + seconds - took
    while (begin := time.monotonic()) < end:
        call()
        longest = max(longest, time.monotonic() - begin)
    return longest


def _long_call(kind: str, count: int) -> Callable[[], object]:
    if kind == "pickle":
        data = pickle.dumps([{"a": i} for i in range(count)])
        return lambda: pickle.loads(data)
    if kind == "json":
        text = json.dumps([[i] for i in range(count)])
        return lambda: json.loads(text)
    values = [str(i * 7919 % count) for i in range(count)]
    return lambda: sorted(values)


async def store_host(role: Role, host: str) -> None:
    server = await StoreServer.listen(host, 29500)
    role.report("ready")
    try:
        await role.order()
    finally:
        await server.close()
