"""Bookings of machines' resources by replicas. Pure.

Only ``restore`` and ``set_nodes`` can make bookings exceed a machine's resources.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from multiworld.errors import PlacementError
from multiworld.serve.machines.amounts import (
    Location,
    Need,
    Node,
    in_words,
    mib,
)

CLOSE = 1e-9  # tolerance for comparing cores


@dataclass(frozen=True, slots=True)
class Booking:
    """Resources of a replica; replicas of the same ``post`` are spread over nodes."""

    name: str
    post: object  # (model, version, stage)
    spot: Location
    need: Need


@dataclass(frozen=True, slots=True)
class Free:
    cpus: float
    memory_bytes: int
    # Free memory of each GPU, by its index.
    gpu_memory_bytes: dict[int, int] = field(default_factory=dict)
    used_gpus: frozenset[int] = frozenset()  # GPUs that a replica runs on
    whole_gpus: frozenset[int] = frozenset()  # GPUs that one replica has alone


class Bookings:
    """Bookings on all machines of a service, by the name of the replica."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: dict[str, Node] = {node.name: node for node in nodes}
        self.bookings: dict[str, Booking] = {}
        self._on: dict[str, dict[str, Booking]] = {}  # by node
        self._free: dict[str, Free] = {}  # cache, by node

    def copy(self) -> Bookings:
        other = Bookings(self.nodes.values())
        other.bookings = dict(self.bookings)
        other._on = {node: dict(here) for node, here in self._on.items()}
        other._free = dict(self._free)
        return other

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """Replace the machines; bookings on a removed one stay until released."""
        self.nodes = {node.name: node for node in nodes}
        self._free.clear()

    def book(self, name: str, post: object, spot: Location, need: Need) -> None:
        short = self.shortage(spot.node, need, spot.gpus)
        if short:
            raise PlacementError(
                f"{name} needs {in_words(need)}; {spot.node}: {short}",
                short={spot.node: short},
            )
        self.restore(name, post, spot, need)

    def restore(self, name: str, post: object, spot: Location, need: Need) -> None:
        """Book resources for a replica that already runs, whether or not it fits."""
        self.release(name)
        booking = Booking(name, post, spot, need)
        self.bookings[name] = booking
        self._on.setdefault(spot.node, {})[name] = booking
        self._free.pop(spot.node, None)

    def release(self, name: str) -> None:
        booking = self.bookings.pop(name, None)
        if booking is not None:
            here = self._on[booking.spot.node]
            del here[name]
            if not here:
                del self._on[booking.spot.node]
            self._free.pop(booking.spot.node, None)

    def on(self, node: str) -> list[Booking]:
        return list(self._on.get(node, {}).values())

    def count(self, node: str, post: object) -> int:
        return sum(b.post == post for b in self.on(node))

    def free(self, node: str) -> Free:
        if node not in self._free:
            self._free[node] = _free(self.nodes[node], self.on(node))
        return self._free[node]

    def shortage(self, node: str, need: Need, gpus: tuple[int, ...] = ()) -> str:
        """Return what a machine lacks for a replica (on ``gpus``); empty if it fits."""
        if node not in self.nodes:
            return "the machine has left the service"
        if not need.allows(node):
            return "the spec's `nodes:` does not name this machine"
        if self.nodes[node].cpus <= 0:
            return "it has no cores for replicas"
        free = self.free(node)
        short = []
        if need.cpus > free.cpus + CLOSE and need.cpus:
            short.append(f"{need.cpus - free.cpus:g} cpus short")
        if need.memory_bytes > free.memory_bytes and need.memory_bytes:
            short.append(f"{mib(need.memory_bytes - free.memory_bytes)} short")
        if need.gpus:
            short += _of_gpus(free, need, gpus)
        return ", ".join(short)


def _free(has: Node, taken: Sequence[Booking]) -> Free:
    return Free(
        has.cpus - sum(b.need.cpus for b in taken),
        has.memory_bytes - sum(b.need.memory_bytes for b in taken),
        {
            gpu.index: gpu.memory_bytes
            - sum(b.need.gpu_memory_bytes for b in taken if gpu.index in b.spot.gpus)
            for gpu in has.gpus
        },
        frozenset(gpu for b in taken for gpu in b.spot.gpus),
        frozenset(gpu for b in taken if b.need.whole_gpus for gpu in b.spot.gpus),
    )


def able_gpus(free: Free, need: Need) -> list[int]:
    """Return the GPUs that have room for a replica, those with most memory first."""
    left = free.gpu_memory_bytes
    found = [gpu for gpu in left if need.gpu in (None, gpu)]
    taken = free.used_gpus if need.whole_gpus else free.whole_gpus
    found = [gpu for gpu in found if gpu not in taken]
    if need.gpu_memory_bytes:
        found = [gpu for gpu in found if left[gpu] >= need.gpu_memory_bytes]
    return sorted(found, key=lambda gpu: (-left[gpu], gpu))


def _of_gpus(free: Free, need: Need, gpus: tuple[int, ...]) -> list[str]:
    left = free.gpu_memory_bytes
    if not left:
        return ["it has no GPU"]
    wanted = gpus or (() if need.gpu is None else (need.gpu,))
    for gpu in wanted:
        if gpu not in left:
            return [f"it has no GPU {gpu}, only {', '.join(map(str, left))}"]
    able = [gpu for gpu in able_gpus(free, need) if not wanted or gpu in wanted]
    if len(able) >= need.gpus:
        return []
    available = max(left[gpu] for gpu in wanted or left)
    if need.gpus == 1 and need.gpu_memory_bytes > available:
        return [f"{mib(need.gpu_memory_bytes - available)} of GPU memory short"]
    if need.gpus == 1:
        return ["no GPU that it may use has room"]
    have = "has" if len(able) == 1 else "have"
    return [f"only {len(able)} of the {need.gpus} GPUs needed {have} room"]
