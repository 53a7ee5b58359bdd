"""Calculations shared by all solvers. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from multiworld.serve.controller.placement.solver.problem import (
    Device,
    ModelNeed,
    Placement,
    Problem,
    Replica,
    StageNeed,
)
from multiworld.serve.machines.amounts import mib

# Candidate for a replica: the numbers of a model, its stage, and a device.
Slot = tuple[int, int, int]

Counts = Mapping[Slot, int]  # replicas in each slot
FAR = 10.0  # demands are capped at this multiple of what all devices could serve
REPLICA_COST = 1e-3  # per hour and replica: all else being equal, fewer are better


@dataclass(frozen=True, slots=True)
class PlacedDevice:
    device: Device
    node: int


def places_of(problem: Problem) -> list[PlacedDevice]:
    return [
        PlacedDevice(device, number)
        for number, node in enumerate(problem.nodes)
        for device in node.devices
    ]


def is_possible(problem: Problem, stage: StageNeed, place: PlacedDevice) -> bool:
    """Return whether a device can hold a replica of ``stage`` at all."""
    return (
        place.device.kind in stage.seconds
        and stage.memory_bytes <= place.device.memory_bytes
        and 0 < place.device.capacity >= stage.cores
        and (not stage.nodes or problem.nodes[place.node].name in stage.nodes)
    )


def slots_of(problem: Problem) -> list[Slot]:
    """Return every slot in which a replica fits and is fast enough."""
    places = places_of(problem)
    found = []
    for m, model in enumerate(problem.models):
        budgets = budgets_of(problem, model)
        for k, stage in enumerate(model.stages):
            for d, place in enumerate(places):
                fits = is_possible(problem, stage, place)
                if fits and stage.seconds[place.device.kind] <= budgets[k]:
                    found.append((m, k, d))
    return found


def budgets_of(problem: Problem, model: ModelNeed) -> list[float]:
    """Return the maximum seconds for each stage, with all others at their fastest."""
    # Keeping these limits is necessary to meet ``latency_s``, but not sufficient; see
    # ``is_in_time``.
    if model.latency_s is None:
        return [math.inf] * len(model.stages)
    kinds = {place.device.kind for place in places_of(problem)}
    fastest = [
        min((s for kind, s in stage.seconds.items() if kind in kinds), default=math.inf)
        for stage in model.stages
    ]
    spare = model.latency_s - hops_s(problem, model) - sum(fastest)
    return [seconds + spare if spare >= 0 else -1.0 for seconds in fastest]


def hops_s(problem: Problem, model: ModelNeed) -> float:
    """Return the seconds that an item spends between stages."""
    return problem.hop_s * (len(model.stages) - 1)


def is_in_time(
    problem: Problem, model: ModelNeed, kinds: Iterable[Iterable[str]]
) -> bool:
    """Return whether an item meets the latency, whichever replicas it passes."""
    if model.latency_s is None:
        return True
    # ``kinds``: by stage, the kinds of its replicas' devices.
    total = hops_s(problem, model)
    for stage, used in zip(model.stages, kinds, strict=True):
        total += max((stage.seconds[kind] for kind in used), default=0.0)
    return total <= model.latency_s + 1e-9


def spread_of(problem: Problem, stage: StageNeed) -> int:
    """Return the minimum number of nodes for the replicas of a stage."""
    allowed = [
        node
        for number, node in enumerate(problem.nodes)
        if any(
            is_possible(problem, stage, PlacedDevice(d, number)) for d in node.devices
        )
    ]
    return min(2, stage.min_replicas, max(1, len(allowed)))


def within_reach(problem: Problem) -> Problem:
    """Cap demands far beyond what all devices could serve."""
    # The devices can serve only a tiny share of such a demand. This share would be lost
    # in rounding, and would be worth less than the devices cost.
    places = places_of(problem)

    def most(stage: StageNeed) -> float:
        return sum(
            problem.utilisation * place.device.capacity / max(seconds, 1e-12)
            for place in places
            if is_possible(problem, stage, place)
            for seconds in [stage.seconds[place.device.kind] * stage.width]
        )

    models = tuple(
        replace(model, demand=min(model.demand, FAR * reach))
        if (reach := min(map(most, model.stages), default=0.0)) > 0
        else model
        for model in problem.models
    )
    return replace(problem, models=models)


def worth_of(problem: Problem) -> float:
    """Return the value of a model's whole demand per unit of weight."""
    places = places_of(problem)
    prices = sum(place.device.price for place in places)
    replicas = sum(s.per_device for m in problem.models for s in m.stages) * len(places)
    costs = prices + replicas * (problem.move_cost + REPLICA_COST)
    min_weight = min((m.weight for m in problem.models if m.weight > 0), default=1.0)
    # The value is so large that no saving outweighs serving a thousandth of a demand.
    return 1000.0 * max(1.0, costs) / min_weight


