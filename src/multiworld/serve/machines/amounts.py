"""Resources of a machine, and needs of a replica. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from multiworld.config import MIB
from multiworld.serve.spec.schema import ModelSpec


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of a machine; ``kind`` is its model, as the driver names it."""

    index: int
    kind: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Node:
    """A machine, or the part of it that replicas may use."""

    name: str
    cpus: float
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    address: str = ""  # only for display
    key: str = ""  # the launcher's name for it
    price: float = 0.0  # per hour while a replica uses it; 0 if it is paid for anyway
    bandwidth: float | None = None  # bytes per second sent to others; None: no limit
    # Time of a matmul in bfloat16 relative to float32; None: not measured.
    bfloat16: float | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """Resources that one replica takes, all its ranks together."""

    # Zero: not declared in the spec, so neither booked nor limited.
    cpus: float = 0.0
    memory_bytes: int = 0
    gpus: int = 0  # 0: it runs on the CPU
    gpu: int | None = None  # index of the GPU it must have; None: any
    gpu_memory_bytes: int = 0  # on each of its GPUs
    whole_gpus: bool = False  # True: it shares its GPUs with no other replica
    nodes: frozenset[str] = frozenset()  # names or patterns of machines; empty: any
    ranks: int = 1

    def allows(self, node: str) -> bool:
        """Return whether the replica may run on a machine (patterns: * and ?)."""
        return not self.nodes or any(fnmatchcase(node, name) for name in self.nodes)


@dataclass(frozen=True, slots=True)
class Location:
    """Location of a replica: a machine, and the indexes of its GPUs there."""

    node: str
    gpus: tuple[int, ...] = ()


def needs_of(model: ModelSpec) -> list[Need]:
    """Return the needs of one replica of each stage, as the spec declares them."""
    found = []
    for number, stage in enumerate(model.stages):
        kind, _, index = stage.device.partition(":")
        on_gpu = kind == "cuda"
        memory_mb, gpu_memory_mb = stage.memory_mb or 0.0, stage.gpu_memory_mb or 0.0
        if memory_mb:
            is_last = number == len(model.stages) - 1
            memory_mb += _generation_mb(model, is_last=is_last)  # KV blocks and caches
        found.append(
            Need(
                cpus=(stage.cpus or 0.0) * stage.ranks,
                memory_bytes=round(memory_mb * MIB) * stage.ranks,
                gpus=model.engine_gpus if on_gpu else 0,
                gpu=int(index) if index else None,
                gpu_memory_bytes=round(gpu_memory_mb * MIB) * stage.ranks,
                # An engine takes nearly all GPU memory unless the spec limits it.
                whole_gpus=on_gpu and model.engine is not None and not gpu_memory_mb,
                nodes=frozenset(stage.nodes),
                ranks=stage.ranks,
            )
        )
    return found


def _generation_mb(model: ModelSpec, *, is_last: bool) -> float:
    """Return a replica's MiB for KV blocks, cached prefixes and activation log."""
    spec = model.generation
    if spec is None or model.engine is not None:
        return 0.0
    prefixes_mb = spec.prefix_cache_memory_mb if spec.enable_prefix_caching else 0.0
    log_mb = 0.0 if is_last else spec.backup_memory_mb
    return spec.kv_cache_memory_mb + prefixes_mb + log_mb


def in_words(need: Need) -> str:
    parts = []
    if need.cpus:
        parts.append(f"{need.cpus:g} cpus")
    if need.memory_bytes:
        parts.append(f"{mib(need.memory_bytes)} of memory")
    if need.gpus:
        parts.append(_gpus_in_words(need))
    if need.nodes:
        parts.append(f"one of {', '.join(sorted(need.nodes))}")
    return " and ".join(parts) or "nothing that is booked"


def _gpus_in_words(need: Need) -> str:
    size = f" with {mib(need.gpu_memory_bytes)}" if need.gpu_memory_bytes else ""
    alone = " for itself" if need.whole_gpus else ""
    if need.gpus > 1:
        return f"{need.gpus} GPUs{size}{' each' if size else ''}{alone}"
    return f"{'a GPU' if need.gpu is None else f'GPU {need.gpu}'}{size}{alone}"


def mib(size: float) -> str:
    return f"{size / MIB:,.0f} MiB"
