"""Reference policies, for comparison and as examples of a policy. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from multiworld.serve.controller.scaling.demand import sample_at
from multiworld.serve.controller.scaling.scaling_plans import (
    StageCost,
    plan_for,
    plans_of,
)
from multiworld.serve.controller.scaling.snapshot import (
    Decision,
    Policy,
    Snapshot,
    StageLimits,
)
from multiworld.serve.controller.scaling.stabilization import (
    PendingChange,
    remember,
    stabilized,
)


def fixed(snapshot: Snapshot) -> Decision:
    replicas = tuple(stage.replicas for stage in snapshot.stages)
    return Decision(replicas=replicas, why="a fixed fleet")


Need = Callable[[Snapshot, int, StageLimits], int]


def _each(
    snapshot: Snapshot, need: Need, why: str, *, resets_on_change: bool = False
) -> Decision:
    """Scale each stage independently, within its stabilization windows."""
    counts: list[int] = []
    pending: list[tuple[PendingChange, ...]] = []
    for k, stage in enumerate(snapshot.stages):
        limits = stage.limits
        if limits is None:
            counts.append(stage.replicas)
            pending.append(())
            continue
        count = limits.within(need(snapshot, k, limits))
        before = snapshot.memory[k] if snapshot.memory else ()
        kept = remember(before, PendingChange(snapshot.now, count, count), limits)
        counts.append(stabilized(kept, stage.replicas, limits, is_urgent=False))
        has_changed = counts[k] != stage.replicas
        pending.append(kept[-1:] if resets_on_change and has_changed else kept)
    return Decision(replicas=tuple(counts), why=why, memory=tuple(pending))


def queued(snapshot: Snapshot) -> Decision:
    """Scale each stage by its queue length: Ray Serve's own policy."""
    # ``ceil(ongoing / target_ongoing_requests)``, averaged over the look-back period
    # (``ray/serve/autoscaling_policy.py``, 2.60).
    return _each(snapshot, _for_queue, "by queued requests")


def _for_queue(snapshot: Snapshot, k: int, limits: StageLimits) -> int:
    begin = snapshot.now - limits.look_back_period_s
    lately = [s.stages[k].ongoing for s in snapshot.samples if s.at > begin]
    mean = sum(lately) / max(1, len(lately))
    return math.ceil(mean / limits.target_ongoing_requests - 1e-9)


HIGH, LOW = 0.8, 0.4  # utilization above (below) which a replica is added (removed)


def threshold(snapshot: Snapshot) -> Decision:
    """Add a replica above 80 % mean utilization, remove one below 40 %."""
    return _each(snapshot, _for_utilisation, "by utilisation", resets_on_change=True)


def _for_utilisation(snapshot: Snapshot, k: int, limits: StageLimits) -> int:
    first = sample_at(snapshot.samples, snapshot.now - limits.look_back_period_s)
    last, replicas = snapshot.samples[-1], snapshot.stages[k].replicas
    if replicas == 0:
        return int(last.stages[k].ongoing > 0)
    span_s = max(1e-9, last.at - first.at)
    used = (last.stages[k].busy_s - first.stages[k].busy_s) / span_s / replicas
    return replicas + (used > HIGH) - (used < LOW)


def oracle(
    arrivals: Sequence[float],
    costs: Sequence[StageCost],
    objective_s: float | None,
    share: float = 0.99,
    margin: float = 1.0,
) -> Policy:
    """Return a policy that knows all arrivals: roughly the best possible."""
    # It starts replicas just in time for every burst, and drains them right after. It
    # does not know how requests will spread over replicas; ``margin`` compensates.
    plans = plans_of(costs, objective_s, share)
    compute_s = sum(stage.item_s for stage in costs)
    max_wait_s = max((objective_s or 10.0) - compute_s, (objective_s or 10.0) / 4)

    def decide(snapshot: Snapshot) -> Decision:
        begin = snapshot.now - max_wait_s
        end = snapshot.now + snapshot.start_s + 2 * snapshot.interval_s + max_wait_s
        first = bisect.bisect_left(arrivals, begin)
        coming = arrivals[first : bisect.bisect_left(arrivals, end)]
        waiting = [seen.ongoing for seen in snapshot.samples[-1].stages]
        if not coming and not any(waiting):
            minimum = tuple(stage.limits.min_replicas for stage in costs)
            return Decision(replicas=minimum, why="no requests arrive")
        mean = len(coming) / (end - begin)
        burst = _needed(coming, max_wait_s)
        plan = plans[plan_for(plans, mean)].replicas
        counts = [
            max(
                count,
                math.ceil(
                    margin * max(burst, sum(waiting) / max_wait_s) * stage.item_s
                ),
            )
            for count, stage in zip(plan, costs, strict=True)
        ]
        within = [
            stage.limits.within(count)
            for count, stage in zip(counts, costs, strict=True)
        ]
        return Decision(replicas=tuple(within), why="the oracle knows the future")

    return decide


def _needed(coming: Sequence[float], max_wait_s: float) -> float:
    highest, step = 0.0, max(1, len(coming) // 64)
    for first in range(0, len(coming), step):
        for last in range(first, len(coming), step):
            span_s = coming[last] - coming[first]
            highest = max(highest, (last - first + 1) / (span_s + max_wait_s))
    return highest


MARGINS = (1.0, 1.25, 1.5, 2.0, 3.0)  # margins to try for an oracle, cheapest first
