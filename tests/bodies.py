"""Programs that the child processes of tests run."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import torch

from multiworld import (
    World,
    WorldBrokenError,
    WorldClosedError,
    WorldConfig,
    WorldManager,
)
from multiworld.testing import Role


async def echo(role: Role, name: str, store: str, backend: str) -> None:
    async with WorldManager(config=WorldConfig(join_s=20)) as manager:
        world = await manager.join(name, rank=1, size=2, store=store, backend=backend)
        role.report("ready")
        try:
            while True:
                await world.send(await world.recv(src=0), dst=0)
        except (WorldClosedError, WorldBrokenError) as error:
            role.report(type(error).__name__)


async def member(
    role: Role,
    name: str,
    rank: int,
    size: int,
    store: str,
    backend: str,
    config: WorldConfig,
) -> None:
    async with WorldManager(config=config) as manager:
        world = await manager.join(
            name, rank=rank, size=size, store=store, backend=backend
        )
        role.report("ready")
        while True:
            order = await role.order()
            if order == "leave":
                break
            result: object
            try:
                match order:
                    case "all_reduce":
                        result = (await world.all_reduce(torch.ones(8)))[0].item()
                    case ("recv", src):
                        result = (await world.recv(src=src)).sum().item()
                    case ("send", dst, size):
                        await world.send(torch.ones(size), dst=dst)
                        result = "sent"
                    case "wait_over":
                        await world.wait_over()
                        result = await _why(world.recv(src=(rank + 1) % size))
                    case "fork":
                        result = _fork()
                    case "exit":
                        os._exit(3)
                    case "segfault":
                        os.kill(os.getpid(), signal.SIGSEGV)
                    case "block":
                        time.sleep(600)  # noqa: ASYNC251 - the test needs a blocked loop
            except WorldBrokenError as error:
                result = error
            except WorldClosedError as error:
                result = error
            role.report(result)


async def _why(step: object) -> object:
    try:
        return await step  # type: ignore[misc]
    except (WorldBrokenError, WorldClosedError) as error:
        return error


def _fork() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(8)  # longer than the parent lives
        os._exit(0)
    return pid


async def careless(role: Role, name: str, store: str) -> None:
    """Join a world of two as rank 1, and exit without closing the manager."""
    manager = WorldManager(config=WorldConfig(join_s=20))
    await manager.join(name, rank=1, size=2, store=store)
    role.report("ready")
    if await role.order() == "raise":
        raise RuntimeError("nobody catches this")


async def idle(role: Role, name: str, store: str, backend: str) -> None:
    async with WorldManager(config=WorldConfig(join_s=20)) as manager:
        await manager.join(name, rank=1, size=2, store=store, backend=backend)
        role.report("ready")
        await asyncio.Event().wait()


async def many(role: Role, count: int, store: str) -> None:
    async with WorldManager(config=WorldConfig(join_s=20)) as manager:
        worlds = [
            await manager.join(f"w{number}", rank=1, size=2, store=store)
            for number in range(count)
        ]

        async def echo_one(world: World) -> None:
            while True:
                await world.send(await world.recv(src=0), dst=0)

        tasks = [asyncio.create_task(echo_one(world)) for world in worlds]
        role.report("ready")
        await asyncio.gather(*tasks)


async def cycles(role: Role, name: str, count: int, store: str, backend: str) -> None:
    async with WorldManager(config=WorldConfig(join_s=20)) as manager:
        for _ in range(count):
            world = await manager.join(
                name, rank=1, size=2, store=store, backend=backend
            )
            await world.send(await world.recv(src=0), dst=0)
            await world.barrier()
            await manager.leave(name)
