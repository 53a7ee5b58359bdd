"""The scaling that is used where a spec names no other. Pure.

1. How much is asked for, and will be when a new replica is ready (``demand``).
2. Which gear carries that: the replicas of all stages together (``gears``). Bursts like
   the last ones must be worked off within the objective, and so must what waits. Where
   nobody knows yet how long a stage computes, what is queued there decides alone, as
   with Ray Serve.
3. Where the objective was missed lately for all that, as many are kept as would have
   sufficed (``hindsight``).
4. What has lasted long enough is done (``steadying``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from multiworld.serve.scaling.burst_reserve import (
    BurstRecord,
    BurstReserve,
    learnt,
    sufficient,
)
from multiworld.serve.scaling.demand import Demand, demand_of, envelope
from multiworld.serve.scaling.explanation import Findings, facts, words
from multiworld.serve.scaling.gears import (
    REACHABLE,
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
from multiworld.serve.scaling.stabilization import PendingChange, remember, settled

MARGIN = 1.15
"""Replicas are drained only if fewer would carry so many times what is asked for."""

NEW_GEARS = 0.2
"""Gears are computed anew when a stage computes longer or shorter by this share."""

HORIZON = 15.0
"""What would have sufficed is asked for the last so many downscale delays: some bursts
must have come again within them. Chosen on traces, see docs/serve/scaling-report.md."""


@dataclass(frozen=True, slots=True)
class PolicyState:
    """What the policy keeps from one decision to the next.

    Attributes:
        costs: That the gears were computed for.
        bounds: The fewest and the most replicas of each stage, for the same.
        wishes: By stage.
        measured: Seconds of a request and of a batch, and the requests of a batch.
        hindsight: What would have sufficed.
    """

    costs: tuple[tuple[float, float], ...] = ()
    bounds: tuple[tuple[int, int], ...] = ()
    gears: tuple[Gear, ...] = ()
    wishes: tuple[tuple[PendingChange, ...], ...] = ()
    measured: tuple[Times | None, ...] = ()
    hindsight: BurstReserve = field(default_factory=BurstReserve)


def decide(snapshot: Snapshot) -> Decision:
    """Return how many replicas each stage should have."""
    old = snapshot.memory if isinstance(snapshot.memory, PolicyState) else PolicyState()
    look_back_s = max(
        _limits(s).look_back_period_s for s in snapshot.stages if s.limits is not None
    )
    measured = times_of(snapshot, look_back_s, old.measured)
    found = _reckoned(snapshot, old, measured, look_back_s)
    wishes = []
    replicas = []
    for k, stage in enumerate(snapshot.stages):
        limits = _limits(stage)
        low, high = map(limits.within, found.needs[k])
        before = old.wishes[k] if k < len(old.wishes) else ()
        wishes.append(remember(before, PendingChange(snapshot.now, low, high), limits))
        count = settled(wishes[k], stage.replicas, limits, is_urgent=found.is_urgent)
        if found.demand.is_rising:
            count = max(count, stage.replicas)  # none is let go now
        count = max(count, _held(snapshot, k))
        replicas.append(stage.replicas if stage.limits is None else count)
    replicas = _together(snapshot, replicas)
    return Decision(
        replicas=tuple(replicas),
        why=words(snapshot, found, replicas),
        facts=facts(snapshot, found),
        memory=PolicyState(
            found.costs,
            _bounds(snapshot),
            found.gears,
            tuple(wishes),
            measured,
            found.hindsight,
        ),
    )


def _reckoned(
    snapshot: Snapshot,
    old: PolicyState,
    measured: tuple[Times | None, ...],
    look_back_s: float,
) -> Findings:
    demand = demand_of(
        snapshot.samples, look_back_s, snapshot.start_s, snapshot.interval_s
    )
    costs, gears = _gears(snapshot, measured, old)
    hindsight = _hindsight(snapshot, costs, old.hindsight)
    asked = _needs(snapshot, demand, gears, costs, look_back_s)
    kept = _kept(snapshot, demand, hindsight, costs)
    needs = [
        (max(low, least), max(high, least))
        for (low, high), least in zip(asked, kept, strict=True)
    ]
    return Findings(
        demand=demand,
        costs=costs,
        gears=gears,
        hindsight=hindsight,
        kept=() if needs == asked else kept,
        needs=needs,
        is_urgent=_is_urgent(snapshot, costs),
    )


def _limits(stage: StageNow) -> StageLimits:
    """Return the limits of a stage; of one that is not scaled, what it has."""
    if stage.limits is not None:
        return stage.limits
    return StageLimits(min_replicas=stage.replicas, max_replicas=max(1, stage.replicas))


def _bounds(snapshot: Snapshot) -> tuple[tuple[int, int], ...]:
    limits = [_limits(stage) for stage in snapshot.stages]
    return tuple((one.min_replicas, one.max_replicas) for one in limits)


# The gears.


def _gears(
    snapshot: Snapshot,
    measured: Sequence[Times | None],
    old: PolicyState,
) -> tuple[tuple[tuple[float, float], ...], tuple[Gear, ...]]:
    """Return the times that are planned with, and the gears; none if not known."""
    if any(times is None for times in measured):
        return (), ()
    costs = tuple(times[:2] for times in measured if times is not None)
    is_same = old.bounds == _bounds(snapshot)
    if old.gears and is_same and not _differ(costs, old.costs):
        return old.costs, old.gears
    stages = [
        StageCost(item_s=item_s, batch_s=batch_s, limits=_limits(stage))
        for (item_s, batch_s), stage in zip(costs, snapshot.stages, strict=True)
    ]
    return costs, gears_of(stages, snapshot.objective_s, snapshot.objective_share)


def _differ(
    costs: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> bool:
    if len(costs) != len(others):
        return True
    return any(
        abs(item_s - old_s) > NEW_GEARS * old_s
        for (item_s, _), (old_s, _) in zip(costs, others, strict=True)
    )


# What would have sufficed.


def _hindsight(
    snapshot: Snapshot, costs: Sequence[tuple[float, float]], before: BurstReserve
) -> BurstReserve:
    if len(snapshot.samples) < 2 or not _is_reachable(snapshot, costs):
        return before
    one, other = snapshot.samples[-2:]
    limits = [_limits(stage) for stage in snapshot.stages]
    patience_s = _patience_s(snapshot, costs, 0.0)
    seen = BurstRecord(
        seconds=other.at - one.at,
        arrived=other.arrived - one.arrived,
        missed=other.missed - one.missed,
        refused=other.refused - one.refused,
        ongoing=[stage.ongoing for stage in other.stages],
        item_s=[item_s for item_s, _ in costs],
        ready=[stage.ready for stage in other.stages],
        least=[max(1, limit.min_replicas) for limit in limits],
        most=[limit.max_replicas for limit in limits],
        patience_s=patience_s,
        deadline_s=snapshot.deadline_s,
        apart_s=snapshot.start_s + patience_s + 2 * snapshot.interval_s,
        share=snapshot.objective_share,
    )
    delays = [s.limits.downscale_delay_s for s in snapshot.stages if s.limits]
    return learnt(before, seen, HORIZON * max(*delays, snapshot.interval_s))


def _is_reachable(snapshot: Snapshot, costs: Sequence[tuple[float, float]]) -> bool:
    """Tell whether the objective is one that replicas can help to reach."""
    if snapshot.objective_s is None or not costs:
        return False
    return snapshot.objective_s >= REACHABLE * sum(item_s for item_s, _ in costs)


def _kept(
    snapshot: Snapshot,
    demand: Demand,
    hindsight: BurstReserve,
    costs: Sequence[tuple[float, float]],
) -> tuple[int, ...]:
    """Return the replicas to keep, whatever comes now.

    A pipeline that may have none while nobody asks is not kept for who might.
    """
    nothing = (0,) * len(snapshot.stages)
    is_known = len(hindsight.fleets) == len(nothing)
    if not is_known or not _is_reachable(snapshot, costs):
        return nothing
    is_on_demand = any(_limits(stage).min_replicas == 0 for stage in snapshot.stages)
    if is_on_demand and _is_idle(snapshot, demand):
        return nothing
    item_s = [item for item, _ in costs]
    return sufficient(hindsight, item_s, snapshot.objective_share)


# How many replicas that takes.


def _needs(
    snapshot: Snapshot,
    demand: Demand,
    gears: Sequence[Gear],
    costs: Sequence[tuple[float, float]],
    look_back_s: float,
) -> list[tuple[int, int]]:
    """Return by stage how many replicas are needed, and how many with a margin."""
    queued = [
        _queued(snapshot.samples, k, stage, look_back_s)
        for k, stage in enumerate(snapshot.stages)
    ]
    if _is_idle(snapshot, demand):
        return [(0, 0) for _ in snapshot.stages]
    if not gears:
        # Something is asked for: it needs every stage, whatever has got there yet.
        return [(max(1, count), max(1, count)) for count in queued]
    low = gears[gear_for(gears, demand.expected)].replicas
    high = gears[gear_for(gears, MARGIN * demand.expected)].replicas
    patience_s = _patience_s(snapshot, costs, look_back_s)
    burst = envelope(snapshot.samples, look_back_s, patience_s)
    found = []
    for k, (item_s, _) in enumerate(costs):
        waiting = _for_backlog(snapshot, demand, k, item_s, patience_s)
        least = math.ceil(burst * item_s - 1e-9)
        kept = math.ceil(MARGIN * burst * item_s - 1e-9)
        found.append((max(low[k], least, waiting), max(high[k], kept, waiting)))
    return found


def _is_idle(snapshot: Snapshot, demand: Demand) -> bool:
    last = snapshot.samples[-1]
    return demand.rate == 0 and not any(seen.ongoing for seen in last.stages)


def _held(snapshot: Snapshot, k: int) -> int:
    """Return how many replicas a stage keeps that has work and not all of them yet.

    Those that are ready, and one that starts: the load looks small as it waits.
    """
    seen, count = snapshot.samples[-1].stages[k], snapshot.stages[k].replicas
    is_starting = seen.ready < count and seen.ongoing > 0
    return min(count, max(1, seen.ready)) if is_starting else 0


def _together(snapshot: Snapshot, replicas: list[int]) -> list[int]:
    """Return replicas of which no stage has none while another that may has some.

    A pipeline without one of its stages answers nothing: it goes as a whole.
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


