"""Verifier: checks a placement independently of the solvers. Pure. It shares only the
problem's definition with them, so it also finds errors in their code."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from multiworld.serve.controller.placement.solver.problem import (
    ModelNeed,
    Placement,
    Problem,
    Replica,
    StageNeed,
)
from multiworld.serve.machines.amounts import mib

SLACK = 1e-6  # relative tolerance of checks: solvers compute in floating point


def faults(problem: Problem, placement: Placement) -> list[str]:
    """Return the faults of a placement in words; empty if it is feasible."""
    books = _Books(problem)
    found = [fault for replica in placement.replicas for fault in books.enter(replica)]
    found += books.overdrawn()
    for model in problem.models:
        found += _of_model(books, model, placement.served[model.name])
    return found


class _Books:
    """Resources used by all replicas together, and the replicas' locations."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.devices = {d.name: d for node in problem.nodes for d in node.devices}
        self.home = {d.name: n.name for n in problem.nodes for d in n.devices}
        self._models = {model.name: model for model in problem.models}
        self._memory: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._sent: dict[str, float] = defaultdict(float)
        self._cores: dict[str, float] = defaultdict(float)
        self.rates: dict[tuple[str, int], float] = defaultdict(float)
        self.where: dict[tuple[str, int], list[str]] = defaultdict(list)

    def enter(self, replica: Replica) -> Iterator[str]:
        """Book a replica; yield the faults of this replica alone."""
        stages = self._models[replica.model].stages
        stage = stages[replica.stage]
        device, node = self.devices[replica.device], self.home[replica.device]
        name = f"{replica.model}/{replica.stage} on {replica.device}"
        if device.kind not in stage.seconds:
            yield f"{name}: it does not run on {device.kind}"
            return
        if stage.nodes and node not in stage.nodes:
            yield f"{name}: it may not be on {node}"
        if replica.rate < -SLACK:
            yield f"{name}: its rate is negative: {replica.rate}"
        seconds = replica.rate * stage.seconds[device.kind]
        if seconds > self.problem.utilisation * (1 + SLACK):
            yield f"{name}: it would compute for {seconds:.6f} of every second"
        self._memory[replica.device] += stage.memory_bytes
        self._seconds[replica.device] += seconds * stage.width
        self._cores[replica.device] += stage.cores
        self.rates[replica.model, replica.stage] += replica.rate
        self.where[replica.model, replica.stage].append(replica.device)
        if replica.stage + 1 < len(stages):
            self._sent[node] += replica.rate * stage.out_bytes

    def overdrawn(self) -> Iterator[str]:
        """Yield the devices and nodes whose bookings exceed their resources."""
        for name, size in self._memory.items():
            if size > self.devices[name].memory_bytes:
                yield f"{name}: {mib(size)} are booked, more than it has"
        for name, share in self._seconds.items():
            limit = self.problem.utilisation * self.devices[name].capacity
            if share > limit * (1 + SLACK):
                yield f"{name}: {share:.6f} of its time is booked, over {limit:.6f}"
        for name, cores in self._cores.items():
            if cores > self.devices[name].capacity * (1 + SLACK):
                yield f"{name}: {cores:g} cores are booked, more than it has"
        for node in self.problem.nodes:
            sent = self._sent[node.name]
            if node.bandwidth is not None and sent > node.bandwidth * (1 + SLACK):
                limit = node.bandwidth
                yield f"{node.name}: sends {sent:,.0f} bytes/s, more than {limit:,.0f}"

    def could_spread(self, stage: StageNeed) -> bool:
        nodes = {
            self.home[device.name]
            for device in self.devices.values()
            if device.kind in stage.seconds
            and device.memory_bytes >= stage.memory_bytes
            and 0 < device.capacity >= stage.cores
            and (not stage.nodes or self.home[device.name] in stage.nodes)
        }
        return len(nodes) > 1


def _of_model(books: _Books, model: ModelNeed, served: float) -> Iterator[str]:
    if served > model.demand * (1 + SLACK):
        yield f"{model.name}: serves {served}, above its demand of {model.demand}"
    for k, stage in enumerate(model.stages):
        yield from _of_stage(books, model.name, k, stage, served)
    if served > 0 and model.latency_s is not None:
        longest = books.problem.hop_s * (len(model.stages) - 1)
        for k, stage in enumerate(model.stages):
            kinds = (books.devices[d].kind for d in books.where[model.name, k])
            longest += max((stage.seconds[kind] for kind in kinds), default=0.0)
        if longest > model.latency_s + SLACK:
            yield f"{model.name}: takes {longest} s, above its {model.latency_s} s"


def _of_stage(
    books: _Books, model: str, k: int, stage: StageNeed, served: float
) -> Iterator[str]:
    used, rate, name = books.where[model, k], books.rates[model, k], f"{model}/{k}"
    count = max(Counter(used).values(), default=0)
    if count > stage.per_device:
        yield f"{name}: {count} replicas on one device"
    if served > rate * (1 + SLACK) + SLACK:
        yield f"{name}: serves {rate}, less than {served}"
    if stage.max_replicas is not None and len(used) > stage.max_replicas:
        yield f"{name}: {len(used)} replicas, at most {stage.max_replicas} allowed"
    if served <= 0:
        return
    if len(used) < stage.min_replicas:
        yield f"{name}: {len(used)} replicas, at least {stage.min_replicas} needed"
    is_on_one = len({books.home[device] for device in used}) < 2
    if stage.min_replicas > 1 and is_on_one and books.could_spread(stage):
        yield f"{name}: all of its replicas on one node"
