"""Threads of a step, while other processes take the cores and when they have left."""

from __future__ import annotations

import itertools

from multiworld.serve.replica.sequences.thread_count import (
    LOOK_S,
    MAX_PAUSE_S,
    PAUSE_S,
    ThreadCount,
    waited_s,
)

SHARE = 0.4  # of the time that a thread waits for a core beside a busy process


class Cores:
    """Steps every second, of which the computing thread waits for a part."""

    def __init__(self) -> None:
        self.now, self.waited, self.share = 100.0, 3.0, 0.0
        self.threads = ThreadCount(4, lambda: self.waited)

    def step(self, seconds: float = 1.0) -> int:
        self.now += seconds
        self.waited += self.share * seconds
        return self.threads.next(self.now)

    def steps(self, count: int) -> list[int]:
        return [self.step() for _ in range(count)]


def test_all_threads_compute_while_cores_are_free() -> None:
    assert set(Cores().steps(100)) == {4}


def test_one_thread_computes_while_others_take_the_cores() -> None:
    cores = Cores()
    cores.steps(3)
    cores.share = SHARE
    found = cores.steps(300)
    assert found[0] == 1
    # It is tried again, ever more rarely.
    trials = [at for at, count in enumerate(found) if count == 4]
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= PAUSE_S
    assert MAX_PAUSE_S <= gaps[-1] <= MAX_PAUSE_S + 2
    assert found.count(4) <= 9


def test_all_threads_compute_again_when_the_cores_are_free() -> None:
    cores = Cores()
    cores.share = SHARE
    cores.steps(3)
    cores.share = 0.0
    assert cores.steps(int(2 * PAUSE_S) + 2)[-1] == 4
    assert set(cores.steps(100)) == {4}
    cores.share = SHARE
    assert cores.step() == 1
    cores.share = 0.0
    assert cores.steps(int(PAUSE_S) + 1)[-1] == 4  # the pause is short again


def test_short_steps_are_not_looked_at_one_by_one() -> None:
    looks = itertools.count()
    threads = ThreadCount(2, lambda: 0.0 * next(looks))
    for number in range(1000):
        threads.next(100.0 + number / 1000)
    assert next(looks) <= 1 + 1 / LOOK_S


def test_time_that_this_thread_waited_is_known() -> None:
    """Or 0, on a kernel that does not count it; it never falls."""
    first = waited_s()
    assert 0.0 <= first <= waited_s()
