"""Time of a step of a model that generates text, learned from samples. Pure.

A step of ``n`` tokens takes ``step_s + n * row_s``: it reads all weights once, and
computes each token. Both follow by least squares from samples with steps of different
sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.scaling.snapshot import Snapshot, StageSeen

USUAL_RATIO = 9.0
"""Usual ``step_s / row_s`` (SmolLM2 on an EPYC, see ``generation.scheduler.ROWS``); it
decides while all steps have about the same size."""

LEAST_PART = 32
"""Least tokens of a part of a prompt that is cut so that all stages compute at once,
as in ``generation.scheduler``."""

PRIOR = 0.01
"""Weight of ``USUAL_RATIO``, in steps for each step that was measured."""

MEMORY_PERIODS = 20.0
"""Look-back periods after which a measurement counts by 1/e."""

MIN_STEPS = 20
"""Steps that must have been measured."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Time of a step of one stage.

    Attributes:
        step_s: Seconds of any step.
        row_s: Seconds of each of its tokens.
    """

    step_s: float
    row_s: float

    def seconds(self, rows: float) -> float:
        """Return the seconds of a step.

        Args:
            rows: Number of its tokens.
        """
        return self.step_s + self.row_s * rows


def prompt_seconds(tokens: float, costs: Sequence[StepCost], most: int) -> float:
    """Return how long a prompt takes that nothing else is computed with, in seconds.

    Its parts go through the stages one after the other, so that all stages compute at
    once. All parts under way have together at most as many tokens as one step may have.

    Args:
        tokens: Its tokens.
        costs: Times of a step, by stage.
        most: Most tokens of a step.
    """
    tokens = max(1.0, tokens)
    part = min(tokens, max(LEAST_PART, min(tokens, most) / len(costs)))
    seconds = [cost.seconds(part) for cost in costs]
    return sum(seconds) + (math.ceil(tokens / part) - 1) * max(seconds)


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over the measured steps of one stage, for the least squares.

    Attributes:
        steps: Number of steps.
        rows: Number of tokens.
        row_squares: Sum of the squares of the tokens of a step.
        seconds: Computing time.
        row_seconds: Sum of tokens times time of a step.
    """

    steps: float = 0.0
    rows: float = 0.0
    row_squares: float = 0.0
    seconds: float = 0.0
    row_seconds: float = 0.0

    def faded(self, share: float) -> StepSums:
        """Return the sums with a smaller weight."""
        return StepSums(
            self.steps * share,
            self.rows * share,
            self.row_squares * share,
            self.seconds * share,
            self.row_seconds * share,
        )

    def with_steps(self, one: StageSeen, other: StageSeen) -> StepSums:
        """Return the sums with the steps between two samples, as equal steps."""
        steps = other.batches - one.batches
        rows, seconds = other.rows - one.rows, other.busy_s - one.busy_s
        if steps <= 0 or seconds <= 0:
            return self
        mean = rows / steps
        return StepSums(
            self.steps + steps,
            self.rows + rows,
            self.row_squares + steps * mean * mean,
            self.seconds + seconds,
            self.row_seconds + mean * seconds,
        )

    def cost(self) -> StepCost | None:
        """Return the cost of a step; None if too few were measured."""
        if self.steps < MIN_STEPS or self.rows <= 0:
            return None
        weight = PRIOR * self.steps
        ss, sr, rr = self.steps, self.rows, self.row_squares
        ss, sr = ss + weight, sr - USUAL_RATIO * weight
        rr += USUAL_RATIO * USUAL_RATIO * weight
        determinant = ss * rr - sr * sr
        step_s = (rr * self.seconds - sr * self.row_seconds) / determinant
        row_s = (ss * self.row_seconds - sr * self.seconds) / determinant
        if row_s <= 0:
            return StepCost(self.seconds / self.steps, 0.0)
        if step_s <= 0:
            return StepCost(0.0, self.seconds / self.rows)
        return StepCost(step_s, row_s)


def measured(snapshot: Snapshot, before: Sequence[StepSums]) -> tuple[StepSums, ...]:
    """Return the sums of each stage with the steps of the last sample.

    Args:
        snapshot: The samples.
        before: Sums of the decision before, by stage; none at first.
    """
    sums = list(before) or [StepSums() for _ in snapshot.stages]
    if len(snapshot.samples) < 2:
        return tuple(sums)
    one, other = snapshot.samples[-2:]
    periods = [s.limits.look_back_period_s for s in snapshot.stages if s.limits]
    share = math.exp((one.at - other.at) / (MEMORY_PERIODS * max(periods)))
    return tuple(
        each.faded(share).with_steps(one.stages[k], other.stages[k])
        for k, each in enumerate(sums)
    )
