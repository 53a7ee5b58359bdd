"""Greedy placement: models by their value, one replica at a time. Pure.

Each stage gets its minimum number of replicas; then the slowest stage gets more until
the demand is met or no device has time left for it. The result is always feasible; the
solvers start from it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict

from multiworld.serve.controller.placement.solver.model import (
    PlacedDevice,
    Slot,
    is_in_time,
    places_of,
    slots_of,
    spread_of,
)
from multiworld.serve.controller.placement.solver.problem import (
    ModelNeed,
    Problem,
    StageNeed,
)

ENOUGH = 1e-9  # rates and loads below this count as zero


class _Ledger:
    """Free resources of every device; never negative."""

    def __init__(self, problem: Problem, places: list[PlacedDevice]) -> None:
        self.places = places
        self.memory = [place.device.memory_bytes for place in places]
        self.seconds = [problem.utilisation * p.device.capacity for p in places]
        self.cores = [place.device.capacity for place in places]
        self._most = problem.utilisation
        self.bytes_s = [
            math.inf if node.bandwidth is None else node.bandwidth
            for node in problem.nodes
        ]
        self.used: dict[int, int] = defaultdict(int)

    def take(
        self, device: int, stage: StageNeed, rate: float, *, is_last: bool, by: int = 1
    ) -> None:
        """Book a replica with a rate in items per second; ``by=-1`` releases it."""
        place = self.places[device]
        seconds = rate * stage.seconds[place.device.kind] * stage.width
        self.memory[device] -= by * stage.memory_bytes
        self.cores[device] -= by * stage.cores
        self.used[device] += by
        self.seconds[device] -= by * seconds
        if not is_last:
            self.bytes_s[place.node] -= by * rate * stage.out_bytes

    def able(self, device: int, stage: StageNeed, *, is_last: bool) -> float:
        """Return how many items per second a replica on the device could compute."""
        place = self.places[device]
        seconds = stage.seconds[place.device.kind]
        left = min(self._most, self.seconds[device] / stage.width)
        rate = left / seconds if seconds > 0 else math.inf
        if not is_last and stage.out_bytes:
            rate = min(rate, self.bytes_s[place.node] / stage.out_bytes)
        return max(0.0, rate)


def place_greedily(problem: Problem) -> dict[Slot, int]:
    places = places_of(problem)
    ledger = _Ledger(problem, places)
    slots: dict[tuple[int, int], list[int]] = defaultdict(list)
    for m, k, d in slots_of(problem):
        slots[m, k].append(d)
    counts: Counter[Slot] = Counter()
    for m in sorted(range(len(problem.models)), key=lambda m: _urgency(problem, m)):
        counts.update(_ModelPlacement(problem, ledger, m, slots).run())
    return dict(counts)


def _urgency(problem: Problem, m: int) -> tuple[float, float]:
    """Return a model's sort key: the greatest value per computing time first."""
    model = problem.models[m]
    seconds = sum(min(s.seconds.values(), default=0.0) for s in model.stages)
    load = max(ENOUGH, seconds * model.demand)
    return -model.weight / load, -model.weight


class _ModelPlacement:
    """Placement of one model, as a whole or not at all."""

    def __init__(
        self,
        problem: Problem,
        ledger: _Ledger,
        m: int,
        slots: dict[tuple[int, int], list[int]],
    ) -> None:
        self._problem, self._ledger, self._m, self._slots = problem, ledger, m, slots
        self._model: ModelNeed = problem.models[m]
        self._running = Counter(problem.running)
        self._chosen: list[tuple[Slot, float]] = []
        # By stage: number of replicas on each device, and their total items per second.
        self._on: list[Counter[int]] = [Counter() for _ in self._model.stages]
        self._rates = [0.0] * len(self._model.stages)

    def run(self) -> list[Slot]:
        """Return a slot for each replica; an empty list if a stage does not fit."""
        for k, stage in enumerate(self._model.stages):
            for _ in range(max(1, stage.min_replicas)):
                if not self._add(k):
                    self._give_up()
                    return []
        # Grow the slowest stage: it limits the throughput of all others.
        stages = range(len(self._model.stages))
        while self._missing(k := max(stages, key=self._missing)) > ENOUGH:
            if not self._add(k):
                break
        return [slot for slot, _ in self._chosen]

    def _give_up(self) -> None:
        for (_, k, d), rate in self._chosen:
            stage = self._model.stages[k]
            self._ledger.take(d, stage, rate, is_last=self._is_last(k), by=-1)

    def _is_last(self, k: int) -> bool:
        return k + 1 == len(self._model.stages)

    def _missing(self, k: int) -> float:
        return self._model.demand - self._rates[k]

    def _add(self, k: int) -> bool:
        """Add a replica of stage ``k`` in the best slot, if there is one."""
        stage, on = self._model.stages[k], self._on[k]
        if stage.max_replicas is not None and on.total() >= stage.max_replicas:
            return False
        is_in_time = functools.cache(functools.partial(self._is_in_time, k))
        places = self._ledger.places
        found = [
            d
            for d in self._slots[self._m, k]
            if on[d] < stage.per_device
            and stage.memory_bytes <= self._ledger.memory[d]
            and stage.cores <= self._ledger.cores[d] + ENOUGH
            and is_in_time(places[d].device.kind)
        ]
        nodes = {places[d].node for d in on}
        if len(nodes) == 1 < spread_of(self._problem, stage):
            found = [d for d in found if places[d].node not in nodes]
        has_all = on.total() >= max(1, stage.min_replicas)
        rates = {d: self._rate(k, d) for d in found}
        most = max([ENOUGH, *rates.values()])
        best = max(
            found,
            key=lambda d: (round(rates[d] / most, 3), *self._merit(k, d)),
            default=None,
        )
        if best is None or (has_all and rates[best] <= ENOUGH):
            return False
        rate = rates[best]
        self._chosen.append(((self._m, k, best), rate))
        on[best] += 1
        self._rates[k] += rate
        self._ledger.take(best, stage, rate, is_last=self._is_last(k))
        return True

    def _is_in_time(self, k: int, kind: str) -> bool:
        places = self._ledger.places
        kinds = [{places[d].device.kind for d in on} for on in self._on]
        kinds[k].add(kind)
        return is_in_time(self._problem, self._model, kinds)

    def _rate(self, k: int, d: int) -> float:
        stage = self._model.stages[k]
        able = self._ledger.able(d, stage, is_last=self._is_last(k))
        return max(0.0, min(self._missing(k), able))

    def _merit(self, k: int, d: int) -> tuple[float, ...]:
        device = self._ledger.places[d].device
        runs = self._running[self._model.name, k, device.name]
        is_running = self._on[k][d] < runs
        price = 0.0 if self._ledger.used[d] else device.price
        full = self._ledger.used[d] / device.capacity if self._problem.balance else 0.0
        return is_running, -price, -full, -self._ledger.memory[d]
