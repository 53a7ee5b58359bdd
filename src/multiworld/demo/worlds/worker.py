"""Worker of the demo: joins its worlds and doubles what the leader sends."""

from __future__ import annotations

import asyncio
import contextlib
import sys

from multiworld import MemberLeftError, MemberLostError, WorldManager


async def work(store: str, backend: str, names: list[str]) -> None:
    """Serve several worlds at once, until the leader leaves them or is lost."""
    async with WorldManager() as manager, asyncio.TaskGroup() as group:
        for name in names:
            group.create_task(_serve(manager, store, backend, name))


async def _serve(manager: WorldManager, store: str, backend: str, name: str) -> None:
    world = await manager.join(name, rank=1, size=2, store=store, backend=backend)
    with contextlib.suppress(MemberLeftError, MemberLostError):
        while True:
            await world.send(2 * await world.recv(src=0), dst=0)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], sys.argv[3:]))
