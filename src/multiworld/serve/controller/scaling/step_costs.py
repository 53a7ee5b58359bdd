"""Duration of a step of a model that generates text, fitted to samples by least
squares: ``step_s``, in which the step reads all weights once, plus ``row_s`` for each
token. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from multiworld.serve.controller.scaling.snapshot import Snapshot, StageSeen
from multiworld.serve.replica.scheduling.step_planner import MIN_CHUNK

# Typical ``step_s / row_s``, used while all steps have about the same size. Measured
# with SmolLM2 on an EPYC; see ``replica.scheduling.step_planner``.
USUAL_RATIO = 9.0

PRIOR = 0.01  # weight of ``USUAL_RATIO``, in steps per measured step
MEMORY_PERIODS = 20.0  # look-back periods after which a measurement's weight is 1/e
MIN_STEPS = 20  # minimum measured steps for an estimate


@dataclass(frozen=True, slots=True)
class StepCost:
    step_s: float
    row_s: float

    def seconds(self, rows: float) -> float:
        return self.step_s + self.row_s * rows


def prompt_seconds(tokens: float, costs: Sequence[StepCost], max_tokens: int) -> float:
    """Return the time to prefill a prompt that has the pipeline to itself."""
    # The prompt's chunks pass the stages one after the other; the chunks in flight
    # together have ``max_tokens`` tokens.
    tokens = max(1.0, tokens)
    part = min(tokens, max(MIN_CHUNK, min(tokens, max_tokens) / len(costs)))
    seconds = [cost.seconds(part) for cost in costs]
    return sum(seconds) + (math.ceil(tokens / part) - 1) * max(seconds)


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over the measured steps of one stage, for the least-squares fit."""

    steps: float = 0.0
    rows: float = 0.0
    row_squares: float = 0.0
    seconds: float = 0.0
    row_seconds: float = 0.0

    def faded(self, share: float) -> StepSums:
        return StepSums(*(value * share for value in astuple(self)))

    def with_steps(self, one: StageSeen, other: StageSeen) -> StepSums:
        """Add the steps between two samples, assuming that all have the same size."""
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
    """Return the sums of each stage, with the steps of the latest sample added."""
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
