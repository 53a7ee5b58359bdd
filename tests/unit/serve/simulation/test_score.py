"""Scores of simulated runs: what counts, and runs without anything to count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.serve.simulation.pipeline import SimulatedDecision, SimulationResult
from multiworld.serve.simulation.score import FLAP_S, flaps, judge

Change = tuple[float, tuple[int, ...], tuple[int, ...]]


def result(
    *took: float,
    objective_s: float | None = 1.0,
    seconds: float = 10.0,
    decided: Sequence[Change] = (),
) -> SimulationResult:
    """Return a run whose requests took these seconds; -1 is a lost one."""
    return SimulationResult(
        model="m",
        objective_s=objective_s,
        requests=[(float(n), seconds) for n, seconds in enumerate(took)],
        attained=sum(0 <= t <= (objective_s or 1e9) for t in took),
        refused=0,
        late=sum(seconds < 0 for seconds in took),
        replica_s=(seconds, 2 * seconds),
        seconds=seconds,
        moments=[],
        decided=[SimulatedDecision(*change, why="") for change in decided],
    )


def test_only_answers_within_the_objective_attain_it() -> None:
    score = judge("p", result(0.5, 1.0, 1.001, -1.0))
    assert (score.policy, score.model, score.requests) == ("p", "m", 4)
    assert score.attained == 0.5
    assert score.goodput == pytest.approx(0.2)
    assert score.late == 1
    assert score.mean_replicas == pytest.approx(3.0)


def test_without_an_objective_every_answer_counts() -> None:
    score = judge("p", result(5.0, 500.0, -1.0, objective_s=None))
    assert score.attained == pytest.approx(2 / 3)


def test_latencies_are_those_of_answered_requests() -> None:
    """Lost requests have no latency and must not improve the quantiles."""
    score = judge("p", result(-1.0, 1.0, 2.0, 3.0, -1.0))
    assert (score.p50_s, score.p99_s) == (2.0, 3.0)


def test_run_in_which_everything_is_lost_has_a_score() -> None:
    """Its latencies are unknown, not zero."""
    score = judge("p", result(-1.0, -1.0))
    assert (score.attained, score.goodput) == (0.0, 0.0)
    assert math.isnan(score.p50_s)
    assert math.isnan(score.p99_s)


def test_run_without_requests_or_time_has_a_score() -> None:
    """Nothing may be divided by zero."""
    score = judge("p", result(seconds=0.0))
    assert (score.requests, score.attained, score.goodput) == (0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ([], 0),
        ([(0.0, (1,), (2,))], 0),
        ([(0.0, (1,), (2,)), (5.0, (2,), (3,))], 0),
        ([(0.0, (1,), (2,)), (5.0, (2,), (1,))], 1),
        ([(0.0, (1,), (2,)), (FLAP_S, (2,), (1,))], 1),
        ([(0.0, (1,), (2,)), (FLAP_S + 0.1, (2,), (1,))], 0),
        ([(0.0, (1,), (2,)), (5.0, (2,), (1,)), (9.0, (1,), (2,))], 2),
        # each stage has its own history
        ([(0.0, (1, 5), (2, 5)), (5.0, (2, 5), (2, 4))], 0),
        ([(0.0, (1, 5), (2, 4)), (5.0, (2, 4), (1, 5))], 2),
        # a decision that leaves a stage alone does not count for it
        ([(0.0, (1,), (2,)), (5.0, (2,), (2,)), (9.0, (2,), (1,))], 1),
    ],
)
def test_flap_is_one_way_and_back_within_a_minute(
    changes: list[Change], count: int
) -> None:
    assert flaps(changes) == count
    assert judge("p", result(1.0, decided=changes)).flaps == count


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(-3, 3)), max_size=30))
def test_flaps_are_fewer_than_the_changes(steps: list[tuple[float, int]]) -> None:
    at, size = 0.0, 100
    changes: list[Change] = []
    grown: list[Change] = []
    for pause, step in steps:
        at += pause
        changes.append((at, (size,), (size + step,)))
        grown.append((at, (size,), (size + abs(step),)))
        size += step
    assert flaps(changes) <= max(0, sum(step != 0 for _, step in steps) - 1)
    assert flaps(grown) == 0
