"""Placement of a chain of layers on mixed nodes, cut at the same time.

A node holds one range of layers; its capacity depends on its kind and on the number of
layers. Items enter a node at any layer of its range and leave at the end of the range,
so ranges may overlap, and several nodes may hold the same layers. The aim is the
largest flow. The problem and its public instances are those of Helix: Y. Mei et al.,
"Helix", ASPLOS 2025, arXiv 2406.01566. Links do not limit the flow here.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import Bounds, linprog, milp

from multiworld.serve.controller.placement.solver.linear import Rows

LIMIT_S = 60.0
"""Maximum seconds of all solvers together."""
CLOSE = 1e-6
"""Relative gap at which a solution counts as optimal."""


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A number of equal nodes; `capacity` is in items/s, by number of layers."""

    count: int
    capacity: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Chain:
    """A model with a number of layers, and the available nodes."""

    layers: int
    kinds: tuple[NodeKind, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """Layers of one node: ``start`` to ``start + layers - 1``."""

    kind: int
    start: int
    layers: int


@dataclass(frozen=True, slots=True)
class ChainPlacement:
    """Solution of a chain problem; flow and its bound are in items per second."""

    ranges: tuple[Range, ...]
    flow: float
    bound: float
    solver: str

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.flow / self.bound) if self.bound else 0.0


_Ask = Callable[[Chain, ChainPlacement, float], tuple[tuple[Range, ...], float]]


def place_chain(chain: Chain, limit_s: float = LIMIT_S) -> ChainPlacement:
    """Return the placement with the largest flow found in time."""
    # Three methods are tried one after the other: parallel chains that hold each layer
    # once, by bisection over their number and flow; HiGHS, which often proves
    # optimality; then CP-SAT from the best placement so far, if OR-tools is installed.
    # ``limit_s`` is for HiGHS and CP-SAT together.
    ranges = _side_by_side(chain)
    best = ChainPlacement(ranges, flow_of(chain, ranges), work_bound(chain), "chains")
    has_ortools = importlib.util.find_spec("ortools") is not None
    asked: dict[str, tuple[_Ask, float]] = {}
    asked["milp"] = (_linear, limit_s / 2 if has_ortools else limit_s)
    if has_ortools:
        asked["cp-sat"] = (_discrete, limit_s / 2)
    for name, (ask, share_s) in asked.items():
        if best.gap < CLOSE:
            break
        found, proven = ask(chain, best, share_s)
        bound, flow = min(best.bound, proven), flow_of(chain, found)
        if flow > best.flow:
            best = ChainPlacement(found, flow, bound, name)
        else:
            best = ChainPlacement(best.ranges, best.flow, bound, best.solver)
    return best


ROUNDING = 1e-12
"""Relative error of sums of capacities."""


def work_bound(chain: Chain) -> float:
    """Return an upper bound of the flow, because every item needs every layer once."""
    # If ``flow`` is possible, the nodes that hold a layer together pass ``flow`` there.
    # A node passes at most its capacity, and at most the flow. Summed over all layers,
    # the nodes must do ``flow * layers``. The bound is the largest flow for which they
    # can.

    def spare(flow: float) -> float:
        able = sum(
            kind.count * max(k * min(flow, c) for k, c in kind.capacity.items())
            for kind in chain.kinds
            if kind.capacity
        )
        # Rounding must not rule out a flow that uses exactly the whole capacity.
        return able - flow * chain.layers * (1 - ROUNDING)

    steps = sorted({c for kind in chain.kinds for c in kind.capacity.values()})
    if not steps:
        return 0.0
    # Beyond the largest capacity, the nodes can do no more.
    steps.append((spare(steps[-1]) + steps[-1] * chain.layers) / chain.layers)
    for low, high in reversed(list(zip([0.0, *steps], steps, strict=False))):
        if spare(high) >= 0:
            return high
        if low > 0 and spare(low) >= 0:
            return _root(spare, low, high)
    return 0.0


