"""Placement problem and its solution. Pure.

A replica occupies memory of one device, and seconds of the device for each item. A
device offers ``utilisation`` of each second; its replicas share that. The aims, in this
order: meet the demand, by weight; then a low price of the used devices, few moves, and
few replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Device:
    """Device that replicas run on.

    Attributes:
        kind: Kind that computing times depend on: "cpu", "a100" …
        price: Price per hour, charged from the first replica on it.
        capacity: Number of replicas that it computes for at the same time: the cores of
            a CPU, 1 for a GPU.
    """

    name: str
    kind: str
    memory_bytes: int
    price: float = 1.0
    capacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Node:
    """A machine; it fails as a whole. `bandwidth` is in bytes sent per second."""

    name: str
    devices: tuple[Device, ...]
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Needs of one stage of a model.

    Attributes:
        memory_bytes: Memory of a replica: weights and activations.
        seconds: Seconds of a device for one item, by the device's kind. It cannot run
            on other kinds.
        out_bytes: Bytes that it sends to the next stage for one item.
        min_replicas: Minimum number of replicas. Two or more are spread over at least
            two nodes.
        max_replicas: Maximum number of replicas; None for no limit.
        nodes: Names of the nodes it may run on; empty for any.
        width: Device capacity that a replica takes while it computes: its threads.
        cores: Device capacity that a replica reserves for itself.
        per_device: Maximum number of replicas on one device.
    """

    memory_bytes: int
    seconds: Mapping[str, float]
    out_bytes: int = 0
    min_replicas: int = 1
    max_replicas: int | None = None
    nodes: frozenset[str] = frozenset()
    width: float = 1.0
    cores: float = 0.0
    per_device: int = 1


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """A model and the demand for it, in items per second.

    Attributes:
        weight: Value of serving its demand, relative to other models.
        latency_s: Maximum seconds for an item through all stages, without waiting; None
            for no limit.
    """

    name: str
    stages: tuple[StageNeed, ...]
    demand: float
    weight: float = 1.0
    latency_s: float | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Complete input of a placement.

    Attributes:
        running: Model, stage and device of each running replica.
        move_cost: Cost per hour of each replica that does not run there already.
        hop_s: Seconds from one stage to the next.
        utilisation: Share of a device's time that may be planned.
        balance: Cost per hour of the fullest device, for each replica per unit of its
            capacity; 0 ignores fullness.
    """

    nodes: tuple[Node, ...]
    models: tuple[ModelNeed, ...]
    running: Collection[tuple[str, int, str]] = ()
    move_cost: float = 0.05
    hop_s: float = 0.001
    utilisation: float = 0.8
    balance: float = 0.0


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica, and its planned rate in items per second."""

    model: str
    stage: int
    device: str
    rate: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Solution of a problem; replicas are in the order of models and stages.

    Attributes:
        served: Items per second, by model.
        value: Value of the objective (``model.objective``); higher is better.
        bound: Upper bound of the value of any placement; infinity if unknown.
        unplaced: Why a model is not served in full, by model, for people.
    """

    replicas: tuple[Replica, ...]
    served: Mapping[str, float]
    value: float
    bound: float
    solver: str
    unplaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Maximum possible improvement, as a share of the bound."""
        if self.bound in (float("inf"), 0.0):
            return float("inf") if self.bound else 0.0
        return max(0.0, (self.bound - self.value) / abs(self.bound))


def in_mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
