"""Default autoscaling policy, used where a spec names no other. Pure.

1. Estimate the demand now, and at the moment when a new replica would be ready
   (``demand``).
2. Look up the gear, a number of replicas for every stage, that carries the demand
   (``gears``). Add replicas if recent bursts or the backlog need more to meet the
   objective. Until computing times are known, the queue length alone decides, as in Ray
   Serve.
3. Keep a burst reserve if SLO attainment fell short without it (``burst_reserve``).
4. Apply the stabilization windows (``stabilization``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from multiworld.serve.scaling.burst_reserve import (
    BurstRecord,
    BurstReserve,
    reserved_replicas,
    update,
)
from multiworld.serve.scaling.demand import Demand, demand_of, envelope
from multiworld.serve.scaling.explanation import Findings, describe, facts
from multiworld.serve.scaling.gears import (
    MIN_OBJECTIVE,
    Gear,
    StageCost,
    gear_for,
    gears_of,
)
from multiworld.serve.scaling.service_times import Times, times_of
from multiworld.serve.scaling.snapshot import (
    Decision,
    Sample,
    Snapshot,
    StageLimits,
    StageNow,
)
from multiworld.serve.scaling.stabilization import PendingChange, remember, stabilized

MARGIN = 1.15
"""Scale down only if the smaller fleet still carries this multiple of the demand."""

GEAR_TOLERANCE = 0.2
"""Relative change of a stage's computing time that makes the gears be computed anew."""