def _root(spare: Callable[[float], float], low: float, high: float) -> float:
    """Return the point where ``spare`` becomes negative, rounded up."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if spare(middle) >= 0 else (low, middle)
    return high


def flow_of(chain: Chain, ranges: Sequence[Range]) -> float:
    """Return the largest flow through nodes with these ranges, by a linear program."""
    enters = [
        (number, layer)
        for number, held in enumerate(ranges)
        for layer in range(held.start, held.start + held.layers)
    ]
    if not enters:
        return 0.0
    ends = [held.start + held.layers for held in ranges]
    inside = range(1, chain.layers)
    equal = np.zeros((len(inside), len(enters)))
    limit = np.zeros((len(ranges), len(enters)))
    for column, (number, layer) in enumerate(enters):
        limit[number, column] = 1.0
        if layer in inside:
            equal[layer - 1, column] -= 1.0
        if ends[number] in inside:
            equal[ends[number] - 1, column] += 1.0
    able = [chain.kinds[held.kind].capacity[held.layers] for held in ranges]
    gain = [-1.0 if layer == 0 else 0.0 for _, layer in enters]
    found = linprog(gain, limit, able, equal, np.zeros(len(inside)))
    return float(-found.fun) if found.status == 0 else 0.0


# Parallel chains.


def _side_by_side(chain: Chain) -> tuple[Range, ...]:
    """Return the best of 1, 2, … parallel chains of consecutive nodes."""
    best: tuple[Range, ...] = ()
    most = max(1, sum(kind.count for kind in chain.kinds))
    for count in range(1, most + 1):
        found = _chains(chain, count)
        if found is not None and flow_of(chain, found) > flow_of(chain, best):
            best = found
    return best


def _chains(chain: Chain, count: int) -> tuple[Range, ...] | None:
    flows = sorted({c for kind in chain.kinds for c in kind.capacity.values()})
    low, high, best = 0, len(flows) - 1, None
    while low <= high:
        middle = (low + high) // 2
        found = _pack(chain, count, flows[middle])
        if found is None:
            high = middle - 1
        else:
            best, low = found, middle + 1
    return best


def _pack(chain: Chain, count: int, flow: float) -> tuple[Range, ...] | None:
    """Return ``count`` chains of at least ``flow`` each, or None."""
    nodes = [
        (max(fits), number)
        for number, kind in enumerate(chain.kinds)
        for _ in range(kind.count)
        if (fits := [k for k, c in kind.capacity.items() if c >= flow])
    ]
    nodes.sort(reverse=True)
    lengths, members = [0] * count, defaultdict(list)
    for layers, kind in nodes:  # the longest range to the shortest chain
        shortest = min(range(count), key=lambda n: lengths[n])
        if lengths[shortest] >= chain.layers:
            break
        members[shortest].append((layers, kind))
        lengths[shortest] += layers
    if min(lengths) < chain.layers:
        return None
    ranges = []
    for number in range(count):
        end = 0
        for layers, kind in members[number]:
            # The last range may start before the previous one ends.
            start = min(end, chain.layers - layers)
            if start < 0:
                return None
            ranges.append(Range(kind, start, layers))
            end = start + layers
    return tuple(ranges)


# Any ranges: HiGHS.


def _linear(
    chain: Chain, best: ChainPlacement, limit_s: float
) -> tuple[tuple[Range, ...], float]:
    """Return HiGHS's solution if it is better than ``best``, and its bound."""
    nodes = _all_ranges(chain)
    longest = max(max(kind.capacity, default=0) for kind in chain.kinds)
    flows = [
        (begin, end)
        for end in range(1, chain.layers + 1)
        for begin in range(max(0, end - longest), end)
    ]
    column = {flow: len(nodes) + number for number, flow in enumerate(flows)}
    rows = Rows()
    for number, kind in enumerate(chain.kinds):
        own = {n: 1.0 for n, held in enumerate(nodes) if held.kind == number}
        rows.add(own, high=float(kind.count))
    for last, end in flows:
        # See ``_flow_variables``.
        terms = {column[b, e]: 1.0 for b, e in flows if e == end and b <= last}
        for n, held in enumerate(nodes):
            if held.start + held.layers == end and held.start <= last:
                terms[n] = -chain.kinds[held.kind].capacity[held.layers]
        rows.add(terms, high=0.0)
    for boundary in range(1, chain.layers):
        terms = {column[f]: 1.0 for f in flows if f[0] == boundary}
        terms |= {column[f]: -1.0 for f in flows if f[1] == boundary}
        rows.add(terms, low=0.0, high=0.0)
    whole = {column[f]: 1.0 for f in flows if f[0] == 0}
    rows.add(whole, low=best.flow * (1 - CLOSE))
    count = len(nodes) + len(flows)
    high = np.full(count, np.inf)
    high[: len(nodes)] = [chain.kinds[held.kind].count for held in nodes]
    integrality = np.zeros(count)
    integrality[: len(nodes)] = 1
    gain = np.zeros(count)
    gain[list(whole)] = -1.0
    found = milp(
        gain,
        constraints=rows.constraint(count),
        bounds=Bounds(np.zeros(count), high),
        integrality=integrality,
        options={"time_limit": limit_s, "mip_rel_gap": CLOSE},
    )
    proven = getattr(found, "mip_dual_bound", None)
    bound = math.inf if proven is None else -float(proven)
    if found.x is None:
        return (), bound
    counts = [round(float(value)) for value in found.x[: len(nodes)]]
    chosen = [itertools.repeat(held, n) for held, n in zip(nodes, counts, strict=True)]
    return tuple(itertools.chain.from_iterable(chosen)), bound


