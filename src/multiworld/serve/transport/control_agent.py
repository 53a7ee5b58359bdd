"""A process's side of its control world: reports to the controller, obeys it. Shell."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from multiworld.config import WorldConfig
from multiworld.errors import WorldBrokenError, WorldClosedError
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

logger = logging.getLogger("multiworld.serve")

Obey = Callable[[dict[str, Any]], Awaitable[None]]


def control_world(app: str, name: str) -> str:
    """Return the name of the world that a process shares with the controller."""
    return f"control:{app}:{name}"


class ControlAgent:
    """The control world of one process; it outlives the loss of the controller.

    What is told while there is no controller is told to the next one.

    Args:
        obey: Carries out one order.
    """

    def __init__(
        self,
        manager: WorldManager,
        app: str,
        name: str,
        store: str,
        config: WorldConfig,
        obey: Obey,
    ) -> None:
        self._manager, self._store, self._config = manager, store, config
        self._world_name, self._obey = control_world(app, name), obey
        self._world: World | None = None
        self._facts: dict[str, dict[str, Any]] = {}
        self._outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.lost_at: float | None = time.monotonic()
        self.was_joined = False
        self.joined_at: float | None = None

    def fact(self, kind: str, **what: Any) -> None:
        """Tell something that stays true; a new controller is told again."""
        news = {"kind": kind, **what}
        self._facts[kind] = news
        self._outbox.put_nowait(news)

    def tell(self, kind: str, **what: Any) -> None:
        """Tell something."""
        if self._world is not None:
            self._outbox.put_nowait({"kind": kind, **what})

    async def run(self) -> None:
        """Stay connected until cancelled."""
        self._facts["hello"] = {"kind": "hello", "pid": os.getpid()}
        async for world in self._manager.keep(
            self._world_name, rank=1, size=2, store=self._store, config=self._config
        ):
            self._world, self.lost_at, self.was_joined = world, None, True
            self.joined_at = time.monotonic()
            self._outbox = asyncio.Queue()
            for fact in self._facts.values():
                self._outbox.put_nowait(fact)
            sending = asyncio.ensure_future(self._send(world))
            try:
                await self._read(world)
            except (WorldBrokenError, WorldClosedError) as error:
                logger.info("the controller is away: %s", error)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                self._world, self.lost_at = None, time.monotonic()

    async def _read(self, world: World) -> None:
        while True:
            order = await world.recv_object(src=0)
            await self._obey(order)

    async def _send(self, world: World) -> None:
        while True:
            await world.send_object(await self._outbox.get(), dst=0)