RESERVE_HORIZON = 15.0
"""Horizon of the burst reserve, as a multiple of the largest ``downscale_delay_s``.

Long enough for several bursts to recur. Chosen on traces, see
docs/serve/scaling-report.md."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """State that the policy keeps from one decision to the next.

    Attributes:
        costs: By stage, seconds of a request and of a batch that the gears were
            computed for.
        bounds: By stage, least and greatest number of replicas for the same.
        gears: Gears of the pipeline, smallest first.
        pending: By stage, recent needs that the stabilization windows still cover.
        measured: By stage, measured computing times; None where they are not known.
        burst_reserve: Burst reserve of the model.
    """

    costs: tuple[tuple[float, float], ...] = ()
    bounds: tuple[tuple[int, int], ...] = ()
    gears: tuple[Gear, ...] = ()
    pending: tuple[tuple[PendingChange, ...], ...] = ()
    measured: tuple[Times | None, ...] = ()
    burst_reserve: BurstReserve = field(default_factory=BurstReserve)


def decide(snapshot: Snapshot) -> Decision:
    """Return how many replicas each stage should have.

    Args:
        snapshot: Limits, samples and objective of one model. At least one stage must
            have limits.

    Returns:
        The replicas by stage, the reason in one line, and the state for the next call.
    """
    old = snapshot.memory if isinstance(snapshot.memory, PolicyState) else PolicyState()
    look_back_s = max(
        limits_now(s).look_back_period_s
        for s in snapshot.stages
        if s.limits is not None
    )
    measured = times_of(snapshot, look_back_s, old.measured)
    found = _find(snapshot, old, measured, look_back_s)
    pending = []
    replicas = []
    for k, stage in enumerate(snapshot.stages):
        limits = limits_now(stage)
        low, high = map(limits.within, found.needs[k])
        before = old.pending[k] if k < len(old.pending) else ()
        pending.append(remember(before, PendingChange(snapshot.now, low, high), limits))
        count = stabilized(
            pending[k], stage.replicas, limits, is_urgent=found.is_urgent
        )
        if found.demand.is_rising:
            count = max(count, stage.replicas)  # never scale down under rising load
        count = max(count, kept_while_starting(snapshot, k))
        replicas.append(stage.replicas if stage.limits is None else count)
    replicas = all_or_none(snapshot, replicas)
    return Decision(
        replicas=tuple(replicas),
        why=describe(snapshot, found, replicas),
        facts=facts(snapshot, found),
        memory=PolicyState(
            found.costs,
            _bounds(snapshot),
            found.gears,
            tuple(pending),
            measured,
            found.burst_reserve,
        ),
    )


def _find(
    snapshot: Snapshot,
    old: PolicyState,
    measured: tuple[Times | None, ...],
    look_back_s: float,
) -> Findings:
    demand = demand_of(
        snapshot.samples, look_back_s, snapshot.start_s, snapshot.interval_s
    )
    costs, gears = _gears(snapshot, measured, old)
    burst_reserve = _update_reserve(snapshot, costs, old.burst_reserve)
    asked = _needs(snapshot, demand, gears, costs, look_back_s)
    reserved = _reserved(snapshot, demand, burst_reserve, costs)
    needs = [
        (max(low, least), max(high, least))
        for (low, high), least in zip(asked, reserved, strict=True)
    ]
    return Findings(
        demand=demand,
        costs=costs,
        gears=gears,
        burst_reserve=burst_reserve,
        reserved=() if needs == asked else reserved,
        needs=needs,
        is_urgent=_is_urgent(snapshot, costs),
    )


def limits_now(stage: StageNow) -> StageLimits:
    """Return the limits of a stage; a stage that is not scaled keeps its number."""
    if stage.limits is not None:
        return stage.limits
    return StageLimits(min_replicas=stage.replicas, max_replicas=max(1, stage.replicas))


def _bounds(snapshot: Snapshot) -> tuple[tuple[int, int], ...]:
    limits = [limits_now(stage) for stage in snapshot.stages]
    return tuple((one.min_replicas, one.max_replicas) for one in limits)


# Gears.


def _gears(
    snapshot: Snapshot,
    measured: Sequence[Times | None],
    old: PolicyState,
) -> tuple[tuple[tuple[float, float], ...], tuple[Gear, ...]]:
    """Return the computing times and the gears; both empty if times are not known."""
    if any(times is None for times in measured):
        return (), ()
    costs = tuple(times[:2] for times in measured if times is not None)
    is_same = old.bounds == _bounds(snapshot)
    if old.gears and is_same and not _differ(costs, old.costs):
        return old.costs, old.gears
    stages = [
        StageCost(item_s=item_s, batch_s=batch_s, limits=limits_now(stage))
        for (item_s, batch_s), stage in zip(costs, snapshot.stages, strict=True)
    ]
    return costs, gears_of(stages, snapshot.objective_s, snapshot.objective_share)


def _differ(
    costs: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> bool:
    if len(costs) != len(others):
        return True
    return any(
        abs(item_s - old_s) > GEAR_TOLERANCE * old_s
        for (item_s, _), (old_s, _) in zip(costs, others, strict=True)
    )


# Burst reserve.


def _update_reserve(
    snapshot: Snapshot, costs: Sequence[tuple[float, float]], before: BurstReserve
) -> BurstReserve:
    if len(snapshot.samples) < 2 or not _is_reachable(snapshot, costs):
        return before
    one, other = snapshot.samples[-2:]
    limits = [limits_now(stage) for stage in snapshot.stages]
    max_wait_s = _max_wait_s(snapshot, costs, 0.0)
    record = BurstRecord(
        seconds=other.at - one.at,
        arrived=other.arrived - one.arrived,
        missed=other.missed - one.missed,
        refused=other.refused - one.refused,
        ongoing=[stage.ongoing for stage in other.stages],
        item_s=[item_s for item_s, _ in costs],
        ready=[stage.ready for stage in other.stages],
        min_replicas=[max(1, limit.min_replicas) for limit in limits],
        max_replicas=[limit.max_replicas for limit in limits],
        max_wait_s=max_wait_s,
        deadline_s=snapshot.deadline_s,
        burst_gap_s=snapshot.start_s + max_wait_s + 2 * snapshot.interval_s,
        objective_share=snapshot.objective_share,
    )
    delays = [s.limits.downscale_delay_s for s in snapshot.stages if s.limits]
    return update(before, record, RESERVE_HORIZON * max(*delays, snapshot.interval_s))


def _is_reachable(snapshot: Snapshot, costs: Sequence[tuple[float, float]]) -> bool:
    """Tell whether more replicas can help to meet the objective."""
    if snapshot.objective_s is None or not costs:
        return False
    return snapshot.objective_s >= MIN_OBJECTIVE * sum(item_s for item_s, _ in costs)


def _reserved(
    snapshot: Snapshot,
    demand: Demand,
    burst_reserve: BurstReserve,
    costs: Sequence[tuple[float, float]],
) -> tuple[int, ...]:
    """Return by stage the burst reserve.

    A pipeline that may scale to zero keeps no reserve while it is idle.
    """
    nothing = (0,) * len(snapshot.stages)
    is_known = len(burst_reserve.fleets) == len(nothing)
    if not is_known or not _is_reachable(snapshot, costs):
        return nothing
    is_on_demand = any(limits_now(stage).min_replicas == 0 for stage in snapshot.stages)
    if is_on_demand and is_idle(snapshot, demand.rate):
        return nothing
    item_s = [item for item, _ in costs]
    return reserved_replicas(burst_reserve, item_s, snapshot.objective_share)


# Needs.


def _needs(
    snapshot: Snapshot,
    demand: Demand,
    gears: Sequence[Gear],
    costs: Sequence[tuple[float, float]],
    look_back_s: float,
) -> list[tuple[int, int]]:
    """Return by stage how many replicas are needed, without and with the margin."""
    queued = [
        for_queue(snapshot.samples, k, stage, look_back_s)
        for k, stage in enumerate(snapshot.stages)
    ]
    if is_idle(snapshot, demand.rate):
        return [(0, 0) for _ in snapshot.stages]
    if not gears:
        # A request needs every stage, even those that it has not reached yet.
        return [(max(1, count), max(1, count)) for count in queued]
    low = gears[gear_for(gears, demand.expected)].replicas
    high = gears[gear_for(gears, MARGIN * demand.expected)].replicas
    max_wait_s = _max_wait_s(snapshot, costs, look_back_s)
    burst = envelope(snapshot.samples, look_back_s, max_wait_s)
    found = []
    for k, (item_s, _) in enumerate(costs):
        waiting = _for_backlog(snapshot, demand, k, item_s, max_wait_s)
        least = math.ceil(burst * item_s - 1e-9)
        with_margin = math.ceil(MARGIN * burst * item_s - 1e-9)
        found.append((max(low[k], least, waiting), max(high[k], with_margin, waiting)))
    return found


def is_idle(snapshot: Snapshot, rate: float) -> bool:
    """Tell whether a model has nothing to do.

    Args:
        snapshot: Its samples.
        rate: Arrivals a second.
    """
    last = snapshot.samples[-1]
    return rate == 0 and not any(seen.ongoing for seen in last.stages)


def kept_while_starting(snapshot: Snapshot, k: int) -> int:
    """Return how many replicas a busy stage keeps while some are still starting.

    These are the ready ones and at least one: the load looks small while it waits.

    Args:
        snapshot: The samples.
        k: Number of the stage.
    """
    seen, count = snapshot.samples[-1].stages[k], snapshot.stages[k].replicas
    is_starting = seen.ready < count and seen.ongoing > 0
    return min(count, max(1, seen.ready)) if is_starting else 0


def all_or_none(snapshot: Snapshot, replicas: list[int]) -> list[int]:
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


def for_queue(
    samples: Sequence[Sample], k: int, stage: StageNow, look_back_s: float
) -> int:
    """Return the replicas for the mean ongoing requests (Ray Serve's rule).

    Args:
        samples: Samples, oldest first.
        k: Number of the stage.
        stage: The stage.
        look_back_s: Seconds over which the mean is taken.
    """
    begin = samples[-1].at - look_back_s
    lately = [s.stages[k].ongoing for s in samples if s.at > begin - 1e-9]
    mean = sum(lately) / len(lately)
    return math.ceil(mean / limits_now(stage).target_ongoing_requests - 1e-9)


def _max_wait_s(
    snapshot: Snapshot, costs: Sequence[tuple[float, float]], look_back_s: float
) -> float:
    """Return how many seconds requests may wait and still meet the objective."""
    if snapshot.objective_s is None:
        return look_back_s
    compute_s = sum(item_s for item_s, _ in costs)
    return max(snapshot.objective_s - compute_s, snapshot.objective_s / 4)


def _for_backlog(
    snapshot: Snapshot, demand: Demand, k: int, item_s: float, max_wait_s: float
) -> int:
    """Return the replicas that carry the demand and also clear the backlog in time."""
    limits = limits_now(snapshot.stages[k])
    seen = snapshot.samples[-1].stages[k]
    usual = limits.target_ongoing_requests * max(1, snapshot.stages[k].replicas)
    waiting = max(0.0, seen.ongoing - usual)
    if waiting == 0:
        return 0
    return math.ceil((demand.rate + waiting / max_wait_s) * item_s)


def _is_urgent(snapshot: Snapshot, costs: Sequence[tuple[float, float]]) -> bool:
    """Tell whether the backlog of one stage alone makes requests miss the objective."""
    if snapshot.objective_s is None or not costs:
        return False
    last = snapshot.samples[-1]
    return any(
        seen.ongoing * item_s > snapshot.objective_s * max(1, stage.replicas)
        for seen, stage, (item_s, _) in zip(
            last.stages, snapshot.stages, costs, strict=True
        )
    )
