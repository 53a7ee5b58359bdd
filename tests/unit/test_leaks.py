"""The check for leaks: what counts as one."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from multiworld.testing.leaks import Leak, LeakError, no_leaks


async def test_thread_that_stays_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiworld.testing.leaks.SETTLE_S", 0.2)
    end = threading.Event()
    stays = threading.Thread(target=end.wait, name="stays")
    try:
        with pytest.raises(LeakError, match="stays"):
            async with no_leaks():
                stays.start()
    finally:
        end.set()
        stays.join()


def test_threads_of_torch_itself_are_no_leak() -> None:
    # They last as long as the thread that computed, here one of a pool.
    def compute() -> int:
        torch.set_num_threads(2)
        torch.ones(1 << 20).mul_(2)
        return len(os.listdir("/proc/self/task"))

    before_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:
            count = pool.submit(lambda: len(os.listdir("/proc/self/task"))).result()
            before = Leak.now()
            assert pool.submit(compute).result() > count
            assert Leak.now().since(before) == []
    finally:
        torch.set_num_threads(before_threads)


async def test_what_ends_soon_is_no_leak() -> None:
    async with no_leaks():
        threading.Timer(0.1, int).start()
        asyncio.get_running_loop().create_task(asyncio.sleep(0.1))
