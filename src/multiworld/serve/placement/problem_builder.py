"""From a service and its machines to a placement problem, and back. Pure.

``placement.place`` solves it. What comes back says how many replicas of which stage go
on which machine; ``Places`` follows it where there is room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiworld.serve.placement.solver.problem import (
    Device,
    ModelNeed,
    Placement,
    Problem,
    StageNeed,
)
from multiworld.serve.placement.solver.problem import Node as Host
from multiworld.serve.resources.amounts import Need, Node, needs_of
from multiworld.serve.spec.schema import (
    AutoscalingConfig,
    ModelSpec,
    ReplicaRange,
    StageSpec,
)

MANY = 64
"""Most replicas of a stage on one device that a plan thinks of."""

NOMINAL = 1e-3
"""Rows a second that are planned where no demand is declared: none to speak of."""

CPU = "cpu"

BALANCE = 0.01
"""Less than a move costs: new replicas go where few are, running ones stay."""


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A model, and how many replicas each stage is to have: fewest and most."""

    name: str
    spec: ModelSpec
    counts: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    """A replica that runs: where it is."""

    model: str
    stage: int
    node: str
    gpu: int | None


def device_name(node: str, gpu: int | None) -> str:
    """Return what a plan calls a machine's cores, or one of its GPUs."""
    return f"{node}/{CPU}" if gpu is None else f"{node}/gpu{gpu}"


def asks_in(models: Mapping[str, ModelSpec]) -> list[ReplicaRequest]:
    """Return what a spec asks for; with a demand, a range is the solver's to use."""
    return [
        ReplicaRequest(
            name, spec, [_range(stage, spec.demand) for stage in spec.stages]
        )
        for name, spec in models.items()
    ]


def _range(stage: StageSpec, demand: float | None) -> tuple[int, int]:
    config = stage.autoscaling_config or stage.replicas
    if isinstance(config, AutoscalingConfig | ReplicaRange) and demand is not None:
        return max(1, config.min_replicas), config.max_replicas
    least = max(1, stage.initial_count)  # one that runs on demand needs a place, too
    return least, least


def problem_of(
    nodes: Iterable[Node],
    asks: Iterable[ReplicaRequest],
    running: Iterable[PlacedReplica] = (),
) -> Problem:
    """Return the problem of placing models on machines.

    A model of which a stage has no replica, while nobody asks, is left out.
    """
    nodes = list(nodes)
    names = [node.name for node in nodes]
    hosts = tuple(Host(node.name, _devices(node), node.bandwidth) for node in nodes)
    kinds = {d.kind for host in hosts for d in host.devices} - {CPU}
    asked = [ask for ask in asks if all(most > 0 for _, most in ask.counts)]
    return Problem(
        hosts,
        tuple(_model(ask, kinds, names) for ask in asked),
        [(r.model, r.stage, device_name(r.node, r.gpu)) for r in running],
        balance=BALANCE,
    )


def _devices(node: Node) -> tuple[Device, ...]:
    cores = Device(
        device_name(node.name, None), CPU, node.memory_bytes, node.price, node.cpus
    )
    return (
        cores,
        *(
            Device(
                device_name(node.name, gpu.index),
                gpu.kind,
                gpu.memory_bytes,
                node.price,
            )
            for gpu in node.gpus
        ),
    )


def _model(ask: ReplicaRequest, kinds: set[str], names: Sequence[str]) -> ModelNeed:
    spec = ask.spec
    stages = zip(spec.stages, needs_of(spec), ask.counts, strict=True)
    return ModelNeed(
        ask.name,
        tuple(
            _stage(stage, need, counts, kinds, names) for stage, need, counts in stages
        ),
        spec.demand or NOMINAL,
        spec.weight,
        None if spec.latency_ms is None else spec.latency_ms / 1000,
    )


