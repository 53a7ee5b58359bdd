"""Default autoscaling policy, used where a spec names no other. Pure.

It looks up the scaling plan for the demand at the time when a new replica would be
ready, adds replicas for bursts, the backlog and the burst reserve, and applies the
stabilization windows. Until service times are known, the queue length alone decides,
as in Ray Serve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from multiworld.serve.controller.scaling import rules
from multiworld.serve.controller.scaling.burst_reserve import (
    BurstRecord,
    BurstReserve,
    reserved_replicas,
    update,
)
from multiworld.serve.controller.scaling.demand import (
    Demand,
    demand_of,
    envelope,
    sample_at,
)
from multiworld.serve.controller.scaling.scaling_plans import (
    MIN_OBJECTIVE,
    ScalingPlan,
    StageCost,
    plan_for,
    plans_of,
)
from multiworld.serve.controller.scaling.snapshot import Decision, Snapshot
from multiworld.serve.controller.scaling.stabilization import PendingChange

# Relative change of a service time above which the plans are recomputed.
PLAN_TOLERANCE = 0.2

# Horizon of the burst reserve, as a multiple of the largest ``downscale_delay_s``: long
# enough for several bursts to recur. Chosen on traces; see
# docs/serve/scaling-report.md.
RESERVE_HORIZON = 15.0

SIMILAR_ROWS = 0.8  # ratio of mean batch sizes above which they count as equal
MIN_REQUESTS = 20  # minimum recent requests before a stage's measured times count

# Seconds per request, seconds per batch, and requests per batch.
Times = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class PolicyState:
    # Seconds per request and per batch, by stage.
    costs: tuple[tuple[float, float], ...] = ()
    bounds: tuple[tuple[int, int], ...] = ()  # minimum and maximum by stage
    plans: tuple[ScalingPlan, ...] = ()
    pending: tuple[tuple[PendingChange, ...], ...] = ()
    measured: tuple[Times | None, ...] = ()
    burst_reserve: BurstReserve = field(default_factory=BurstReserve)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Intermediate results of a decision; by stage, and empty if unknown."""

    demand: Demand
    costs: tuple[tuple[float, float], ...]  # seconds of a request and of a batch
    plans: tuple[ScalingPlan, ...]
    burst_reserve: BurstReserve
    reserved: tuple[int, ...]  # replicas of the burst reserve; empty if it adds none
    needs: list[tuple[int, int]]  # by stage: replicas without and with the margin
    is_urgent: bool


def decide(snapshot: Snapshot) -> Decision:
    """Return the replicas of each stage; at least one stage must have limits."""
    old = snapshot.memory if isinstance(snapshot.memory, PolicyState) else PolicyState()
    period_s = rules.look_back_s(snapshot)
    measured = _times_of(snapshot, period_s, old.measured)
    found = _find(snapshot, old, measured, period_s)
    replicas, pending = rules.settled(
        snapshot,
        found.needs,
        old.pending,
        is_urgent=found.is_urgent,
        is_rising=found.demand.is_rising,
    )
    return Decision(
        replicas=tuple(replicas),
        why=_described(snapshot, found, replicas),
        facts=_facts(snapshot, found),
        memory=PolicyState(
            found.costs,
            _bounds(snapshot),
            found.plans,
            pending,
            measured,
            found.burst_reserve,
        ),
    )


def _find(
    snapshot: Snapshot,
    old: PolicyState,
    measured: tuple[Times | None, ...],
    period_s: float,
) -> Findings:
    demand = demand_of(
        snapshot.samples, period_s, snapshot.start_s, snapshot.interval_s
    )
    costs, plans = _scaling_plans(snapshot, measured, old)
    burst_reserve = _update_reserve(snapshot, costs, old.burst_reserve)
    asked = _needs(snapshot, demand, plans, costs, period_s)
    reserved = _reserved(snapshot, demand, burst_reserve, costs)
    needs = [
        (max(low, minimum), max(high, minimum))
        for (low, high), minimum in zip(asked, reserved, strict=True)
    ]
    return Findings(
        demand=demand,
        costs=costs,
        plans=plans,
        burst_reserve=burst_reserve,
        reserved=() if needs == asked else reserved,
        needs=needs,
        is_urgent=_is_urgent(snapshot, costs),
    )


def _bounds(snapshot: Snapshot) -> tuple[tuple[int, int], ...]:
    limits = [rules.limits_now(stage) for stage in snapshot.stages]
    return tuple((one.min_replicas, one.max_replicas) for one in limits)


# Service times.


