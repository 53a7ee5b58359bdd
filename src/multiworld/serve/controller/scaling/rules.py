"""Rules that the policies share. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from multiworld.serve.controller.scaling.snapshot import (
    Sample,
    Snapshot,
    StageLimits,
    StageNow,
)
from multiworld.serve.controller.scaling.stabilization import (
    PendingChange,
    remember,
    stabilized,
)

MARGIN = 1.15  # multiple of the demand that a smaller fleet must carry


def look_back_s(snapshot: Snapshot) -> float:
    """Return the longest look-back period of the scaled stages (at least one)."""
    return max(s.limits.look_back_period_s for s in snapshot.stages if s.limits)


def limits_now(stage: StageNow) -> StageLimits:
    """Return the limits of a stage; a fixed stage is limited to its size."""
    if stage.limits is not None:
        return stage.limits
    return StageLimits(min_replicas=stage.replicas, max_replicas=max(1, stage.replicas))


def is_idle(snapshot: Snapshot, rate: float) -> bool:
    last = snapshot.samples[-1]
    return rate == 0 and not any(seen.ongoing for seen in last.stages)


def for_queue(
    samples: Sequence[Sample], k: int, stage: StageNow, period_s: float
) -> int:
    """Return the replicas for the mean ongoing requests (Ray Serve's rule)."""
    begin = samples[-1].at - period_s
    lately = [s.stages[k].ongoing for s in samples if s.at > begin - 1e-9]
    mean = sum(lately) / len(lately)
    return math.ceil(mean / limits_now(stage).target_ongoing_requests - 1e-9)


def settled(
    snapshot: Snapshot,
    needs: Sequence[tuple[int, int]],  # by stage: replicas without and with the margin
    # By stage: earlier needs that the stabilization windows still cover.
    pending: Sequence[tuple[PendingChange, ...]],
    *,
    is_urgent: bool,  # whether to scale up without waiting
    is_rising: bool = False,  # whether to prevent scaling down
) -> tuple[list[int], tuple[tuple[PendingChange, ...], ...]]:
    """Return the replicas by stage after stabilization, and needs to remember."""
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
    """Return a busy stage's minimum size: its load looks small while replicas start."""
    seen, count = snapshot.samples[-1].stages[k], snapshot.stages[k].replicas
    is_starting = seen.ready < count and seen.ongoing > 0
    return min(count, max(1, seen.ready)) if is_starting else 0


def _all_or_none(snapshot: Snapshot, replicas: list[int]) -> list[int]:
    """Raise all on-demand stages to one replica if any needs one."""
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
