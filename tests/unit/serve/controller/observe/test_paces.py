"""Which replica is said to be slow, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from multiworld.serve.controller.observe.paces import (
    LONG_S,
    MIN_STEPS,
    WINDOW_S,
    Paces,
    Work,
)

TICK_S = 2.0


@dataclass
class Replica:
    """A replica that is busy all the time."""

    step_s: float = 0.01
    cpu: float = 1.0  # processor seconds for a second
    rows: int = 4  # for a step
    is_idle: bool = False
    stage: int = 0
    steps: float = 0.0
    done: float = 0.0  # rows
    computed_s: float = 0.0
    cpu_s: float = 0.0
    computing_s: float = 0.0
    machine_busy: float = 1.0

    def work(self, seconds: float) -> Work:
        if not self.is_idle:
            self.steps += seconds / self.step_s
            self.done += self.rows * seconds / self.step_s
            self.computed_s += seconds
            self.cpu_s += self.cpu * seconds
        return Work(
            ("m", "1", self.stage),
            int(self.steps),
            int(self.done),
            self.computed_s,
            self.cpu_s,
            self.computing_s,
            self.machine_busy,
        )


class Stage:
    def __init__(self, *replicas: Replica) -> None:
        self.paces = Paces()
        self.replicas = {f"m/0/{n}": each for n, each in enumerate(replicas)}
        self.now = 0.0

    def run(self, seconds: float, loading: Sequence[str] = ()) -> dict[str, str]:
        for _ in range(int(seconds / TICK_S)):
            self.now += TICK_S
            found = {name: each.work(TICK_S) for name, each in self.replicas.items()}
            self.paces.seen(found, self.now, loading)
        return self.paces.slow


def test_equal_replicas_are_not_slow() -> None:
    assert Stage(Replica(), Replica(0.012), Replica(0.009)).run(60.0) == {}


def test_replica_that_becomes_slow_is_named_within_a_window() -> None:
    stage = Stage(Replica(), Replica(), Replica())
    stage.run(30.0)
    stage.replicas["m/0/1"].step_s = 0.03
    (found,) = stage.run(WINDOW_S + TICK_S).items()
    name, why = found
    assert name == "m/0/1"
    assert "30 ms, 3.0 times its peers' time, 3.0 times its own past" in why
    assert "it gets enough processor time" in why


@pytest.mark.parametrize(
    ("busy", "cause"),
    [
        (0.99, "something else runs on its cores"),
        (-1.0, "something else runs on its cores, or it is throttled"),
        (0.5, "cores are free, so it is throttled, or stopped repeatedly"),
    ],
)
def test_starved_replica_is_said_to_be(busy: float, cause: str) -> None:
    """``busy``: used share of its machine's cores; negative if it is unknown."""
    stage = Stage(Replica(), Replica())
    stage.run(30.0)
    slow = stage.replicas["m/0/0"]
    slow.step_s, slow.cpu, slow.machine_busy = 0.03, 0.33, busy
    why = stage.run(WINDOW_S + TICK_S)["m/0/0"]
    assert "starved" in why
    assert cause in why


def test_process_that_loads_is_named_as_a_likely_cause() -> None:
    stage = Stage(Replica())
    stage.run(30.0)
    stage.replicas["m/0/0"].step_s, stage.replicas["m/0/0"].cpu = 0.03, 0.33
    why = stage.run(WINDOW_S + TICK_S, loading=["m/0/1"])["m/0/0"]
    assert "m/0/1 took its cores to load" in why
    assert "m/0/1" not in stage.run(WINDOW_S + 2 * TICK_S)["m/0/0"]


def test_replica_that_is_starved_most_is_named_when_all_are_slower() -> None:
    """Its machine has no free core, so its peers are slower, too."""
    stage = Stage(Replica(), Replica())
    stage.run(60.0)
    for replica in stage.replicas.values():
        replica.step_s, replica.cpu = 0.02, 0.6
    starved = stage.replicas["m/0/0"]
    starved.step_s, starved.cpu = 0.03, 0.3
    (found,) = stage.run(WINDOW_S + TICK_S).items()
    name, why = found
    assert name == "m/0/0"
    assert "gets 0.30 s of processor time" in why


def test_replica_that_recovers_is_no_longer_slow() -> None:
    stage = Stage(Replica(), Replica())
    stage.run(30.0)
    stage.replicas["m/0/0"].step_s = 0.03
    assert stage.run(60.0)
    stage.replicas["m/0/0"].step_s = 0.01
    assert stage.run(WINDOW_S + TICK_S) == {}


def test_replica_alone_is_compared_with_its_past() -> None:
    stage = Stage(Replica())
    stage.run(60.0)
    stage.replicas["m/0/0"].step_s = 0.04
    why = stage.run(2 * WINDOW_S)["m/0/0"]
    assert "4.0 times its own past" in why


