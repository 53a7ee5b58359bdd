"""The controller's links to its processes, and how it gives up unreachable ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from multiworld.errors import StaleEpochError, WorldBrokenError
from multiworld.serve.controller import process_links
from multiworld.serve.controller.process_links import ProcessLinks
from multiworld.serve.wire import control_messages as messages
from multiworld.serve.wire.routing_table import RoutingTable

SILENCE_S = 0.1


class Accused:
    """A world whose other member has declared this one lost."""

    async def recv_object(self, src: int) -> Any:
        raise StaleEpochError("rank 1 has declared this process lost")


class Quiet:
    async def recv_object(self, src: int) -> Any:
        await asyncio.Event().wait()


class Manager:
    """A manager that joins these worlds in turn and then waits."""

    worlds: tuple[str, ...] = ()

    def __init__(self, *joined: Any) -> None:
        self.joined = joined

    async def keep(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        joined, self.joined = self.joined, ()
        for world in joined:
            yield world
        await asyncio.Event().wait()


class Owner:
    def __init__(self) -> None:
        self.given_up: list[str] = []
        self.joins = 0

    def greeting(self, name: str) -> tuple[()]:
        return ()

    def joined(self, name: str) -> None:
        self.joins += 1

    def unheard(self, name: str, error: StaleEpochError) -> None:
        self.given_up.append(name)


async def given_up(*joined: Any, is_closed: bool = False) -> tuple[int, list[str]]:
    """Return how often the process joined, and which processes were given up."""
    manager: Any = Manager(*joined)
    owner: Any = Owner()
    links = ProcessLinks(manager, "app", "127.0.0.1:1", SILENCE_S, owner)
    links.open("front-1")
    for _ in range(20):
        await asyncio.sleep(0)
    if is_closed:
        links.close("front-1")
    await asyncio.sleep(5 * SILENCE_S)
    await links.close_all()
    return owner.joins, owner.given_up


async def test_process_that_lost_the_controller_is_given_up() -> None:
    assert await given_up(Accused()) == (1, ["front-1"])


async def test_process_that_rejoins_is_kept() -> None:
    assert await given_up(Accused(), Quiet()) == (2, [])


async def test_process_that_was_closed_is_not_given_up_again() -> None:
    assert await given_up(Accused(), is_closed=True) == (1, [])


class Receiver(Quiet):
    """A world that records the orders of the controller."""

    def __init__(self) -> None:
        self.got: list[messages.Order] = []

    async def send_object(self, content: str, dst: int) -> None:
        self.got.append(messages.ORDERS.decode(content))

    def tables(self) -> list[int]:
        orders = (each for each in self.got if isinstance(each, messages.TableChanged))
        return [order.table.number for order in orders]


def table(number: int) -> messages.TableChanged:
    return messages.TableChanged(RoutingTable(number=number))


@asynccontextmanager
async def linked(
    monkeypatch: pytest.MonkeyPatch, *worlds: Any
) -> AsyncIterator[ProcessLinks]:
    """Yield links to a process that joins these worlds one after the other."""
    monkeypatch.setattr(process_links, "TABLE_S", 1000.0)
    monkeypatch.setattr(process_links, "MAX_TABLE_S", 0.2)
    manager: Any = Manager(*worlds)
    owner: Any = Owner()
    links = ProcessLinks(manager, "app", "127.0.0.1:1", SILENCE_S, owner)
    links.open("front-1")
    await turns()
    yield links
    await links.close_all()


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_first_table_goes_at_once_and_of_a_burst_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Receiver()
    async with linked(monkeypatch, world) as links:
        for number in range(1, 50):
            links.announce(table(number))
        await turns()
        assert world.tables() == [1]
        async with asyncio.timeout(20.0):
            while world.tables() == [1]:  # noqa: ASYNC110 - nothing else tells
                await asyncio.sleep(0.01)
        assert world.tables() == [1, 49]


async def test_order_follows_the_table_that_it_may_be_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Receiver()
    async with linked(monkeypatch, world) as links:
        links.announce(table(1))
        links.announce(table(2))
        links.send("front-1", messages.ProbeReplica("m/0/1"))
        await turns()
        assert world.tables() == [1, 2]
        assert isinstance(world.got[-1], messages.ProbeReplica)


async def test_process_that_rejoins_gets_no_older_table_after_its_greeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its greeting has the current one."""
    first, second = Breaking(), Receiver()
    async with linked(monkeypatch, first, second) as links:
        links.announce(table(1))
        links.announce(table(2))
        first.breaks.set()
        await turns()
        await asyncio.sleep(0.5)
        assert first.tables() == [1]
        assert second.tables() == []


class Gateway:
    """A gateway that has this many streams of any request; None: it says nothing."""

    def __init__(self, streams: int | None) -> None:
        self._streams = streams
        self._said: asyncio.Queue[str] = asyncio.Queue()

    async def send_object(self, content: str, dst: int) -> None:
        match messages.ORDERS.decode(content):
            case messages.CancelRequest("r-1", number) if self._streams is not None:
                report = messages.Report(number, cancelled=self._streams)
                self._said.put_nowait(messages.NEWS.encode(report))

    async def recv_object(self, src: int) -> str:
        return await self._said.get()


@pytest.mark.parametrize(
    ("streams", "count"), [((0, 2), 2), ((0, 0), 0), ((0, None), None)]
)
async def test_cancelled_streams_are_counted_if_every_gateway_answers(
    monkeypatch: pytest.MonkeyPatch,
    streams: tuple[int | None, ...],
    count: int | None,
) -> None:
    monkeypatch.setattr(process_links, "REPORT_S", SILENCE_S)
    manager: Any = Manager()
    links = ProcessLinks(manager, "app", "127.0.0.1:1", SILENCE_S, cast("Any", Owner()))
    for number, each in enumerate(streams):
        manager.joined = (Gateway(each),)
        links.open(f"gateway/{number}")
        await turns()
    assert await links.cancel("r-1") == count
    await links.close_all()


class Breaking(Receiver):
    def __init__(self) -> None:
        super().__init__()
        self.breaks = asyncio.Event()

    async def recv_object(self, src: int) -> Any:
        await self.breaks.wait()
        raise WorldBrokenError("the process is gone")
