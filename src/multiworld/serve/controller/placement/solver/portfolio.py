"""Portfolio of solvers: the best placement found in the time limit, and a bound."""

from __future__ import annotations

import importlib.util
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

from multiworld.serve.controller.placement.solver import cp_sat
from multiworld.serve.controller.placement.solver.greedy import place_greedily
from multiworld.serve.controller.placement.solver.linear import Formulation
from multiworld.serve.controller.placement.solver.model import (
    Counts,
    Slot,
    answer,
    reasons,
    within_reach,
)
from multiworld.serve.controller.placement.solver.problem import Placement, Problem
from multiworld.serve.controller.placement.solver.verify import faults

LIMIT_S = 10.0  # maximum seconds of all solvers together
POLISH_S = 10.0  # maximum seconds to compute the exact rates of a solver's replicas
# HiGHS runs first up to this many slots, because it often proves optimality.
SMALL = 400


def place(
    problem: Problem,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> Placement:
    """Return the best placement found in time; never worse than the greedy one."""
    formulation = Formulation(within_reach(problem))
    end = clock() + limit_s
    hint = place_greedily(formulation.problem)
    best = _exact(formulation, hint, math.inf, "greedy")
    stay = _exact(formulation, _running(formulation), math.inf, "as it is")
    best = stay if stay.value >= best.value and stay.replicas else best
    names = _order(formulation)
    for name in names:
        left_s = end - clock()
        if left_s <= 0 or best.gap <= formulation.close:
            break
        share_s = left_s if name == names[-1] else left_s / 2
        chosen, bound = _ask(name, formulation, share_s, best)
        bound = min(bound, best.bound)
        if chosen is not None:
            found = _exact(formulation, chosen, bound, name)
            best = found if found.value > best.value else best
        best = replace(best, bound=bound)
    return replace(best, unplaced=reasons(problem, best.served))


def _running(formulation: Formulation) -> Counts:
    found = {slot: formulation.runs(slot) for slot in formulation.slots}
    return {slot: count for slot, count in found.items() if count}


def _order(formulation: Formulation) -> list[str]:
    names = ["milp"] if len(formulation.slots) <= SMALL else []
    if importlib.util.find_spec("ortools") is not None:
        names.append("cp-sat")
    return names or ["milp"]


def _ask(
    name: str, formulation: Formulation, limit_s: float, known: Placement
) -> tuple[Counts | None, float]:
    if name == "cp-sat":
        counts, rates = _slots(formulation.problem, known)
        return cp_sat.solve(formulation, limit_s, counts, rates)
    values, bound = formulation.solve(limit_s)
    return (None if values is None else formulation.counts(values)), bound


def _exact(
    formulation: Formulation, chosen: Counts, bound: float, solver: str
) -> Placement:
    """Return the best placement with these replicas."""
    values, _ = formulation.solve(POLISH_S, chosen)
    rates = {} if values is None else formulation.rates(values)
    found = answer(formulation.problem, chosen, rates, bound, solver)
    if faults(formulation.problem, found):
        # The solver's tolerance admitted an infeasible choice: discard it.
        found = answer(formulation.problem, {}, {}, bound, solver)
    return found


def _slots(
    problem: Problem, placement: Placement
) -> tuple[dict[Slot, int], dict[Slot, float]]:
    """Return the number of replicas and the rate of each slot in a placement."""
    models = {model.name: m for m, model in enumerate(problem.models)}
    devices = {
        device.name: d
        for d, device in enumerate(d for node in problem.nodes for d in node.devices)
    }
    counts: Counter[Slot] = Counter()
    rates: defaultdict[Slot, float] = defaultdict(float)
    for replica in placement.replicas:
        slot = models[replica.model], replica.stage, devices[replica.device]
        counts[slot] += 1
        rates[slot] += replica.rate
    return dict(counts), dict(rates)
