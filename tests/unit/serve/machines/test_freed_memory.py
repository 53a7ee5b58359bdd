"""Return of a thread's freed memory to the system."""

from __future__ import annotations

import threading

import psutil

from multiworld.serve.machines.freed_memory import trim_heap

SIZE, COUNT, KEPT = 1000, 100_000, 5000  # 100 MB of objects; every 5,000th stays


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_freed_memory_of_a_thread_is_returned_to_the_system() -> None:
    """The allocator would keep it for other objects of the thread."""
    kept: list[bytes] = []
    has_freed, may_end = threading.Event(), threading.Event()

    def work() -> None:
        made = [bytes(SIZE) for _ in range(COUNT)]
        kept.extend(made[KEPT - 1 :: KEPT])
        del made
        has_freed.set()
        may_end.wait()

    thread = threading.Thread(target=work)
    thread.start()
    has_freed.wait()
    before = resident()
    trim_heap()
    after = resident()
    may_end.set()
    thread.join()
    assert before - after > SIZE * COUNT / 2
    assert len(kept) == COUNT / KEPT
