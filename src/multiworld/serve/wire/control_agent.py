"""Connection of a process to the controller, over its control world."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

from multiworld.config import WorldConfig
from multiworld.errors import MultiWorldError, WorldBrokenError, WorldClosedError
from multiworld.net.rare_log import RareLog
from multiworld.serve.wire.control_messages import NEWS, ORDERS, Hello, News, Order
from multiworld.serve.wire.protocol import MessageError
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

logger = logging.getLogger("multiworld.serve")
rare_log = RareLog(logger)

# Seconds until the next attempt after an error that ``keep`` does not retry, such as
# another server at the store's port.
AGAIN_S = 2.0

Obey = Callable[[Order], Awaitable[None]]


def control_world(app: str, name: str) -> str:
    """Return the name of the world that a process shares with the controller."""
    return f"control:{app}:{name}"


class ControlAgent:
    """A process's end of its control world; reconnects if the controller is lost."""

    def __init__(
        self,
        manager: WorldManager,
        app: str,
        name: str,
        store: str,
        config: WorldConfig,
        obey: Obey,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._manager, self._store, self._config = manager, store, config
        self._world_name, self._obey = control_world(app, name), obey
        self._world: World | None = None
        # Facts are sent to every new controller; other messages are dropped while no
        # controller is connected.
        self._facts: dict[type[News], News] = {}
        self._outbox: asyncio.Queue[News] = asyncio.Queue()
        # Monotonic time since which there is no controller; None while connected.
        self.lost_at: float | None = clock()
        self.joined_at: float | None = None  # last connection, monotonic; None: never

    def fact(self, news: News) -> None:
        """Send a fact now, and to each new controller until a new fact replaces it."""
        self._facts[type(news)] = news
        self._outbox.put_nowait(news)

    def send(self, news: News) -> None:
        """Send a message to the controller; drop it if there is none."""
        if self._world is not None:
            self._outbox.put_nowait(news)

    async def flush(self, limit_s: float) -> None:
        """Wait until all messages are sent, but at most ``limit_s`` seconds."""
        if self._world is None:
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._outbox.join()
        except TimeoutError:
            logger.info("the controller did not receive the last messages")

    async def run(self) -> None:
        """Stay connected until cancelled; the control world closes with its manager."""
        self._facts[Hello] = Hello(os.getpid())
        while True:
            try:
                await self._stay()
                return
            except (MultiWorldError, OSError) as error:
                rare_log.error("the controller cannot be reached", error)
            await asyncio.sleep(AGAIN_S)

    async def _stay(self) -> None:
        async for world in self._manager.keep(
            self._world_name, rank=1, size=2, store=self._store, config=self._config
        ):
            self._world, self.lost_at = world, None
            self.joined_at = self._clock()
            self._outbox = asyncio.Queue()
            for fact in self._facts.values():
                self._outbox.put_nowait(fact)
            sending = asyncio.ensure_future(self._send(world))
            try:
                await self._read(world)
            except (WorldBrokenError, WorldClosedError) as error:
                logger.info("the controller is lost: %s", error)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                self._world, self.lost_at = None, self._clock()

    async def _read(self, world: World) -> None:
        while True:
            try:
                order = ORDERS.decode(await world.recv_object(src=0))
            except MessageError as error:  # sent by a newer release; skip it
                logger.error(
                    "ignored an order that this release does not know: %s", error
                )
                continue
            try:
                await self._obey(order)
            except (WorldBrokenError, WorldClosedError):
                raise
            except MultiWorldError:
                logger.exception("the order %s failed", type(order).__name__)

    async def _send(self, world: World) -> None:
        while True:
            news = await self._outbox.get()
            try:
                data = NEWS.encode(news)
            except (UnicodeEncodeError, TypeError, ValueError) as error:
                # For example, an error text contains a file name in invalid Unicode.
                kind = type(news).__name__
                logger.error("a %s cannot be sent to the controller: %s", kind, error)
            else:
                await world.send_object(data, dst=0)
            self._outbox.task_done()
