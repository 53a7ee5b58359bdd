"""The controller's links to its processes, and how it gives up unreachable ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from multiworld.errors import StaleEpochError
from multiworld.serve.controller.process_links import ProcessLinks

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
        self._joined = joined

    async def keep(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        for world in self._joined:
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
