"""All members of a world in one process, on one event loop, each with a manager."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import AsyncExitStack

from multiworld.config import WorldConfig
from multiworld.net.security import Security
from multiworld.rendezvous.store_server import StoreServer
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

_names = itertools.count(1)


class Arena:
    """Context manager that makes worlds of any size on one backend.

    At its end, it closes all worlds, managers and the store. ::

        async with Arena("direct") as arena:
            left, right = await arena.world(2)
            await left.send(tensor, dst=1)

    Args:
        backend: Name of the backend, as for ``WorldManager.join``.
        config: Settings of the worlds; by default ``WorldConfig(join_s=20)``.
        security: Secret and TLS of managers and store; by default none.

    Attributes:
        managers: The managers made so far, by rank.
        store: Address of the store.
    """

    def __init__(
        self,
        backend: str,
        config: WorldConfig | None = None,
        security: Security | None = None,
    ) -> None:
        self.backend = backend
        self.security = security or Security()
        self.config = config or WorldConfig(join_s=20)
        self.managers: list[WorldManager] = []
        self.store = f"memory://arena-{next(_names)}"
        self._server: StoreServer | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Arena:
        if self.backend != "memory":
            self._server = await StoreServer.listen(
                "127.0.0.1", 0, security=self.security
            )
            self.store = f"tcp://127.0.0.1:{self._server.port}"
            self._stack.push_async_callback(self._server.close)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(manager.close() for manager in self.managers))
        await self._stack.aclose()

    def manager(self, rank: int) -> WorldManager:
        """Return the manager of a rank, which is created on first use.

        Args:
            rank: Rank that the manager holds in all worlds of this arena.
        """
        while len(self.managers) <= rank:
            manager = WorldManager(config=self.config, security=self.security)
            self.managers.append(manager)
        return self.managers[rank]

    async def world(self, size: int, name: str = "") -> list[World]:
        """Return each rank's view of a new world, by rank.

        Args:
            size: World size.
            name: Name of the world; by default a new one.

        Cancellation:
            Withdraws the joins.
        """
        name = name or f"world-{next(_names)}"
        joins = [self.join(name, rank, size) for rank in range(size)]
        return list(await asyncio.gather(*joins))

    async def join(self, name: str, rank: int, size: int) -> World:
        """Return one rank's view of a world, once all its ranks have joined.

        Args:
            name, rank, size: As for ``WorldManager.join``.

        Cancellation:
            As for ``WorldManager.join``.
        """
        return await self.manager(rank).join(
            name, rank=rank, size=size, store=self.store, backend=self.backend
        )
