"""What a machine has, and what a replica needs of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from multiworld.serve.spec.schema import ModelSpec

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device of a machine; ``index`` is its number there."""

    index: int
    kind: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, as far as replicas may use it.

    Attributes:
        cpus: Cores.
        memory_bytes: Of main memory.
        address: Where it is reached; for people.
        key: What the launcher knows it by.
        price: Per hour, if any of it is used; 0: it is there anyway.
        bandwidth: Bytes a second that it can send to others; None: no limit.
    """

    name: str
    cpus: float
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    address: str = ""
    key: str = ""
    price: float = 0.0
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What one replica takes, all of its ranks together.

    What was not declared is zero: it is not booked, and nothing limits it.

    Attributes:
        on_gpu: Whether it needs a GPU at all.
        gpu: The number of the only one it may have; None: any.
        nodes: The machines it may run on; empty: any.
        ranks: Its processes.
    """

    cpus: float = 0.0
    memory_bytes: int = 0
    on_gpu: bool = False
    gpu: int | None = None
    gpu_memory_bytes: int = 0
    nodes: frozenset[str] = frozenset()
    ranks: int = 1

    def allows(self, node: str) -> bool:
        """Tell whether it may run on a machine; names may have * and ? in them."""
        return not self.nodes or any(fnmatchcase(node, name) for name in self.nodes)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a replica runs; ``gpu`` is None on the CPU."""

    node: str
    gpu: int | None = None


def needs_of(model: ModelSpec) -> list[Need]:
    """Return what a replica of each stage needs, as the spec declares it."""
    found = []
    for stage in model.stages:
        kind, _, index = stage.device.partition(":")
        found.append(
            Need(
                cpus=(stage.cpus or 0.0) * stage.ranks,
                memory_bytes=round((stage.memory_mb or 0.0) * MIB) * stage.ranks,
                on_gpu=kind == "cuda",
                gpu=int(index) if index else None,
                gpu_memory_bytes=round((stage.gpu_memory_mb or 0.0) * MIB)
                * stage.ranks,
                nodes=frozenset(stage.nodes),
                ranks=stage.ranks,
            )
        )
    return found


def in_words(need: Need) -> str:
    """Return what is needed, for people."""
    parts = []
    if need.cpus:
        parts.append(f"{need.cpus:g} cpus")
    if need.memory_bytes:
        parts.append(f"{mib(need.memory_bytes)} of memory")
    if need.on_gpu:
        size = f" with {mib(need.gpu_memory_bytes)}" if need.gpu_memory_bytes else ""
        number = "" if need.gpu is None else f" {need.gpu}"
        parts.append(f"GPU{number}{size}" if number else f"a GPU{size}")
    if need.nodes:
        parts.append(f"one of {listed(sorted(need.nodes))}")
    return " and ".join(parts) or "nothing that is booked"


def mib(size: float) -> str:
    """Return a size for people."""
    return f"{size / MIB:,.0f} MiB"


def listed(names: Sequence[str]) -> str:
    """Return names for people."""
    return ", ".join(names) or "none"
