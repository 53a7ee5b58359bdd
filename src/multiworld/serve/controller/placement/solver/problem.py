"""Placement problem and its solution. Pure.

A replica occupies memory on one device, and device time for each item. The objectives,
in this order: meet the demand, by weight; then cheap devices, few moves, few replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

GIB = 1024**3
UTILISATION = 0.8  # share of a device's time that may be planned


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    kind: str  # determines computing times: "cpu", "a100" …
    memory_bytes: int
    price: float = 1.0  # per hour, charged from the first replica on
    # Replicas that compute concurrently: cores of a CPU, 1 for a GPU.
    capacity: float = 1.0


@dataclass(frozen=True, slots=True)
class Node:
    """A machine; it fails as a whole. ``bandwidth`` is in bytes sent per second."""

    name: str
    devices: tuple[Device, ...]
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class StageNeed:
    """Needs of one stage of a model."""

    memory_bytes: int  # of a replica: weights and activations
    # Device seconds per item, by kind of device; other kinds cannot be used.
    seconds: Mapping[str, float]
    out_bytes: int = 0  # bytes sent to the next stage for one item
    min_replicas: int = 1  # two or more are spread over at least two nodes
    max_replicas: int | None = None  # None: no limit
    nodes: frozenset[str] = frozenset()  # nodes it may run on; empty: any
    width: float = 1.0  # device capacity of a computing replica: its threads
    cores: float = 0.0  # device capacity that a replica reserves for itself
    per_device: int = 1  # maximum number of replicas on one device


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """A model and the demand for it, in items per second."""

    name: str
    stages: tuple[StageNeed, ...]
    demand: float
    weight: float = 1.0  # value of serving its demand, relative to other models
    # Maximum seconds of an item in all stages, without waiting; None: no limit.
    latency_s: float | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    nodes: tuple[Node, ...]
    models: tuple[ModelNeed, ...]
    # Model, stage and device of each running replica.
    running: Collection[tuple[str, int, str]] = ()
    move_cost: float = 0.05  # cost per hour of a replica that is new on its device
    hop_s: float = 0.001  # time from one stage to the next
    utilisation: float = UTILISATION  # share of a device's time that may be planned
    # Cost per hour of the fullest device's load (``model.fullest``); 0: none.
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
    """Solution of a problem; replicas are in the order of models and stages."""

    replicas: tuple[Replica, ...]
    served: Mapping[str, float]  # items per second, by model
    # Value of ``model.objective``, with demands capped by ``within_reach``; higher is
    # better.
    value: float
    bound: float  # upper bound of any placement's value; infinity if unknown
    solver: str
    # By model that is not served in full: the reasons, in words.
    unplaced: Mapping[str, str] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Maximum possible improvement, as a share of the bound."""
        if self.bound in (float("inf"), 0.0):
            return float("inf") if self.bound else 0.0
        return max(0.0, (self.bound - self.value) / abs(self.bound))
