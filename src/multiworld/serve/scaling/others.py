"""Other scaling policies: to compare with, and examples of how one is made. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from multiworld.serve.scaling.demand import since
from multiworld.serve.scaling.gears import StageCost, gear_for, gears_of
from multiworld.serve.scaling.snapshot import Decision, Policy, Snapshot
from multiworld.serve.scaling.steadying import Wish, remember, settled


def fixed(snapshot: Snapshot) -> Decision:
    """Leave everything as it is."""
    replicas = tuple(stage.replicas for stage in snapshot.stages)
    return Decision(replicas=replicas, why="a fixed fleet")


def queued(snapshot: Snapshot) -> Decision:
    """Scale each stage by itself, by what is queued: Ray Serve's own policy.

    ``ceil(ongoing / target_ongoing_requests)``, averaged over the look-back period,
    after the delays (``ray/serve/autoscaling_policy.py``, 2.60).
    """
    counts: list[int] = []
    wishes: list[tuple[Wish, ...]] = []
    for k, stage in enumerate(snapshot.stages):
        limits = stage.limits
        if limits is None:
            counts.append(stage.replicas)
            wishes.append(())
            continue
        begin = snapshot.now - limits.look_back_period_s
        lately = [s.stages[k].ongoing for s in snapshot.samples if s.at > begin]
        mean = sum(lately) / max(1, len(lately))
        need = math.ceil(mean / limits.target_ongoing_requests - 1e-9)
        need = min(max(need, limits.min_replicas), limits.max_replicas)
        before = snapshot.memory[k] if snapshot.memory else ()
        kept = remember(before, Wish(snapshot.now, need, need), limits)
        wishes.append(kept)
        counts.append(settled(kept, stage.replicas, limits, is_urgent=False))
    return Decision(
        replicas=tuple(counts), why="by what is queued", memory=tuple(wishes)
    )


HIGH, LOW = 0.8, 0.4


def threshold(snapshot: Snapshot) -> Decision:
    """Add a replica above 80 % utilisation, remove one below 40 %: a plain scaler.

    Utilisation is that of the look-back period; the delays are respected.
    """
    counts: list[int] = []
    wishes: list[tuple[Wish, ...]] = []
    for k, stage in enumerate(snapshot.stages):
        limits = stage.limits
        if limits is None:
            counts.append(stage.replicas)
            wishes.append(())
            continue
        first = since(snapshot.samples, snapshot.now - limits.look_back_period_s)
        last = snapshot.samples[-1]
        span_s = max(1e-9, last.at - first.at)
        busy_s = last.stages[k].busy_s - first.stages[k].busy_s
        used = busy_s / span_s / max(1, stage.replicas)
        need = stage.replicas + (used > HIGH) - (used < LOW)
        if stage.replicas == 0:
            need = int(last.stages[k].ongoing > 0)
        need = min(max(need, limits.min_replicas), limits.max_replicas)
        before = snapshot.memory[k] if snapshot.memory else ()
        kept = remember(before, Wish(snapshot.now, need, need), limits)
        count = settled(kept, stage.replicas, limits, is_urgent=False)
        # After a change the utilisation of before says nothing.
        wishes.append(kept if count == stage.replicas else kept[-1:])
        counts.append(count)
    return Decision(replicas=tuple(counts), why="by utilisation", memory=tuple(wishes))


def oracle(
    arrivals: Sequence[float], costs: Sequence[StageCost], objective_s: float | None
) -> Policy:
    """Return a policy that knows the future: what could be had at best, about.

    It has a replica for every burst that comes before one that is started later would
    be ready, and none a moment longer.

    Args:
        arrivals: Of every request, in seconds, growing.
        costs: Of the stages.
    """
    gears = gears_of(costs, objective_s)
    bare_s = sum(stage.item_s for stage in costs)
    patience_s = max((objective_s or 10.0) - bare_s, (objective_s or 10.0) / 4)

    def decide(snapshot: Snapshot) -> Decision:
        begin = snapshot.now - patience_s
        end = snapshot.now + snapshot.start_s + 2 * snapshot.interval_s + patience_s
        first = bisect.bisect_left(arrivals, begin)
        coming = arrivals[first : bisect.bisect_left(arrivals, end)]
        waiting = [seen.ongoing for seen in snapshot.samples[-1].stages]
        if not coming and not any(waiting):
            least = tuple(stage.limits.min_replicas for stage in costs)
            return Decision(replicas=least, why="nothing comes")
        mean = len(coming) / (end - begin)
        burst = _needed(coming, patience_s)
        gear = gears[gear_for(gears, mean)].replicas
        counts = [
            max(count, math.ceil(max(burst, sum(waiting) / patience_s) * stage.item_s))
            for count, stage in zip(gear, costs, strict=True)
        ]
        within = [
            min(count, stage.limits.max_replicas)
            for count, stage in zip(counts, costs, strict=True)
        ]
        return Decision(replicas=tuple(within), why="it knows the future")

    return decide


def _needed(coming: Sequence[float], patience_s: float) -> float:
    """Return the requests a second that must be computed; see ``demand.envelope``."""
    most, step = 0.0, max(1, len(coming) // 64)
    for first in range(0, len(coming), step):
        for last in range(first, len(coming), step):
            span_s = coming[last] - coming[first]
            most = max(most, (last - first + 1) / (span_s + patience_s))
    return most


BUILT_IN: dict[str, Callable[[Snapshot], Decision]] = {
    "fixed": fixed,
    "queued": queued,
    "threshold": threshold,
}
"""By the names that ``multiworld simulate --policy`` knows."""