def _times_of(
    snapshot: Snapshot, period_s: float, old: Sequence[Times | None]
) -> tuple[Times | None, ...]:
    """Return the service times by stage; ``old`` ones stay until there are new ones."""
    first = sample_at(snapshot.samples, snapshot.now - period_s)
    last = snapshot.samples[-1]
    step = min(1.0, snapshot.interval_s / period_s)
    found: list[Times | None] = []
    for k, stage in enumerate(snapshot.stages):
        before = old[k] if k < len(old) else None
        if before is None and stage.item_s is not None:
            before = stage.item_s, stage.item_s, 0.0
        one, other = first.stages[k], last.stages[k]
        requests, batches = other.requests - one.requests, other.batches - one.batches
        busy_s = other.busy_s - one.busy_s
        if requests >= MIN_REQUESTS and batches > 0 and busy_s > 0:
            now = busy_s / requests, busy_s / batches, requests / batches
            before = now if before is None else smoothed(before, now, step)
        found.append(before)
    return tuple(found)


def smoothed(before: Times, now: Times, step: float) -> Times:
    """Return the times, moved towards the new measurement by the share ``step``."""
    # A small batch costs more compute time per request, and adding replicas makes
    # batches smaller. That must not make the stage look slower: a longer time counts
    # only if its batches are about as large as before.
    item_s, batch_s, rows = before
    is_slower = now[0] > item_s
    if is_slower and now[2] < SIMILAR_ROWS * rows:
        # Let the remembered batch size approach the new one. Otherwise, a longer time
        # would never count after batches have become smaller for good.
        return (
            item_s,
            batch_s + step * (now[1] - batch_s),
            rows + step * (now[2] - rows),
        )
    return (
        item_s + step * (now[0] - item_s),
        batch_s + step * (now[1] - batch_s),
        now[2] if not is_slower or not rows else max(rows, now[2]),
    )


# Scaling plans.


def _scaling_plans(
    snapshot: Snapshot, measured: Sequence[Times | None], old: PolicyState
) -> tuple[tuple[tuple[float, float], ...], tuple[ScalingPlan, ...]]:
    """Return the service times and the plans; both empty if times are unknown."""
    if any(times is None for times in measured):
        return (), ()
    costs = tuple(times[:2] for times in measured if times is not None)
    is_same = old.bounds == _bounds(snapshot)
    if old.plans and is_same and not _differ(costs, old.costs):
        return old.costs, old.plans
    stages = [
        StageCost(item_s=item_s, batch_s=batch_s, limits=rules.limits_now(stage))
        for (item_s, batch_s), stage in zip(costs, snapshot.stages, strict=True)
    ]
    return costs, plans_of(stages, snapshot.objective_s, snapshot.objective_share)


