"""The thread that runs a model."""

from __future__ import annotations

import asyncio
import threading

import pytest

from multiworld.serve.replica.compute_thread import ComputeThread


async def test_calls_run_in_order_in_one_thread() -> None:
    thread = ComputeThread()
    seen = []
    calls = [
        thread.call(lambda n=n: seen.append((n, threading.get_ident())))
        for n in range(4)
    ]
    await asyncio.gather(*calls)
    assert [n for n, _ in seen] == [0, 1, 2, 3]
    assert len({ident for _, ident in seen} | {threading.get_ident()}) == 2
    thread.close()


async def test_errors_and_cancelling() -> None:
    thread = ComputeThread()

    def fails() -> None:
        raise ValueError("as asked")

    with pytest.raises(ValueError, match="as asked"):
        await thread.call(fails)
    gate = threading.Event()
    waiting = asyncio.ensure_future(thread.call(gate.wait, 30))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    assert await thread.call(lambda: 5) == 5
    thread.close()
