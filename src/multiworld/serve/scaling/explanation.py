"""Reason for a decision of the default policy, in words and in numbers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from multiworld.serve.scaling.burst_reserve import BurstReserve
from multiworld.serve.scaling.demand import Demand
from multiworld.serve.scaling.scaling_plans import ScalingPlan, plan_for
from multiworld.serve.scaling.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Intermediate results behind a decision; by stage, and empty if unknown."""

    demand: Demand
    costs: tuple[tuple[float, float], ...]  # of a request and of a batch
    plans: tuple[ScalingPlan, ...]
    burst_reserve: BurstReserve
    reserved: tuple[int, ...]  # by the burst reserve; empty if it adds none
    needs: list[tuple[int, int]]  # without and with the margin
    is_urgent: bool


def describe(snapshot: Snapshot, found: Findings, replicas: Sequence[int]) -> str:
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


def facts(snapshot: Snapshot, found: Findings) -> dict[str, Any]:
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
