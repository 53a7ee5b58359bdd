"""What is to be placed, where it may go, and an answer. Pure.

A replica takes memory of one device for as long as it is there, and seconds of it
for each item. A device gives ``utilisation`` of each second; replicas share it. What
counts, in this order: the demand that is met, by weight; then what the used devices
cost, what moving costs, and that there are few replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Device:
    """Something that replicas run on.

    Attributes:
        name: Unique in the problem.
        kind: What speed depends on: "cpu", "a100" …
        memory_bytes: What its replicas may take together.
        price: Per hour, from the first replica on it.
        capacity: How many replicas' worth of its time it has: a CPU's cores, one for a
            GPU, which computes for one at a time.
    """

    name: str
    kind: str
    memory_bytes: int
    price: float = 1.0
    capacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Node:
    """A machine: it fails as a whole.

    Attributes:
        bandwidth: Bytes a second that it can send to other nodes; None: no limit.
    """

    name: str
    devices: tuple[Device, ...]
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class StageNeed:
    """One stage of a model.

    Attributes:
        memory_bytes: What a replica takes, weights and activations.
        seconds: Of a device for an item, by the device's kind; it cannot run elsewhere.
        out_bytes: What it hands on for an item.
        least, most: Replicas. Two or more are put on two nodes or more.
        nodes: Where it may go; empty: anywhere.
        width: Of a device's capacity while it computes: its threads.
        cores: Of a device's capacity that a replica keeps for itself.
        per_device: Most replicas on one device.
    """

    memory_bytes: int
    seconds: Mapping[str, float]
    out_bytes: int = 0
    least: int = 1
    most: int | None = None
    nodes: frozenset[str] = frozenset()
    width: float = 1.0
    cores: float = 0.0
    per_device: int = 1


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """A model, and what is asked of it.

    Attributes:
        demand: Items a second.
        weight: What an item a second of it is worth, beside others.
        latency_s: An item's way through the stages may take no longer than this without
            waiting; None: as long as it takes.
    """

    name: str
    stages: tuple[StageNeed, ...]
    demand: float
    weight: float = 1.0
    latency_s: float | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a placement is decided from.

    Attributes:
        running: The replicas there are: model, stage and device of each.
        move_cost: Per hour, for each replica that runs nowhere like it now.
        hop_s: From a stage to the next.
        utilisation: The share of a device's time that may be planned.
        balance: What it costs per hour that the fullest device has one replica for
            each unit of its capacity; 0: it does not matter how full one is.
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
    """One replica, and how many items a second are planned for it."""

    model: str
    stage: int
    device: str
    rate: float


@dataclass(frozen=True, slots=True)
class Placement:
    """An answer.

    Attributes:
        replicas: In the order of models and stages.
        served: Items a second, by model.
        value: What the objective says; higher is better. See ``objective``.
        bound: No placement is better than this; infinity if nobody knows.
        solver: Who found it.
        unplaced: Why something has no place, by model: for people.
    """

    replicas: tuple[Replica, ...]
    served: Mapping[str, float]
    value: float
    bound: float
    solver: str
    unplaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """How much better than this the best can be, as a share of the bound."""
        if self.bound in (float("inf"), 0.0):
            return float("inf") if self.bound else 0.0
        return max(0.0, (self.bound - self.value) / abs(self.bound))
