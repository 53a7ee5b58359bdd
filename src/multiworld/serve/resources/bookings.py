"""Who has booked what on which machine. Pure.

A booking that does not fit is refused, so that what is booked never exceeds what there
is. Only ``restore`` enters one unasked: of a replica that runs already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from multiworld.errors import PlacementError
from multiworld.serve.resources.amounts import (
    Location,
    Need,
    Node,
    in_words,
    listed,
    mib,
)

CLOSE = 1e-9


@dataclass(frozen=True, slots=True)
class Booking:
    """What a replica holds.

    Attributes:
        post: What it is a replica of; for spreading.
    """

    name: str
    post: object
    spot: Location
    need: Need


@dataclass(frozen=True, slots=True)
class Free:
    """What is left of a machine; memory of GPUs by their number."""

    cpus: float
    memory_bytes: int
    gpu_memory_bytes: dict[int, int] = field(default_factory=dict)


class Bookings:
    """The account of all machines of a service."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: dict[str, Node] = {node.name: node for node in nodes}
        self.bookings: dict[str, Booking] = {}

    def copy(self) -> Bookings:
        """Return another one with the same entries, to try things out."""
        other = Bookings(self.nodes.values())
        other.bookings = dict(self.bookings)
        return other

    def set_nodes(self, nodes: Iterable[Node]) -> None:
        """Replace the machines; bookings on one that is gone stay until released."""
        self.nodes = {node.name: node for node in nodes}

    def book(self, name: str, post: object, spot: Location, need: Need) -> None:
        """Book what a replica needs.

        Raises:
            PlacementError: It does not fit there; the message says what is short.
        """
        short = self.shortage(spot.node, need, spot.gpu)
        if short:
            raise PlacementError(
                f"{name} needs {in_words(need)}; {spot.node}: {short}",
                short={spot.node: short},
            )
        self.restore(name, post, spot, need)

    def restore(self, name: str, post: object, spot: Location, need: Need) -> None:
        """Enter a replica that runs already, whether it fits or not."""
        self.bookings[name] = Booking(name, post, spot, need)

    def release(self, name: str) -> None:
        """Give back what a replica held; nothing happens if it held nothing."""
        self.bookings.pop(name, None)

    def on(self, node: str) -> list[Booking]:
        """Return what is booked on a machine."""
        return [b for b in self.bookings.values() if b.spot.node == node]

    def count(self, node: str, post: object) -> int:
        """Return how many replicas of a post are on a machine."""
        return sum(b.post == post for b in self.on(node))

    def free(self, node: str) -> Free:
        """Return what is left of a machine."""
        has, taken = self.nodes[node], self.on(node)
        return Free(
            has.cpus - sum(b.need.cpus for b in taken),
            has.memory_bytes - sum(b.need.memory_bytes for b in taken),
            {
                gpu.index: gpu.memory_bytes
                - sum(b.need.gpu_memory_bytes for b in taken if b.spot.gpu == gpu.index)
                for gpu in has.gpus
            },
        )

    def shortage(self, node: str, need: Need, gpu: int | None = None) -> str:
        """Say what a machine lacks for a replica; empty if it fits.

        Args:
            gpu: The GPU that was chosen; None: any will do.
        """
        if node not in self.nodes:
            return "it is not there"
        if not need.allows(node):
            return "the spec's `nodes:` does not name it"
        if self.nodes[node].cpus <= 0:
            return "it has no cores for replicas"
        free = self.free(node)
        short = []
        if need.cpus > free.cpus + CLOSE and need.cpus:
            short.append(f"{need.cpus - free.cpus:g} cpus short")
        if need.memory_bytes > free.memory_bytes and need.memory_bytes:
            short.append(f"{mib(need.memory_bytes - free.memory_bytes)} short")
        if need.on_gpu:
            wanted = need.gpu if gpu is None else gpu
            short += _of_gpus(free.gpu_memory_bytes, need, wanted)
        return ", ".join(short)


def _of_gpus(free: dict[int, int], need: Need, wanted: int | None) -> list[str]:
    if not free:
        return ["it has no GPU"]
    if wanted is not None and wanted not in free:
        return [f"it has no GPU {wanted}, only {listed([str(n) for n in free])}"]
    most = max(free.values()) if wanted is None else free[wanted]
    if need.gpu_memory_bytes and need.gpu_memory_bytes > most:
        return [f"{mib(need.gpu_memory_bytes - most)} of GPU memory short"]
    return []