def test_all_slower_at_once_is_more_work_not_one_slow_replica() -> None:
    stage = Stage(Replica(), Replica(), Replica())
    stage.run(30.0)
    for replica in stage.replicas.values():
        replica.step_s = 0.05
    assert stage.run(30.0) == {}


def test_larger_batches_are_not_slowness() -> None:
    stage = Stage(Replica(), Replica())
    stage.run(30.0)
    busy = stage.replicas["m/0/0"]
    busy.step_s, busy.rows = 0.04, 16
    assert stage.run(30.0) == {}


@pytest.mark.parametrize(("rows", "is_slower"), [(1, True), (10, False)])
def test_stage_is_slower_if_its_steps_take_longer_with_as_many_rows(
    rows: int, *, is_slower: bool
) -> None:
    stage = Stage(Replica(), Replica())
    stage.run(60.0)
    for replica in stage.replicas.values():
        replica.step_s, replica.rows = 0.05, rows * replica.rows
    stage.run(WINDOW_S + TICK_S)
    found = stage.paces.slower
    assert bool(found) == is_slower
    assert all(
        "a step takes 50 ms (before: 10 ms), with" in why for why in found.values()
    )


def test_replica_that_was_always_slower_is_named_beside_its_peers() -> None:
    stage = Stage(Replica(0.05), Replica(), Replica())
    assert list(stage.run(WINDOW_S + TICK_S)) == ["m/0/0"]


@pytest.mark.parametrize(("computing_s", "is_slow"), [(0.5, False), (3.0, True)])
def test_step_that_does_not_end_is_slow(computing_s: float, is_slow: bool) -> None:
    stage = Stage(Replica(), Replica())
    stage.run(30.0)
    hung = stage.replicas["m/0/0"]
    hung.is_idle, hung.computing_s = True, computing_s
    assert computing_s > LONG_S or not is_slow
    assert ("m/0/0" in stage.run(TICK_S)) == is_slow


@pytest.mark.parametrize("computing_s", [1.2, 1.6])
def test_step_as_long_as_the_others_of_its_replica_is_not_slow(
    computing_s: float,
) -> None:
    alone = Replica(1.25, computing_s=computing_s)
    stage = Stage(alone)
    assert not any(stage.run(TICK_S) for _ in range(60))
    alone.is_idle, alone.computing_s = True, 7.0
    assert stage.run(TICK_S)


@pytest.mark.parametrize("step_s", [1.0, 1.5, 5.0, 40.0])
def test_replica_with_long_steps_is_as_busy_as_it_is(step_s: float) -> None:
    """A saturated stage must not count as idle."""
    paces = Paces()
    for now in range(0, 200, 2):
        steps = int(now / step_s)
        paces.seen(
            {
                "m/0/0": Work(
                    ("m", "1", 0),
                    steps,
                    steps,
                    steps * step_s,
                    0.0,
                    now - steps * step_s,
                )
            },
            float(now),
        )
        assert paces.busy["m/0/0"] == pytest.approx(1.0 if now else 0.0)
    assert paces.steps_s == ({"m/0/0": step_s} if step_s < 8.0 else {})


def test_burst_is_one_window_of_the_past() -> None:
    stage = Stage(Replica())
    stage.run(20.0)
    replica = stage.replicas["m/0/0"]
    replica.step_s = 0.012
    stage.run(2 * TICK_S)
    replica.is_idle = True
    stage.run(55.0)
    replica.is_idle, replica.step_s = False, 0.01
    assert stage.run(WINDOW_S) == {}
    assert stage.paces.slower == {}


def test_cpu_time_of_an_idle_replica_is_no_measure_for_others() -> None:
    busy, idle = Replica(), Replica()
    stage = Stage(busy, idle)
    stage.run(20.0)
    idle.is_idle = True
    for _ in range(20):
        idle.cpu_s += 1.0  # on other things
        stage.run(TICK_S)
    busy.step_s = 0.03
    why = "".join(stage.run(20.0).values())
    assert "starved" not in why


def test_idle_replica_is_not_judged() -> None:
    stage = Stage(Replica(), Replica(is_idle=True))
    assert stage.run(60.0) == {}
    assert list(stage.paces.steps_s) == ["m/0/0"]


def test_few_steps_are_no_pace() -> None:
    stage = Stage(Replica(WINDOW_S / (MIN_STEPS - 2)), Replica())
    assert stage.run(WINDOW_S) == {}


def test_replica_that_is_gone_is_forgotten() -> None:
    stage = Stage(Replica(), Replica())
    stage.run(30.0)
    stage.replicas["m/0/0"].step_s = 0.03
    assert stage.run(30.0)
    del stage.replicas["m/0/0"]
    assert stage.run(TICK_S) == {}
