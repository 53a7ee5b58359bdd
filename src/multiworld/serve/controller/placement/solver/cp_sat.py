"""The placement problem for OR-tools' CP-SAT, which is better than HiGHS for many
devices but needs integers.

Shares of a demand are counted in units of 1/``UNITS``, factors and limits of
constraints in units of 1/``FINE``. Rounding only loosens the constraints, so the
solver's bound is also a bound of the real problem. Then a linear program (``linear``)
computes the exact rates of the chosen replicas.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from multiworld.serve.controller.placement.solver.linear import Formulation
from multiworld.serve.controller.placement.solver.model import Counts, Slot

# CP-SAT computes with integers: a model's whole demand is this many units.
UNITS = 10_000
FINE = 1_000_000  # factors and limits are multiplied by this before they are rounded


def solve(
    formulation: Formulation,
    limit_s: float,
    counts: Counts,
    rates: Mapping[Slot, float],
    workers: int = 2,
) -> tuple[dict[Slot, int] | None, float]:
    """Return the replicas in each slot (or None) and a bound of the objective."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    variables = _variables(model, formulation)
    _constrain(model, formulation, variables)
    scale, slack = _maximise(model, formulation, variables)
    _hint(model, formulation, variables, counts, rates)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    bound = solver.best_objective_bound / scale + slack
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, math.inf
    found = {slot: solver.value(variables[n]) for slot, n in formulation.has.items()}
    return {slot: count for slot, count in found.items() if count}, bound


def _variables(model: Any, formulation: Formulation) -> dict[int, Any]:
    found = {
        n: model.new_int_var(0, largest, f"n{n}")
        for n, largest in formulation.highs.items()
    }
    for number in [*formulation.share.values(), *formulation.served.values()]:
        found[number] = model.new_int_var(0, UNITS, f"s{number}")
    for (m, _), number in formulation.longest.items():
        latency_s = formulation.problem.models[m].latency_s
        assert latency_s is not None
        top = max(0, math.ceil(latency_s * UNITS))
        found[number] = model.new_int_var(0, top, f"l{number}")
    if formulation.peak is not None:
        top = sum(formulation.highs.values()) * UNITS
        found[formulation.peak] = model.new_int_var(0, top, "peak")
    return found


def _constrain(model: Any, formulation: Formulation, variables: dict[int, Any]) -> None:
    """Add every constraint in integers; feasible solutions stay feasible."""
    rows = formulation.rows
    for terms, low, high in zip(rows.terms, rows.low, rows.high, strict=True):
        if not terms:
            continue
        # Every constraint is scaled by UNITS. Shares are already in units, so multiply
        # only the factors of integer variables.
        exact = {
            n: factor * (UNITS if n < formulation.integers else 1)
            for n, factor in terms.items()
        }
        if high < math.inf:
            total = sum(math.floor(f * FINE) * variables[n] for n, f in exact.items())
            model.add(total <= math.ceil(high * UNITS * FINE))
        if low > -math.inf:
            total = sum(math.ceil(f * FINE) * variables[n] for n, f in exact.items())
            model.add(total >= math.floor(low * UNITS * FINE))


def _maximise(
    model: Any, formulation: Formulation, variables: dict[int, Any]
) -> tuple[float, float]:
    """Set the objective; return its scale and the maximum error from rounding."""
    gains = formulation.gains()
    scale = 1e12 / max(1e-9, max(map(abs, gains.values()), default=1.0))
    terms, slack = [], 0.0
    units = _hidden_units(formulation)
    for number, gain in gains.items():
        is_share = number >= formulation.integers
        unit = gain / UNITS if is_share else gain
        terms.append(math.ceil(unit * scale) * variables[number])
        slack += abs(gain) * units.get(number, 1) / UNITS if is_share else 0.0
    model.maximize(sum(terms))
    return scale, slack


def _hidden_units(formulation: Formulation) -> dict[int, int]:
    """Return how many units rounding may take from each served share."""
    # Every share is rounded down, so a stage loses up to one unit for each slot.
    slots = Counter((m, stage) for m, stage, _ in formulation.share)
    return {
        number: 1 + max((n for (m, _), n in slots.items() if m == model), default=0)
        for model, number in formulation.served.items()
    }


def _hint(
    model: Any,
    formulation: Formulation,
    variables: dict[int, Any],
    counts: Counts,
    rates: Mapping[Slot, float],
) -> None:
    on, used = {slot[0] for slot in counts}, {slot[2] for slot in counts}
    for m, number in formulation.on.items():
        model.add_hint(variables[number], m in on)
    for d, number in formulation.used.items():
        model.add_hint(variables[number], d in used)
    for slot, number in formulation.has.items():
        count = counts.get(slot, 0)
        model.add_hint(variables[number], count)
        if slot in formulation.new:
            new = max(0, count - formulation.runs(slot))
            model.add_hint(variables[formulation.here[slot]], count > 0)
            model.add_hint(variables[formulation.new[slot]], new)
        demand = formulation.problem.models[slot[0]].demand
        share = rates.get(slot, 0.0) / demand if demand else 0.0
        model.add_hint(variables[formulation.share[slot]], math.floor(share * UNITS))
