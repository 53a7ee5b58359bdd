"""Times of steps, learned from samples."""

from __future__ import annotations

import random

import pytest

from multiworld.serve.controller.scaling.snapshot import StageSeen
from multiworld.serve.controller.scaling.step_costs import (
    StepCost,
    StepSums,
    prompt_seconds,
)


def learned(steps: list[tuple[int, float]], noise: float = 0.0) -> StepSums:
    chance = random.Random(0)
    sums, before = StepSums(), StageSeen(ongoing=0, ready=1)
    for rows, step_s in steps:
        took = 10 * step_s * (1 + noise * chance.uniform(-1, 1))
        after = StageSeen(
            ongoing=0,
            ready=1,
            batches=before.batches + 10,
            rows=before.rows + 10 * rows,
            busy_s=before.busy_s + took,
        )
        sums = sums.with_steps(before, after)
        before = after
    return sums


def test_time_of_a_step_and_of_a_token_are_distinguished() -> None:
    sizes = [1, 8, 200, 4, 256, 16] * 3
    cost = learned([(n, 0.01 + 0.0005 * n) for n in sizes], noise=0.1).cost()
    assert cost is not None
    assert cost.step_s == pytest.approx(0.01, rel=0.25)
    assert cost.row_s == pytest.approx(0.0005, rel=0.15)
    assert cost.seconds(100) == pytest.approx(0.06, rel=0.1)


def test_equal_steps_are_shared_out_as_usual() -> None:
    """Without steps of different sizes, a step is assumed to cost nine tokens."""
    cost = learned([(8, 0.017)] * 5).cost()
    assert cost is not None
    assert cost.seconds(8) == pytest.approx(0.017, rel=0.02)
    assert cost.step_s == pytest.approx(9 * cost.row_s, rel=0.05)


@pytest.mark.parametrize(
    ("steps", "wanted"),
    [
        ([(1, 0.02), (100, 0.01)] * 5, (0.015, 0.0)),
        ([(10, 0.0001), (1000, 0.1)] * 5, (0.0, 0.1001 / 1010)),
    ],
)
def test_no_time_is_negative(
    steps: list[tuple[int, float]], wanted: tuple[float, float]
) -> None:
    cost = learned(steps).cost()
    assert cost is not None
    assert (cost.step_s, cost.row_s) == pytest.approx(wanted, rel=0.02)


def test_few_steps_give_no_estimate() -> None:
    assert learned([(8, 0.017)]).cost() is None
    assert learned([]).cost() is None


@pytest.mark.parametrize(
    ("tokens", "wanted_s"),
    [
        (0, 0.003 * 1),  # like one token
        (20, 0.003 * 20),  # too short to be cut
        (300, 0.001 * 100 * 5),  # three parts, three stages
        (900, 0.001 * 100 * 11),  # no more in flight than one step may have
    ],
)
def test_prompt_is_computed_in_all_stages_at_once(tokens: int, wanted_s: float) -> None:
    """The scheduler cuts prompts into chunks, which the stages compute in parallel."""
    costs = [StepCost(0.0, 0.001)] * 3
    assert prompt_seconds(tokens, costs, 300) == pytest.approx(wanted_s)
