"""The controller's side of the control worlds, one with each process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from msgspec import structs

from multiworld.errors import (
    MemberLostError,
    MultiWorldError,
    StaleEpochError,
    WorldBrokenError,
    WorldClosedError,
)
from multiworld.net.rare_log import RareLog
from multiworld.serve.deadlines import LINK_S, REPORT_S
from multiworld.serve.wire import control_messages as messages
from multiworld.serve.wire.control_agent import AGAIN_S, control_world
from multiworld.serve.wire.process_args import world_config
from multiworld.serve.wire.protocol import MessageError
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

logger = logging.getLogger("multiworld.serve")
rare_log = RareLog(logger)

# Minimum seconds between two announcements of routing tables: ``TABLE_S`` for each
# process, but at most ``MAX_TABLE_S``. Each replica that starts changes the table, each
# process gets the table, and the table has a row for each replica: without this pause,
# the cost of a start would grow with the cube of the number of replicas.
TABLE_S, MAX_TABLE_S = 0.005, 1.0


class ProcessLinkOwner(Protocol):
    def greeting(self, name: str) -> Iterable[messages.Order]:
        """Return the first orders for a process that has joined."""

    def joined(self, name: str) -> None:
        """Handle a process that has joined and received its first orders."""

    def news(self, name: str, news: messages.News) -> None:
        """Handle news from a process."""

    def lost(self, name: str, error: MemberLostError) -> None:
        """Handle the loss of a process."""

    def unheard(self, name: str, error: StaleEpochError) -> None:
        """Handle a process that is alive but has declared the controller lost."""


class ProcessLinks:
    """The control worlds of a service; `silence_s` without a heartbeat is a loss."""

    def __init__(
        self,
        manager: WorldManager,
        app: str,
        store: str,
        silence_s: float,
        owner: ProcessLinkOwner,
        # Returns for how many seconds the event loop of a process may make no progress
        # before the process counts as lost. If code that holds the GIL hangs, no thread
        # of that process can detect the hang.
        stalled_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._manager, self._app, self._store = manager, app, store
        self._owner, self._stalled_s = owner, stalled_s
        self._config = world_config(silence_s, LINK_S)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._worlds: dict[str, World] = {}
        # Timers of processes that have declared the controller lost, by name; a process
        # counts as lost when its timer expires.
        self._unheard: dict[str, asyncio.TimerHandle] = {}
        self._sending: set[asyncio.Task[None]] = set()
        # By process: the latest table, encoded, if it has not been sent yet.
        self._tables: dict[str, str] = {}
        self._announced_at = -math.inf
        self._announcing: asyncio.TimerHandle | None = None
        self._asked: dict[int, asyncio.Future[messages.Report]] = {}
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()

    @property
    def names(self) -> list[str]:
        return list(self._worlds)

    @property
    def gateways(self) -> list[str]:
        return [name for name in self._worlds if name.startswith("gateway/")]

    def open(self, name: str) -> None:
        """Wait for a process in the background, and stay connected to it."""
        self._tasks[name] = self._loop.create_task(self._live(name))

    def close(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        self._keep(name)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def close_all(self) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
        tasks = [*self._tasks.values(), *self._sending]
        for name in [*self._tasks]:
            self.close(name)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def send(self, name: str, order: messages.Order) -> None:
        """Send an order to a process; drop it if the process has not joined."""
        self._send_table(name)  # the order may be about this table
        self._send(name, messages.ORDERS.encode(order))

    def _send(self, name: str, content: str) -> None:
        world = self._worlds.get(name)
        if world is not None:
            task = self._loop.create_task(_send(world, content))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    def announce(self, order: messages.TableChanged) -> None:
        """Send a table to all processes, now or soon; it replaces unsent ones."""
        self._tables = dict.fromkeys(self._worlds, messages.ORDERS.encode(order))
        if self._announcing is None:
            pause_s = min(MAX_TABLE_S, TABLE_S * len(self._worlds))
            due_at = self._announced_at + pause_s
            if due_at <= self._loop.time():
                self._send_tables()
            else:
                self._announcing = self._loop.call_at(due_at, self._send_tables)

    def _send_tables(self) -> None:
        self._announcing, self._announced_at = None, self._loop.time()
        for name in list(self._tables):
            self._send_table(name)

    def _send_table(self, name: str) -> None:
        if (content := self._tables.pop(name, None)) is not None:
            self._send(name, content)

    def send_gateways(self, order: messages.Order) -> None:
        for name in self.gateways:
            self.send(name, order)

    async def reports(
        self,
        limit_s: float = REPORT_S,
        *,
        has_counts: bool = False,
        has_streams: bool = False,
    ) -> messages.Reports:
        """Return the reports of all processes that answer within ``limit_s``."""
        names = self.names
        asked = messages.ReportRequest(0, has_counts, has_streams)
        asking = (self._ask(name, limit_s, asked) for name in names)
        answers = await asyncio.gather(*asking)
        found = messages.Reports()
        for name, answer in zip(names, answers, strict=True):
            if answer is not None and answer.worker is not None:
                found.workers[name] = answer.worker
            elif answer is not None and answer.gateway is not None:
                found.gateways[name] = answer.gateway
                found.counted[name] = answer.counted
        return found

    async def cancel(self, request: str) -> int | None:
        """End a request's streams; return how many, or None if a gateway is silent."""
        asked = messages.CancelRequest(request)
        asking = (self._ask(name, REPORT_S, asked) for name in self.gateways)
        answers = await asyncio.gather(*asking)
        if None in answers:
            return None
        return sum(each.cancelled for each in answers if each is not None)

    async def _ask(
        self,
        name: str,
        limit_s: float,
        asked: messages.ReportRequest | messages.CancelRequest,
    ) -> messages.Report | None:
        number = next(self._numbers)
        self._asked[number] = future = self._loop.create_future()
        self.send(name, structs.replace(asked, number=number))
        try:
            async with asyncio.timeout(limit_s):
                report: messages.Report = await future
                return report
        except TimeoutError:
            return None
        finally:
            self._asked.pop(number, None)

    async def _live(self, name: str) -> None:
        while True:
            try:
                await self._stay(name)
                return
            except (MultiWorldError, OSError) as error:
                rare_log.error(f"{name} cannot be reached", error)
            await asyncio.sleep(AGAIN_S)

    async def _stay(self, name: str) -> None:
        world_name = control_world(self._app, name)
        config = replace(self._config, stalled_limit_s=self._stalled_s())
        try:
            async for world in self._manager.keep(
                world_name, rank=0, size=2, store=self._store, config=config
            ):
                self._worlds[name] = world
                self._tables.pop(name, None)  # the greeting has the current table
                self._keep(name)
                for order in self._owner.greeting(name):
                    self.send(name, order)
                self._owner.joined(name)
                try:
                    await self._read(name, world)
                except MemberLostError as error:
                    self._owner.lost(name, error)
                    return
                except (WorldBrokenError, WorldClosedError) as error:
                    logger.debug("%s: %s", name, error)
                    if isinstance(error, StaleEpochError):
                        # The process has declared the controller lost, and may never
                        # rejoin: give it up unless it rejoins in time.
                        self._unheard[name] = self._loop.call_later(
                            2 * self._config.silence_s, self._give_up, name, error
                        )
                finally:
                    self._worlds.pop(name, None)
        finally:
            if world_name in self._manager.worlds:
                await asyncio.shield(self._manager.leave(world_name))

    def _keep(self, name: str) -> None:
        """Cancel the timer of a process that has rejoined or was closed."""
        if (timer := self._unheard.pop(name, None)) is not None:
            timer.cancel()

    def _give_up(self, name: str, error: StaleEpochError) -> None:
        self._unheard.pop(name, None)
        self._owner.unheard(name, error)

    async def _read(self, name: str, world: World) -> None:
        while True:
            try:
                news = messages.NEWS.decode(await world.recv_object(src=1))
            except MessageError as error:
                # The sender may be of another release; later messages may be readable.
                logger.error("%s: %s", name, error)
                continue
            if not isinstance(news, messages.Report) or not news.number:
                self._owner.news(name, news)
                continue
            future = self._asked.get(news.number)
            if future is not None and not future.done():
                future.set_result(news)


async def _send(world: World, content: str) -> None:
    try:
        await world.send_object(content, dst=1)
    except (WorldBrokenError, WorldClosedError):
        pass  # the reader of this world reports the loss