def _differ(
    costs: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> bool:
    if len(costs) != len(others):
        return True
    return any(
        abs(item_s - old_s) > PLAN_TOLERANCE * old_s
        for (item_s, _), (old_s, _) in zip(costs, others, strict=True)
    )


# Burst reserve.


def _update_reserve(
    snapshot: Snapshot, costs: Sequence[tuple[float, float]], before: BurstReserve
) -> BurstReserve:
    if len(snapshot.samples) < 2 or not _is_reachable(snapshot, costs):
        return before
    one, other = snapshot.samples[-2:]
    limits = [rules.limits_now(stage) for stage in snapshot.stages]
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
    """Return whether more replicas can help to meet the objective."""
    if snapshot.objective_s is None or not costs:
        return False
    return snapshot.objective_s >= MIN_OBJECTIVE * sum(item_s for item_s, _ in costs)


def _reserved(
    snapshot: Snapshot,
    demand: Demand,
    burst_reserve: BurstReserve,
    costs: Sequence[tuple[float, float]],
) -> tuple[int, ...]:
    """Return the burst reserve by stage; idle on-demand models have none."""
    nothing = (0,) * len(snapshot.stages)
    is_known = len(burst_reserve.fleets) == len(nothing)
    if not is_known or not _is_reachable(snapshot, costs):
        return nothing
    is_on_demand = any(
        rules.limits_now(stage).min_replicas == 0 for stage in snapshot.stages
    )
    if is_on_demand and rules.is_idle(snapshot, demand.rate):
        return nothing
    item_s = [item for item, _ in costs]
    return reserved_replicas(burst_reserve, item_s, snapshot.objective_share)


# Needs.


def _needs(
    snapshot: Snapshot,
    demand: Demand,
    plans: Sequence[ScalingPlan],
    costs: Sequence[tuple[float, float]],
    period_s: float,
) -> list[tuple[int, int]]:
    queued = [
        rules.for_queue(snapshot.samples, k, stage, period_s)
        for k, stage in enumerate(snapshot.stages)
    ]
    if rules.is_idle(snapshot, demand.rate):
        return [(0, 0) for _ in snapshot.stages]
    if not plans:
        # A request needs every stage, including those that it has not reached yet.
        return [(max(1, count), max(1, count)) for count in queued]
    low = plans[plan_for(plans, demand.expected)].replicas
    high = plans[plan_for(plans, rules.MARGIN * demand.expected)].replicas
    max_wait_s = _max_wait_s(snapshot, costs, period_s)
    burst = envelope(snapshot.samples, period_s, max_wait_s)
    found = []
    for k, (item_s, _) in enumerate(costs):
        waiting = _for_backlog(snapshot, demand, k, item_s, max_wait_s)
        minimum = math.ceil(burst * item_s - 1e-9)
        with_margin = math.ceil(rules.MARGIN * burst * item_s - 1e-9)
        found.append(
            (max(low[k], minimum, waiting), max(high[k], with_margin, waiting))
        )
    return found


def _max_wait_s(
    snapshot: Snapshot, costs: Sequence[tuple[float, float]], period_s: float
) -> float:
    """Return how long requests may wait and still meet the objective."""
    if snapshot.objective_s is None:
        return period_s
    compute_s = sum(item_s for item_s, _ in costs)
    return max(snapshot.objective_s - compute_s, snapshot.objective_s / 4)


def _for_backlog(
    snapshot: Snapshot, demand: Demand, k: int, item_s: float, max_wait_s: float
) -> int:
    """Return the replicas that carry the demand and clear the backlog in time."""
    limits = rules.limits_now(snapshot.stages[k])
    seen = snapshot.samples[-1].stages[k]
    usual = limits.target_ongoing_requests * max(1, snapshot.stages[k].replicas)
    waiting = max(0.0, seen.ongoing - usual)
    if waiting == 0:
        return 0
    return math.ceil((demand.rate + waiting / max_wait_s) * item_s)


def _is_urgent(snapshot: Snapshot, costs: Sequence[tuple[float, float]]) -> bool:
    """Return whether the backlog of one stage alone makes requests late."""
    if snapshot.objective_s is None or not costs:
        return False
    last = snapshot.samples[-1]
    return any(
        seen.ongoing * item_s > snapshot.objective_s * max(1, stage.replicas)
        for seen, stage, (item_s, _) in zip(
            last.stages, snapshot.stages, costs, strict=True
        )
    )


# Reason for a decision, in words and in numbers.


def _described(snapshot: Snapshot, found: Findings, replicas: Sequence[int]) -> str:
    demand, plans = found.demand, found.plans
    text = f"{demand.rate:.2f} requests/s"
    if demand.is_burst:
        text += " (a burst)"
    if demand.expected > demand.rate * 1.01:
        text += f", {demand.expected:.2f} expected in {demand.ahead_s:.1f} s"
    if plans:
        number = plan_for(plans, demand.expected)
        plan = plans[number]
        text += (
            f"; scaling plan {number + 1} of {len(plans)}, {list(plan.replicas)}, "
            f"carries {plan.rate:.2f}/s"
        )
    else:
        text += "; by queued requests (computing times are not known yet)"
    waiting = snapshot.samples[-1].stages
    text += f"; ongoing {[round(seen.ongoing) for seen in waiting]}"
    if found.is_urgent:
        text += "; urgent: the backlog misses the objective"
    if found.reserved:
        late = 100 * (1 - snapshot.objective_share)
        text += (
            f"; more than {late:.3g} % of requests were late: burst reserve "
            f"{list(found.reserved)}"
        )
    wanted = list(replicas)
    before = [stage.replicas for stage in snapshot.stages]
    return text if wanted == before else f"{before} → {wanted}: {text}"


def _facts(snapshot: Snapshot, found: Findings) -> dict[str, Any]:
    demand, plans = found.demand, found.plans
    return {
        "rate": demand.rate,
        "expected": demand.expected,
        "slope": demand.slope,
        "is_burst": demand.is_burst,
        "is_urgent": found.is_urgent,
        "scaling_plan": plan_for(plans, demand.expected) + 1 if plans else None,
        "scaling_plans": len(plans),
        "item_s": [item_s for item_s, _ in found.costs] or None,
        "needs": [list(need) for need in found.needs],
        "kept": list(found.reserved),
        "came": found.burst_reserve.arrived,
        "missed": found.burst_reserve.missed,
        "ongoing": [seen.ongoing for seen in snapshot.samples[-1].stages],
        "ready": [seen.ready for seen in snapshot.samples[-1].stages],
        "objective_s": snapshot.objective_s,
    }
