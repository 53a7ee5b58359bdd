"""Placement problem as a mixed-integer linear program, for scipy's HiGHS. Pure.

Variables: a model is on or off; a slot has a number of replicas and serves a share of
its model's demand; a device is used or not. With the replicas fixed, only a linear
program is left, which computes the exact shares for any solver's replicas.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from multiworld.serve.controller.placement.solver.model import (
    REPLICA_COST,
    Counts,
    Slot,
    hops_s,
    places_of,
    slots_of,
    spread_of,
    worth_of,
)
from multiworld.serve.controller.placement.solver.problem import Problem, StageNeed

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

CLOSE = 1e-6  # relative gap of a solution that counts as optimal
NONZERO = 0.5  # value above which an integer variable counts as at least 1


@dataclass(slots=True)
class Rows:
    """Linear constraints ``low <= sum(factor * variable) <= high``."""

    terms: list[dict[int, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(
        self, terms: dict[int, float], low: float = -math.inf, high: float = math.inf
    ) -> None:
        self.terms.append(terms)
        self.low.append(low)
        self.high.append(high)

    def constraint(self, count: int) -> LinearConstraint:
        # Import SciPy only here: it takes half a second, and many services never need
        # it.
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        entries = [
            (row, column, factor)
            for row, terms in enumerate(self.terms)
            for column, factor in terms.items()
        ]
        rows, columns, factors = zip(*entries, strict=True) if entries else ((), (), ())
        shape = (len(self.terms), count)
        return LinearConstraint(
            csr_array((factors, (rows, columns)), shape=shape), self.low, self.high
        )


class Formulation:
    """Indices of the variables, constraints, and the objective to maximise."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.places = places_of(problem)
        self.slots = slots_of(problem)
        numbers = itertools.count()
        models, devices = range(len(problem.models)), range(len(self.places))
        self.on = {m: next(numbers) for m in models}
        self.has = {slot: next(numbers) for slot in self.slots}
        self.used = {d: next(numbers) for d in devices}
        many = [slot for slot in self.slots if self._stage(slot).per_device > 1]
        # `here`: whether a slot has any replica; `new`: how many are new. A slot with
        # room for only one replica needs no extra variables.
        self.here = self.has | {slot: next(numbers) for slot in many}
        self.new = {slot: next(numbers) for slot in many}
        self.integers = next(numbers)
        self.highs = dict.fromkeys(range(self.integers), 1)
        for slot in many:
            maximum = self._stage(slot).per_device
            self.highs |= {self.has[slot]: maximum, self.new[slot]: maximum}
        self._running = Counter(problem.running)
        self.share = {slot: self.integers + i for i, slot in enumerate(self.slots)}
        after = itertools.count(self.integers + len(self.slots))
        self.served = {m: next(after) for m in models}
        self.longest = {
            (m, k): next(after)
            for m, model in enumerate(problem.models)
            if model.latency_s is not None
            for k in range(len(model.stages))
        }
        self.peak = next(after) if problem.balance else None
        self.count = next(after)
        self.rows = Rows()
        self.by_stage: dict[tuple[int, int], list[Slot]] = defaultdict(list)
        self.by_device: dict[int, list[Slot]] = defaultdict(list)
        for slot in self.slots:
            self.by_stage[slot[:2]].append(slot)
            self.by_device[slot[2]].append(slot)
        self._constrain_stages()
        self._constrain_counts()
        self._constrain_devices()
        self._constrain_latency()

    def _stage(self, slot: Slot) -> StageNeed:
        return self.problem.models[slot[0]].stages[slot[1]]

    def runs(self, slot: Slot) -> int:
        m, k, d = slot
        key = self.problem.models[m].name, k, self.places[d].device.name
        return self._running[key]

    def seconds(self, slot: Slot) -> float:
        """Return the device time per second for a model's whole demand in a slot."""
        m, k, d = slot
        model = self.problem.models[m]
        return model.stages[k].seconds[self.places[d].device.kind] * model.demand

    def _constrain_stages(self) -> None:
        for m, model in enumerate(self.problem.models):
            self.rows.add({self.served[m]: 1.0, self.on[m]: -1.0}, high=0.0)
            for k, stage in enumerate(model.stages):
                slots = self.by_stage[m, k]
                shares = {self.share[slot]: 1.0 for slot in slots}
                self.rows.add(shares | {self.served[m]: -1.0}, low=0.0)
                has = {self.has[slot]: 1.0 for slot in slots}
                minimum = float(max(1, stage.min_replicas))
                self.rows.add(has | {self.on[m]: -minimum}, low=0.0)
                room = len(slots) * stage.per_device
                maximum = float(
                    room if stage.max_replicas is None else stage.max_replicas
                )
                self.rows.add(has | {self.on[m]: -maximum}, high=0.0)
                if spread_of(self.problem, stage) > 1:
                    self._spread(m, slots)
                for slot in slots:
                    able = self.problem.utilisation / max(1e-12, self.seconds(slot))
                    terms = {self.share[slot]: 1.0, self.has[slot]: -min(1.0, able)}
                    self.rows.add(terms, high=0.0)

    def _constrain_counts(self) -> None:
        for slot, new in self.new.items():
            maximum = float(self._stage(slot).per_device)
            self.rows.add({self.has[slot]: 1.0, self.here[slot]: -maximum}, high=0.0)
            runs = float(self.runs(slot))
            self.rows.add({self.has[slot]: 1.0, new: -1.0}, high=runs)

    def _spread(self, m: int, slots: list[Slot]) -> None:
        """Require a replica outside each node, because nodes fail as a whole."""
        for node in range(len(self.problem.nodes)):
            elsewhere = [s for s in slots if self.places[s[2]].node != node]
            terms = {self.has[slot]: 1.0 for slot in elsewhere}
            self.rows.add(terms | {self.on[m]: -1.0}, low=0.0)

    def _constrain_devices(self) -> None:
        for d, place in enumerate(self.places):
            slots = self.by_device[d]
            if not slots:
                continue
            stages = {s: self.problem.models[s[0]].stages[s[1]] for s in slots}
            # Memory is in GiB, because the solver works better with factors of similar
            # size.
            memory = {self.has[s]: stages[s].memory_bytes / 2**30 for s in slots}
            self.rows.add(memory, high=place.device.memory_bytes / 2**30)
            seconds = {
                self.share[slot]: self.seconds(slot) * stages[slot].width
                for slot in slots
            }
            capacity = place.device.capacity
            self.rows.add(seconds, high=self.problem.utilisation * capacity)
            cores = {self.has[s]: stages[s].cores for s in slots if stages[s].cores}
            if cores:
                self.rows.add(cores, high=capacity)
            for slot in slots:
                self.rows.add({self.here[slot]: 1.0, self.used[d]: -1.0}, high=0.0)
            if self.peak is not None:
                widths = {self.has[s]: -stages[s].width for s in slots}
                self.rows.add(widths | {self.peak: capacity}, low=0.0)
        for n, node in enumerate(self.problem.nodes):
            if node.bandwidth is None:
                continue
            sent = {}
            for slot in self.slots:
                m, k, d = slot
                model = self.problem.models[m]
                if self.places[d].node == n and k + 1 < len(model.stages):
                    bytes_s = model.stages[k].out_bytes * model.demand
                    sent[self.share[slot]] = bytes_s / max(1.0, node.bandwidth)
            self.rows.add(sent, high=1.0 if node.bandwidth else 0.0)

    def _constrain_latency(self) -> None:
        for m, model in enumerate(self.problem.models):
            if model.latency_s is None:
                continue
            whole = {self.longest[m, k]: 1.0 for k in range(len(model.stages))}
            self.rows.add(whole, high=model.latency_s - hops_s(self.problem, model))
            for k, stage in enumerate(model.stages):
                for slot in self.by_stage[m, k]:
                    seconds = stage.seconds[self.places[slot[2]].device.kind]
                    terms = {self.longest[m, k]: 1.0, self.here[slot]: -seconds}
                    self.rows.add(terms, low=0.0)

    @property
    def close(self) -> float:
        """Relative gap at which to stop searching."""
        if not self.problem.running:
            return CLOSE
        # A gap below the value of one move is enough; a smaller gap takes longer.
        weight = sum(model.weight for model in self.problem.models)
        whole = max(1.0, worth_of(self.problem) * weight)
        return min(CLOSE, self.problem.move_cost / (4 * whole) or CLOSE)

    def gains(self) -> dict[int, float]:
        worth = worth_of(self.problem)
        gains = {
            self.served[m]: worth * model.weight if model.demand > 0 else 0.0
            for m, model in enumerate(self.problem.models)
        }
        for d, place in enumerate(self.places):
            gains[self.used[d]] = -place.device.price
        if self.peak is not None:
            gains[self.peak] = -self.problem.balance
        for slot in self.slots:
            gains[self.has[slot]] = -REPLICA_COST
            if slot in self.new:
                gains[self.new[slot]] = -self.problem.move_cost
            elif not self.runs(slot):
                gains[self.has[slot]] -= self.problem.move_cost
        return gains

    def counts(self, values: np.ndarray) -> dict[Slot, int]:
        found = {slot: round(float(values[n])) for slot, n in self.has.items()}
        return {slot: count for slot, count in found.items() if count}

    def rates(self, values: np.ndarray) -> dict[Slot, float]:
        return {
            slot: float(values[self.share[slot]]) * self.problem.models[slot[0]].demand
            for slot in self.slots
            if values[self.has[slot]] > NONZERO
        }

    def solve(
        self, limit_s: float, chosen: Counts | None = None
    ) -> tuple[np.ndarray | None, float]:
        """Return the best variables found (1-D, float64) and an upper bound."""
        low, high = np.zeros(self.count), np.full(self.count, 1.0)
        for number, maximum in self.highs.items():
            high[number] = float(maximum)
        for number in self.longest.values():
            high[number] = np.inf
        if self.peak is not None:
            high[self.peak] = np.inf
        from scipy.optimize import Bounds, milp

        integrality = np.zeros(self.count)
        integrality[: self.integers] = 1
        if chosen is not None:
            # Fix the replicas in each slot, so that only rates are optimised.
            for slot, number in self.has.items():
                low[number] = high[number] = float(chosen.get(slot, 0))
            on = {slot[0] for slot in chosen}
            for m, number in self.on.items():
                low[number] = high[number] = float(m in on)
        factors = np.zeros(self.count)
        for number, gain in self.gains().items():
            factors[number] = -gain
        found = milp(
            factors,
            constraints=self.rows.constraint(self.count),
            bounds=Bounds(low, high),
            integrality=integrality,
            options={"time_limit": limit_s, "mip_rel_gap": self.close},
        )
        bound = getattr(found, "mip_dual_bound", None)
        best = math.inf if bound is None else -float(bound)
        return found.x, best