def _stage(
    stage: StageSpec,
    need: Need,
    counts: tuple[int, int],
    kinds: set[str],
    names: Sequence[str],
) -> StageNeed:
    seconds = (stage.item_ms or 0.0) / 1000
    allowed = frozenset(name for name in names if need.allows(name))
    return StageNeed(
        memory_bytes=need.gpu_memory_bytes if need.on_gpu else need.memory_bytes,
        seconds=dict.fromkeys(kinds, seconds) if need.on_gpu else {CPU: seconds},
        out_bytes=round((stage.out_kb or 0.0) * 1024),
        least=counts[0],
        most=counts[1],
        # Where none of its machines is there, its own names say so.
        nodes=(allowed or need.nodes) if need.nodes else frozenset(),
        width=1.0 if need.on_gpu else float(stage.threads * stage.ranks),
        cores=0.0 if need.on_gpu else need.cpus,
        per_device=min(MANY, counts[1]),
    )


def plan_of(
    placement: Placement, versions: Mapping[str, str]
) -> dict[tuple[object, str], int]:
    """Return how many replicas of each post go on each machine."""
    found: Counter[tuple[object, str]] = Counter()
    for replica in placement.replicas:
        node = replica.device.rpartition("/")[0]
        found[(replica.model, versions[replica.model], replica.stage), node] += 1
    return dict(found)


def moves(
    plan: Mapping[tuple[Any, str], int], here: Mapping[str, tuple[object, str]]
) -> list[str]:
    """Return which replicas are where the plan has none, and their post is wanted.

    Args:
        here: Of every ready replica: its post and its machine.
    """
    left = Counter(plan)
    surplus = []
    for name, (post, node) in sorted(here.items()):
        if left[post, node] > 0:
            left[post, node] -= 1
        else:
            surplus.append(name)
    wanted = Counter(post for (post, _), count in left.items() for _ in range(count))
    found = []
    for name in surplus:
        post = here[name][0]
        if wanted[post] > 0:
            wanted[post] -= 1
            found.append(name)
    return found


@dataclass(frozen=True, slots=True)
class StageOutlook:
    """What a plan makes of a stage.

    Attributes:
        where: How many replicas, by device.
        busy: The share of its time that a replica computes at what is served.
        able: Rows a second that its replicas could do, if nothing else is short.
    """

    model: str
    stage: int
    where: dict[str, int]
    busy: float
    able: float


def outlook(problem: Problem, placement: Placement) -> list[StageOutlook]:
    """Return what is to be expected of every stage."""
    kind_of = {d.name: d.kind for node in problem.nodes for d in node.devices}
    found = []
    for model in problem.models:
        for k, stage in enumerate(model.stages):
            mine = [
                r for r in placement.replicas if (r.model, r.stage) == (model.name, k)
            ]
            seconds = [stage.seconds[kind_of[r.device]] for r in mine]
            busy = max(
                (r.rate * s for r, s in zip(mine, seconds, strict=True)), default=0.0
            )
            able = sum(problem.utilisation / s if s else float("inf") for s in seconds)
            where = Counter(r.device for r in mine)
            found.append(StageOutlook(model.name, k, dict(where), busy, able))
    return found


def bottleneck(stages: Iterable[StageOutlook], model: str) -> StageOutlook | None:
    """Return the stage of a model that is short first; None if no time is known."""
    mine = [s for s in stages if s.model == model and 0 < s.able < float("inf")]
    return min(mine, key=lambda stage: stage.able, default=None)


def in_words(placement: Placement) -> str:
    """Return what a plan says, for people."""
    where = Counter(r.device.rpartition("/")[0] for r in placement.replicas)
    spread = ", ".join(f"{node} {count}" for node, count in sorted(where.items()))
    short = "".join(
        f"; {name} is short: {why}" for name, why in placement.unplaced.items()
    )
    gap = "no bound" if placement.gap == float("inf") else f"{placement.gap:.2%}"
    return f"replicas by machine: {spread} ({placement.solver}, gap {gap}){short}"
