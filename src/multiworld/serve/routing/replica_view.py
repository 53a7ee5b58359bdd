"""Replicas as one process sees them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from multiworld.serve.routing.load_balancer import HashRing
from multiworld.serve.wire.routing_table import Replica, ReplicaState, RoutingTable

KNOWN_SESSIONS = 4096  # maximum sessions whose home is cached, for repeated look-ups


class ReplicaView:
    """The routing table, and what this process knows of each replica."""

    def __init__(self) -> None:
        self.table = RoutingTable()
        self.connected: set[str] = set()  # replicas with an edge to this process
        # Connected replicas that sent nothing for ``SILENT_S``.
        self.silent: frozenset[str] = frozenset()
        # Draining replicas; connected ones remain after the table has dropped them.
        self._drained: set[str] = set()
        self._usable: dict[tuple[str, str, int], tuple[Replica, ...]] = {}
        self._rings: dict[tuple[str, str, int], HashRing] = {}
        self._homes: dict[tuple[str, str, int, str], str] = {}

    def table_changed(self, table: RoutingTable) -> None:
        self.table = table
        draining = {n for n in table.replicas if self.state(n) is ReplicaState.DRAINING}
        self._drained = draining | (self._drained & self.connected - {*table.replicas})
        self._forget()

    def _forget(self) -> None:
        self._usable.clear()
        self._rings.clear()
        self._homes.clear()

    def connect(self, name: str) -> None:
        self.connected.add(name)
        self._forget()

    def disconnect(self, name: str) -> None:
        self.connected.discard(name)
        self.silent -= {name}
        self._forget()

    def set_silent(self, names: Iterable[str]) -> None:
        silent = frozenset(names)
        if silent != self.silent:
            self.silent = silent
            self._forget()

    def state(self, name: str) -> ReplicaState | None:
        known = self.table.replicas.get(name)
        return None if known is None else known.state

    def is_leaving(self, name: str) -> bool:
        """Return whether a replica is draining, and may be shut down at any time."""
        return name in self._drained

    def is_usable(self, name: str) -> bool:
        """Return whether a replica may get new work: ready, connected, not silent."""
        is_ready = self.state(name) is ReplicaState.READY
        return is_ready and name in self.connected and name not in self.silent

    def usable(self, model: str, version: str, stage: int) -> tuple[Replica, ...]:
        key = model, version, stage
        found = self._usable.get(key)
        if found is None:
            replicas = self.table.stage(model, version, stage)
            found = tuple(r for r in replicas if self.is_usable(r.name))
            self._usable[key] = found
        return found

    def home(self, model: str, version: str, stage: int, session: str) -> str:
        """Return the usable replica that a session prefers; empty if none is usable."""
        key = model, version, stage
        found = self._homes.get((*key, session))
        if found is None:
            ring = self._rings.get(key)
            if ring is None:
                ring = self._rings[key] = HashRing(r.name for r in self.usable(*key))
            if len(self._homes) >= KNOWN_SESSIONS:
                self._homes.clear()
            found = self._homes[*key, session] = ring.home(session)
        return found

    def connected_at(self, model: str, version: str, stage: int) -> list[Replica]:
        """Return the connected replicas of a stage, in any state."""
        replicas = self.table.stage(model, version, stage)
        return [r for r in replicas if r.name in self.connected]

    def missing(self, model: str, version: str) -> list[int]:
        route = self.table.routes.get(model)
        stages = 0 if route is None else route.stages.get(version, 0)
        return [s for s in range(stages) if not self.usable(model, version, s)]

    def others(self, name: str) -> list[Replica]:
        """Return the other usable replicas of the same stage."""
        known = self.table.replicas.get(name)
        if known is None:
            return []
        usable = self.usable(known.model, known.version, known.stage)
        return [other for other in usable if other.name != name]
