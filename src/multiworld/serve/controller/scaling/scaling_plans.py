"""Scaling plans: a precomputed table of the replicas that carry each load. Pure.

A scaling plan is a number of replicas for *every* stage of a pipeline, and the maximum
arrival rate that these replicas carry within the objective. The next plan has one more
replica at the bottleneck, or a sixteenth more if there are many. Plans keyed by load
are the idea of CascadeServe (Kossmann et al., arXiv 2406.14424), whose plans also
choose among models.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.controller.scaling import queue_model
from multiworld.serve.controller.scaling.snapshot import StageLimits

BISECTIONS = 18  # steps that find a plan's load; exact to a few millionths
# Maximum planned utilisation of a stage if the model has an objective.
MAX_UTILISATION = 0.85

# Minimum objective of scaling plans, as a multiple of the service time. Even an idle
# service misses a shorter objective, so such an objective must not claim all replicas.
MIN_OBJECTIVE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Service times and limits of one stage."""

    item_s: float  # time that a replica is busy with one request
    batch_s: float  # time of one batch; a request spends at least this in the stage
    limits: StageLimits
    variability: float = 0.75  # see ``mean_wait_s``


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """Number of replicas of each stage, and the maximum arrival rate they carry."""

    rate: float
    replicas: tuple[int, ...]
    latency_s: float


@dataclass(frozen=True, slots=True)
class _Aim:
    objective_s: float | None
    share: float


def plans_of(
    stages: Sequence[StageCost], objective_s: float | None = None, share: float = 0.99
) -> tuple[ScalingPlan, ...]:
    """Return all scaling plans of a pipeline, smallest first."""
    # Without an objective, ``target_ongoing_requests`` determines the replicas.
    aim = _Aim(objective_s, share)
    counts = [max(1, stage.limits.min_replicas) for stage in stages]
    found: list[ScalingPlan] = []
    while True:
        rate = _carried(stages, counts, aim)
        if not found or rate > found[-1].rate * (1.0 + 1e-6):
            late = latency_s(stages, counts, rate, share)
            found.append(ScalingPlan(rate, tuple(counts), late))
        best = _stage_to_widen(stages, counts, aim)
        if best is None:
            return tuple(found)
        counts[best] = _wider(counts[best], stages[best].limits)


def plan_for(plans: Sequence[ScalingPlan], rate: float) -> int:
    """Return the index of the smallest plan that carries ``rate``, or of the last."""
    at = bisect.bisect_left([plan.rate for plan in plans], rate)
    return min(at, len(plans) - 1)


def latency_s(
    stages: Sequence[StageCost], counts: Sequence[int], rate: float, share: float
) -> float:
    """Return the time within which ``share`` of the requests pass all stages."""
    late, mean, compute_s = [], [], 0.0
    for stage, count in zip(stages, counts, strict=True):
        args = rate, stage.item_s, count, stage.variability
        late.append(queue_model.wait_quantile_s(*args, share))
        mean.append(queue_model.mean_wait_s(*args))
        compute_s += stage.batch_s
    # Add only the largest tail: a request seldom meets a rare, long wait in two stages.
    gaps = [one - other for one, other in zip(late, mean, strict=True)]
    if any(map(math.isinf, late)):
        return math.inf
    return compute_s + sum(mean) + max(gaps, default=0.0)


def _is_carried(
    stages: Sequence[StageCost], counts: Sequence[int], rate: float, aim: _Aim
) -> bool:
    loads = [rate * s.item_s / count for s, count in zip(stages, counts, strict=True)]
    if aim.objective_s is not None:
        compute_s = sum(stage.batch_s for stage in stages)
        reachable = max(aim.objective_s, MIN_OBJECTIVE * compute_s)
        late = latency_s(stages, counts, rate, aim.share)
        return max(loads) <= MAX_UTILISATION and late <= reachable
    return all(
        queue_model.ongoing(rate, stage.item_s, count, stage.variability)
        <= stage.limits.target_ongoing_requests * count
        for stage, count in zip(stages, counts, strict=True)
    )


def _carried(stages: Sequence[StageCost], counts: Sequence[int], aim: _Aim) -> float:
    narrowest = min(
        (c / s.item_s for s, c in zip(stages, counts, strict=True) if s.item_s > 0),
        default=math.inf,
    )
    if math.isinf(narrowest):
        return narrowest
    low, high = 0.0, narrowest
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if _is_carried(stages, counts, middle, aim):
            low = middle
        else:
            high = middle
    return low


def _wider(count: int, limits: StageLimits) -> int:
    """Return the next number of replicas: one or a sixteenth more."""
    return min(count + max(1, count // 16), limits.max_replicas)


def _stage_to_widen(
    stages: Sequence[StageCost], counts: Sequence[int], aim: _Aim
) -> int | None:
    """Return the stage that gains most from more replicas; None if none gains."""
    best: tuple[float, float, int] | None = None
    for k, stage in enumerate(stages):
        if counts[k] >= stage.limits.max_replicas:
            continue
        more = [*counts[:k], _wider(counts[k], stage.limits), *counts[k + 1 :]]
        load = stage.item_s / counts[k]
        gain = _carried(stages, more, aim), load, -k
        if best is None or gain > best:
            best = gain
    if best is None:
        return None
    # If a stage that cannot grow is the bottleneck, growing the others is useless.
    fixed = [
        s.item_s / c
        for s, c in zip(stages, counts, strict=True)
        if c >= s.limits.max_replicas
    ]
    if fixed and best[0] <= _carried(stages, counts, aim) * (1 + 1e-6):
        widest = max(fixed)
        if widest >= best[1] - 1e-12:
            return None
    return -best[2]