def objective(
    problem: Problem, served: Mapping[str, float], replicas: Iterable[Replica]
) -> float:
    """Return the value of a placement that serves these items per second."""
    listed = list(replicas)
    prices = {place.device.name: place.device.price for place in places_of(problem)}
    worth = worth_of(problem)
    value = sum(
        worth * model.weight * min(1.0, served[model.name] / model.demand)
        for model in problem.models
        if model.demand > 0
    )
    value -= sum(prices[name] for name in {replica.device for replica in listed})
    there = Counter((r.model, r.stage, r.device) for r in listed)
    moved = (there - Counter(problem.running)).total()
    value -= REPLICA_COST * len(listed) + problem.move_cost * moved
    return value - problem.balance * fullest(problem, listed)


def fullest(problem: Problem, replicas: Iterable[Replica]) -> float:
    """Return the load of the fullest device: its replicas' width per capacity."""
    width = {m.name: [stage.width for stage in m.stages] for m in problem.models}
    on: dict[str, float] = defaultdict(float)
    for replica in replicas:
        on[replica.device] += width[replica.model][replica.stage]
    capacity = {p.device.name: p.device.capacity for p in places_of(problem)}
    return max((taken / capacity[name] for name, taken in on.items()), default=0.0)


def answer(
    problem: Problem,
    counts: Counts,
    rates: Mapping[Slot, float],
    bound: float,
    solver: str,
) -> Placement:
    """Return the placement with these replicas and rates (items per second)."""
    places = places_of(problem)
    replicas = tuple(
        Replica(
            problem.models[m].name, k, places[d].device.name, max(0.0, rate) / count
        )
        for (m, k, d), rate in sorted(rates.items())
        for count in [counts[m, k, d]]
        for _ in range(count)
    )
    served = {
        model.name: min(
            model.demand,
            *(
                sum(rate for (i, j, _), rate in rates.items() if (i, j) == (m, k))
                for k in range(len(model.stages))
            ),
        )
        for m, model in enumerate(problem.models)
    }
    value = objective(problem, served, replicas)
    return Placement(replicas, served, value, bound, solver, reasons(problem, served))


def reasons(problem: Problem, served: Mapping[str, float]) -> dict[str, str]:
    """Return the reason for each model that is not served in full."""
    found = {}
    for model in problem.models:
        if served[model.name] >= model.demand * (1 - 1e-6):
            continue
        short = next(_impossible(problem, model), None)
        found[model.name] = short or (
            (
                f"{served[model.name]:.4g} of {model.demand:.4g} items/s"
                if served[model.name]
                else "not served"
            )
            + ": the devices that its stages fit on have no more time or memory"
        )
    return found


def _impossible(problem: Problem, model: ModelNeed) -> Iterator[str]:
    places = places_of(problem)
    for k, stage in enumerate(model.stages):
        fitting = [p for p in places if is_possible(problem, stage, p)]
        if fitting:
            continue
        allowed = [
            p
            for p in places
            if not stage.nodes or problem.nodes[p.node].name in stage.nodes
        ]
        kinds = ", ".join(sorted(stage.seconds))
        able = [p.device for p in allowed if p.device.kind in stage.seconds]
        largest = max((device.memory_bytes for device in able), default=0)
        if not places:
            yield "there is no machine"
        elif not allowed:
            names = ", ".join(sorted(stage.nodes))
            yield f"stage {k} may only be on {names}; no machine has such a name"
        elif not able:
            what = f"a device of kind {kinds}" if kinds else "a GPU"
            yield f"stage {k} needs {what}, and no machine that it may use has one"
        elif stage.memory_bytes > largest:
            yield (
                f"stage {k} takes {mib(stage.memory_bytes)}; the largest device it "
                f"may use has {mib(largest)}"
            )
        else:
            cores = max(device.capacity for device in able)
            memory = f" and {mib(stage.memory_bytes)}" if stage.memory_bytes else ""
            yield (
                f"stage {k} takes {stage.cores:g} cores{memory}; no device that it may "
                f"use has this (they have at most {cores:g} cores)"
            )
    budgets = budgets_of(problem, model)
    if any(budget < 0 for budget in budgets):
        yield (
            f"its latency limit of {model.latency_s} s is less than its stages take on "
            "the fastest devices"
        )
