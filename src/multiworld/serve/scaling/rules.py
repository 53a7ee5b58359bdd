"""Rules that the policies share, for all of their ways to find what is needed. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from multiworld.serve.scaling.snapshot import (
    Sample,
    Snapshot,
    StageLimits,
    StageNow,
)
from multiworld.serve.scaling.stabilization import PendingChange, remember, stabilized

MARGIN = 1.15
"""Scale down only if the smaller fleet still carries this multiple of the demand."""


def look_back_s(snapshot: Snapshot) -> float:
    """Return the longest ``look_back_period_s`` of the stages that are scaled.

    Args:
        snapshot: Limits of the stages; at least one must have some.
    """
    return max(s.limits.look_back_period_s for s in snapshot.stages if s.limits)


def limits_now(stage: StageNow) -> StageLimits:
    """Return the limits of a stage; a stage that is not scaled keeps its number."""
    if stage.limits is not None:
        return stage.limits
    return StageLimits(min_replicas=stage.replicas, max_replicas=max(1, stage.replicas))


def is_idle(snapshot: Snapshot, rate: float) -> bool:
    """Tell whether a model has nothing to do.

    Args:
        snapshot: Its samples.
        rate: Arrivals a second.
    """
    last = snapshot.samples[-1]
    return rate == 0 and not any(seen.ongoing for seen in last.stages)


def for_queue(
    samples: Sequence[Sample], k: int, stage: StageNow, period_s: float
) -> int:
    """Return the replicas for the mean ongoing requests (Ray Serve's rule).

    Args:
        samples: Samples, oldest first.
        k: Number of the stage.
        stage: The stage.
        period_s: Seconds over which the mean is taken.
    """
    begin = samples[-1].at - period_s
    lately = [s.stages[k].ongoing for s in samples if s.at > begin - 1e-9]
    mean = sum(lately) / len(lately)
    return math.ceil(mean / limits_now(stage).target_ongoing_requests - 1e-9)


def settled(
    snapshot: Snapshot,
    needs: Sequence[tuple[int, int]],
    pending: Sequence[tuple[PendingChange, ...]],
    *,
    is_urgent: bool,
    is_rising: bool = False,
) -> tuple[list[int], tuple[tuple[PendingChange, ...], ...]]:
    """Return the replicas by stage that the needs lead to now.

    Args:
        snapshot: Limits of the stages, and their replicas.
        needs: By stage, replicas that are needed, without and with the margin.
        pending: By stage, recent needs that the stabilization windows still cover.
        is_urgent: Whether objectives are missed already, so that nothing waits.
        is_rising: Whether the load rises, so that nothing is scaled down.

    Returns:
        The replicas by stage, and the recent needs with these.
    """
    remembered, replicas = [], []
    for k, stage in enumerate(snapshot.stages):
        limits = limits_now(stage)
        low, high = map(limits.within, needs[k])
        before = pending[k] if k < len(pending) else ()
        now = PendingChange(snapshot.now, low, high)
        remembered.append(remember(before, now, limits))
        count = stabilized(remembered[k], stage.replicas, limits, is_urgent=is_urgent)
        if is_rising:
            count = max(count, stage.replicas)
        count = max(count, _kept_while_starting(snapshot, k))
        replicas.append(stage.replicas if stage.limits is None else count)
    return _all_or_none(snapshot, replicas), tuple(remembered)


def _kept_while_starting(snapshot: Snapshot, k: int) -> int:
    """Return how many replicas a busy stage keeps while some are still starting.

    These are the ready ones and at least one: the load looks small while it waits.

    Args:
        snapshot: The samples.
        k: Number of the stage.
    """
    seen, count = snapshot.samples[-1].stages[k], snapshot.stages[k].replicas
    is_starting = seen.ready < count and seen.ongoing > 0
    return min(count, max(1, seen.ready)) if is_starting else 0


def _all_or_none(snapshot: Snapshot, replicas: list[int]) -> list[int]:
    """Return the replicas with at least one for each stage, or none for all on demand.

    A pipeline without one of its stages answers nothing.

    Args:
        snapshot: Limits of the stages.
        replicas: Replicas by stage.
    """
    on_demand = [
        k
        for k, stage in enumerate(snapshot.stages)
        if stage.limits is not None and stage.limits.min_replicas == 0
    ]
    is_needed = any(replicas[k] for k in on_demand)
    return [
        max(count, 1) if k in on_demand and is_needed else count
        for k, count in enumerate(replicas)
    ]
