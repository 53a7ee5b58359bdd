"""Turns: order and cancelling; nothing stays behind."""

from __future__ import annotations

import asyncio

from multiworld.backends.turns import Turns
from tests.unit.waiting import turns


async def test_turns_are_in_the_order_of_the_calls() -> None:
    """A cancelled one is skipped; keys do not wait for each other."""
    kept, done, goes_on = Turns(), list[str](), asyncio.Event()

    async def take(key: str, name: str) -> None:
        async with kept.of(key):
            await goes_on.wait()
            done.append(name)

    names = ["a1", "a2", "a3", "b1"]
    tasks = [asyncio.create_task(take(name[0], name)) for name in names]
    await turns(3)
    assert "a" in kept
    assert "b" in kept
    tasks[1].cancel()
    await turns(3)
    goes_on.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert [name for name in done if name[0] == "a"] == ["a1", "a3"]
    assert "b1" in done
    assert "a" not in kept
    assert "b" not in kept