def _queued(
    samples: Sequence[Sample], k: int, stage: StageNow, look_back_s: float
) -> int:
    """Return the replicas for what is queued or computed, on average (Ray Serve)."""
    begin = samples[-1].at - look_back_s
    lately = [s.stages[k].ongoing for s in samples if s.at > begin - 1e-9]
    mean = sum(lately) / len(lately)
    return math.ceil(mean / _limits(stage).target_ongoing_requests - 1e-9)


def _patience_s(
    snapshot: Snapshot, costs: Sequence[tuple[float, float]], look_back_s: float
) -> float:
    """Return for how long requests may wait."""
    if snapshot.objective_s is None:
        return look_back_s
    bare_s = sum(item_s for item_s, _ in costs)
    return max(snapshot.objective_s - bare_s, snapshot.objective_s / 4)


def _for_backlog(
    snapshot: Snapshot, demand: Demand, k: int, item_s: float, patience_s: float
) -> int:
    """Return the replicas that also work off what waits, in good time."""
    limits = _limits(snapshot.stages[k])
    seen = snapshot.samples[-1].stages[k]
    usual = limits.target_ongoing_requests * max(1, snapshot.stages[k].replicas)
    waiting = max(0.0, seen.ongoing - usual)
    if waiting == 0:
        return 0
    return math.ceil((demand.rate + waiting / patience_s) * item_s)


def _is_urgent(snapshot: Snapshot, costs: Sequence[tuple[float, float]]) -> bool:
    """Tell whether what waits at one stage alone makes the objective miss."""
    if snapshot.objective_s is None or not costs:
        return False
    last = snapshot.samples[-1]
    return any(
        seen.ongoing * item_s > snapshot.objective_s * max(1, stage.replicas)
        for seen, stage, (item_s, _) in zip(
            last.stages, snapshot.stages, costs, strict=True
        )
    )
