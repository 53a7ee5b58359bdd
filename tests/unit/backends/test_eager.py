"""Eager coroutines."""

from __future__ import annotations

import asyncio

import pytest

from multiworld.backends.eager import Rest, begin


async def test_coroutine_that_need_not_wait_completes_at_once() -> None:
    done = []

    async def quick() -> None:
        done.append(1)

    assert begin(quick()) is None
    assert done == [1]


async def test_coroutine_continues_where_it_waited() -> None:
    loop = asyncio.get_running_loop()
    first, second = loop.create_future(), loop.create_future()
    seen: list[object] = []

    async def slow() -> None:
        seen.append(await first)
        await asyncio.sleep(0)
        try:
            await second
        except ValueError as error:
            seen.append(str(error))

    rest = begin(slow())
    assert isinstance(rest, Rest)
    loop.call_soon(first.set_result, "one")
    loop.call_later(0.01, second.set_exception, ValueError("two"))
    await rest
    assert seen == ["one", "two"]


async def test_errors_and_cancelling_reach_the_coroutine() -> None:
    async def fails() -> None:
        raise ValueError("at once")

    with pytest.raises(ValueError, match="at once"):
        begin(fails())
    seen = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    rest = begin(waits())
    assert rest is not None

    async def body() -> None:
        await rest

    task = asyncio.ensure_future(body())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]