def _all_ranges(chain: Chain) -> list[Range]:
    return [
        Range(number, start, layers)
        for number, kind in enumerate(chain.kinds)
        for layers in kind.capacity
        for start in range(chain.layers - layers + 1)
    ]


# Any ranges: CP-SAT.

UNITS = 100
"""Integer units of an item per second. Capacities are rounded up, so that the bound is
a bound of the real problem; the flow of the solution is recomputed."""


def _discrete(
    chain: Chain, best: ChainPlacement, limit_s: float
) -> tuple[tuple[Range, ...], float]:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    top = math.ceil(best.bound * UNITS)
    nodes = {
        held: model.new_int_var(0, chain.kinds[held.kind].count, "")
        for held in _all_ranges(chain)
    }
    for number, kind in enumerate(chain.kinds):
        own = [variable for held, variable in nodes.items() if held.kind == number]
        model.add(sum(own) <= kind.count)
    flow = _flow_variables(model, chain, nodes, top)
    total = sum(variable for (begin, _), variable in flow.items() if begin == 0)
    model.maximize(total)
    counts: dict[Range, int] = defaultdict(int)
    for held in best.ranges:
        counts[held] += 1
    for held, variable in nodes.items():
        model.add_hint(variable, counts[held])
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 2
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    bound = solver.best_objective_bound / UNITS
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return (), math.inf
    found = [itertools.repeat(held, solver.value(v)) for held, v in nodes.items()]
    return tuple(itertools.chain.from_iterable(found)), bound


def _flow_variables(
    model: Any, chain: Chain, nodes: Mapping[Range, Any], top: int
) -> dict[tuple[int, int], Any]:
    """Return the flow between each pair of boundaries, limited by capacity."""
    # Flow that enters at or before ``begin`` and leaves at ``end`` can only use nodes
    # whose range ends at ``end`` and starts at or before ``begin``.
    longest = max(max(kind.capacity, default=0) for kind in chain.kinds)
    flow = {
        (begin, end): model.new_int_var(0, top, "")
        for end in range(1, chain.layers + 1)
        for begin in range(max(0, end - longest), end)
    }
    for end in range(1, chain.layers + 1):
        for last in range(max(0, end - longest), end):
            entering = [v for (b, e), v in flow.items() if e == end and b <= last]
            able = [
                math.ceil(chain.kinds[held.kind].capacity[held.layers] * UNITS) * v
                for held, v in nodes.items()
                if held.start + held.layers == end and held.start <= last
            ]
            model.add(sum(entering) <= sum(able))
    for boundary in range(1, chain.layers):
        out = [v for (b, _), v in flow.items() if b == boundary]
        into = [v for (_, e), v in flow.items() if e == boundary]
        model.add(sum(out) == sum(into))
    return flow
