"""Conversion of a service and its machines to placement problems, and of solutions to
plans: how many replicas of which stage go on which machine. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from multiworld.serve.controller.placement.solver.problem import (
    Device,
    ModelNeed,
    Placement,
    Problem,
    StageNeed,
)
from multiworld.serve.controller.placement.solver.problem import Node as Host
from multiworld.serve.machines.amounts import Need, Node, needs_of
from multiworld.serve.spec.schema import (
    AutoscalingConfig,
    ModelSpec,
    ReplicaRange,
    StageSpec,
)

NOMINAL = 1e-3  # demand (rows/s) of a model that declares none: almost zero
CPU = "cpu"  # kind of the device that represents a machine's cores

# Cost per hour of the fullest device's load (``Problem.balance``). It is below the cost
# of a move, so that new replicas go to emptier machines, but running ones stay.
BALANCE = 0.01


@dataclass(frozen=True, slots=True)
class ReplicaRequest:
    """A model, and the minimum and maximum number of replicas of each stage."""

    name: str
    spec: ModelSpec
    counts: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PlacedReplica:
    model: str
    stage: int
    node: str
    gpus: tuple[int, ...] = ()


def device_name(node: str, gpu: int | None) -> str:
    """Return the solver's name for a machine's cores, or for one of its GPUs."""
    return f"{node}/{CPU}" if gpu is None else f"{node}/gpu{gpu}"


def asks_in(models: Mapping[str, ModelSpec]) -> list[ReplicaRequest]:
    return [
        ReplicaRequest(
            name, spec, [_range(stage, spec.demand) for stage in spec.stages]
        )
        for name, spec in models.items()
    ]


def _range(stage: StageSpec, demand: float | None) -> tuple[int, int]:
    """Return the minimum and maximum number of replicas; equal without a demand."""
    config = stage.autoscaling_config or stage.replicas
    if isinstance(config, AutoscalingConfig | ReplicaRange) and demand is not None:
        return max(1, config.min_replicas), config.max_replicas
    # At least one, because a stage scaled to zero needs room, too.
    count = max(1, stage.initial_count)
    return count, count


def problem_of(
    nodes: Iterable[Node],
    asks: Iterable[ReplicaRequest],
    running: Iterable[PlacedReplica] = (),
) -> Problem:
    """Return the placement problem of the requested models."""
    nodes = list(nodes)
    names = [node.name for node in nodes]
    hosts = tuple(Host(node.name, _devices(node), node.bandwidth) for node in nodes)
    kinds = {d.kind for host in hosts for d in host.devices} - {CPU}
    # Omit models scaled to zero and multi-GPU replicas: they are placed without a plan.
    asked = [ask for ask in asks if _is_planned(ask)]
    planned = {ask.name for ask in asked}
    whole = min((gpu.memory_bytes for node in nodes for gpu in node.gpus), default=0)
    return Problem(
        hosts,
        tuple(_model(ask, kinds, names, whole) for ask in asked),
        [
            (r.model, r.stage, device_name(r.node, r.gpus[0] if r.gpus else None))
            for r in running
            if r.model in planned
        ],
        balance=BALANCE,
    )


def _is_planned(ask: ReplicaRequest) -> bool:
    is_wanted = all(maximum > 0 for _, maximum in ask.counts)
    return is_wanted and all(need.gpus <= 1 for need in needs_of(ask.spec))


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


def _model(
    ask: ReplicaRequest, kinds: set[str], names: Sequence[str], whole: int
) -> ModelNeed:
    spec = ask.spec
    stages = zip(spec.stages, needs_of(spec), ask.counts, strict=True)
    return ModelNeed(
        ask.name,
        tuple(
            _stage(stage, need, counts, kinds, names, whole)
            for stage, need, counts in stages
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
    whole: int,
) -> StageNeed:
    seconds = (stage.item_ms or 0.0) / 1000
    of_gpu = whole if need.whole_gpus else need.gpu_memory_bytes
    allowed = frozenset(name for name in names if need.allows(name))
    return StageNeed(
        memory_bytes=of_gpu if need.gpus else need.memory_bytes,
        seconds=dict.fromkeys(kinds, seconds) if need.gpus else {CPU: seconds},
        out_bytes=round((stage.out_kb or 0.0) * 1024),
        min_replicas=counts[0],
        max_replicas=counts[1],
        # If none of the spec's machines exists, keep their names for the error text.
        nodes=(allowed or need.nodes) if need.nodes else frozenset(),
        width=1.0 if need.gpus else float(stage.threads * stage.ranks),
        cores=0.0 if need.gpus else need.cpus,
        per_device=counts[1],
    )


def plan_of(
    placement: Placement, versions: Mapping[str, str]
) -> dict[tuple[object, str], int]:
    """Return the planned number of replicas, for each post and machine."""
    found: Counter[tuple[object, str]] = Counter()
    for replica in placement.replicas:
        node = replica.device.rpartition("/")[0]
        found[(replica.model, versions[replica.model], replica.stage), node] += 1
    return dict(found)


def moves(
    plan: Mapping[tuple[Any, str], int], here: Mapping[str, tuple[object, str]]
) -> list[str]:
    """Return the replicas (of ``here``, by name) that the plan places elsewhere."""
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
    """Expected load of one stage under a plan."""

    model: str
    stage: int
    where: dict[str, int]
    busy: float  # fraction of time for which its busiest replica computes
    able: float  # rows/s that its replicas could compute if nothing else limited them


def outlook(problem: Problem, placement: Placement) -> list[StageOutlook]:
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
    """Return a model's slowest stage; None if no computing time is known."""
    mine = [s for s in stages if s.model == model and 0 < s.able < float("inf")]
    return min(mine, key=lambda stage: stage.able, default=None)


def in_words(placement: Placement) -> str:
    where = Counter(r.device.rpartition("/")[0] for r in placement.replicas)
    spread = ", ".join(f"{node} {count}" for node, count in sorted(where.items()))
    short = "".join(
        f"; {name} is short: {why}" for name, why in placement.unplaced.items()
    )
    gap = "no bound" if placement.gap == float("inf") else f"{placement.gap:.2%}"
    return f"replicas by machine: {spread} ({placement.solver}, gap {gap}){short}"
