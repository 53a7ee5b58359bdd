"""Resident: a process of the soak that keeps its worlds and their traffic going."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from multiworld import (
    MemberLostError,
    StaleEpochError,
    World,
    WorldBrokenError,
    WorldClosedError,
    WorldConfig,
    WorldManager,
)
from multiworld.testing import Role
from multiworld.testing.leaks import Leak
from tests.soak.plan import SILENCE_S, Place

PACE_S = 0.1
"""Seconds between two rounds of a world."""
CONFIG = WorldConfig(join_s=5.0, silence_s=SILENCE_S)


class Resident:
    def __init__(self, role: Role, manager: WorldManager, store: str, me: int) -> None:
        self.role, self.manager, self.store, self.me = role, manager, store, me
        self.rounds: dict[str, int] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def stay(self, place: Place) -> None:
        self.tasks[place.name] = asyncio.create_task(self._stay(place))

    async def _stay(self, place: Place) -> None:
        kept = self.manager.keep(
            place.name,
            rank=place.members.index(self.me),
            size=len(place.members),
            store=self.store,
            backend=place.backend,
        )
        async for world in kept:
            nonce = world._member.incarnation.nonce
            self.role.report(("ready", world.name, world.epoch, nonce, world.rank))
            try:
                while True:
                    await self._round(world)
                    await asyncio.sleep(PACE_S)
            except (WorldBrokenError, WorldClosedError) as error:
                self.role.report(self._account(world, error))
            except AssertionError as error:
                self.role.report(("wrong", world.name, world.epoch, str(error)))
                raise

    def _account(self, world: World, error: Exception) -> tuple[Any, ...]:
        rank = error.rank if isinstance(error, MemberLostError) else None
        is_stale = isinstance(error, StaleEpochError)
        what = (type(error).__name__, str(error), rank, is_stale)
        where = (world.name, world.epoch, world.rank)
        return ("over", *where, *what, time.monotonic())

    async def _round(self, world: World) -> None:
        number = self.rounds.get(world.name, 0)
        mine = torch.tensor([world.epoch, world.rank, self.me])
        after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
        sending = asyncio.ensure_future(world.send(mine, dst=after))
        try:
            got = (await world.recv(src=before)).tolist()
        finally:
            await asyncio.gather(sending, return_exceptions=True)
        assert got[:2] == [world.epoch, before], f"{got} from rank {before}"
        total = await world.all_reduce(torch.full((5,), world.rank + 1))
        wanted = world.size * (world.size + 1) // 2
        assert total.tolist() == [wanted] * 5, f"{total} is not {wanted}"
        self.rounds[world.name] = number + 1

    def footprint(self) -> dict[str, int]:
        gc.collect()
        now = Leak.now()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
        return {
            "threads": len(now.threads),
            "descriptors": len(now.descriptors),
            "tasks": len(now.tasks),
            "children": len(now.children),
            "bytes": resident,
        }


async def resident(role: Role, me: int, places: list[Place], store: str) -> None:
    async with WorldManager(config=CONFIG) as manager:
        life = Resident(role, manager, store, me)
        for place in places:
            life.stay(place)
        try:
            while (order := await role.order()) != "end":
                await _obey(life, order, places)
        finally:
            for task in life.tasks.values():
                task.cancel()
            await asyncio.gather(*life.tasks.values(), return_exceptions=True)
    role.report(("ended",))


async def _obey(life: Resident, order: Any, places: list[Place]) -> None:
    match order:
        case "status":
            life.role.report(("status", dict(life.rounds), life.footprint()))
        case ("leave", name):
            await life.manager.leave(name)
            await life.tasks[name]
            life.role.report(("left", name))
            (place,) = (place for place in places if place.name == name)
            life.stay(place)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case ("blocked", seconds):
            time.sleep(seconds)  # noqa: ASYNC251 - the test needs a blocked loop
