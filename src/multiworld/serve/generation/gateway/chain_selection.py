"""The choice of the replicas that compute a stream, at one gateway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from multiworld.serve.core.load_balancer import affinity
from multiworld.serve.generation.gateway.stream import Chain, Stream
from multiworld.serve.generation.prefixes import TOKENS_PER_STREAM, PrefixRoutes
from multiworld.serve.transport.routing_table import (
    Replica,
    ReplicaState,
    RoutingTable,
)

PREFIX_BLOCK, PREFIX_TOKENS = 64, 4096
"""Tokens of a block of a prefix, and of the longest one, for the choice of a chain."""

NEW_S = 60.0
"""Seconds after which a replica is not new any more, so that streams are only placed on
it, and not moved to it."""


HOME = 2
"""Streams by which a replica must be busier than another, so that a stream does not go
where its session prefers."""

SPLIT = 4
"""Streams by which another replica must be busier, so that one that gets steps of other
replicas of stage 0 gets those of one more. Each has a step of its own for every token,
which costs about as much as nine tokens."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """A new replica, and the busiest one of its stage.

    Attributes:
        busiest: Name of the busiest one.
        new: Name of the new one.
        surplus: Streams that the new one should take from it.
    """

    busiest: str
    new: str
    surplus: int


def surplus_of(most: int, least: int) -> int:
    """Return how many streams a new replica should take from a busy one.

    Args:
        most: Streams of the busy one.
        least: Streams of the new one.
    """
    is_uneven = most - least >= max(2, most / 2)
    return (most - least) // 2 if is_uneven else 0


class Schedulers:
    """The replicas of stage 0 whose steps each replica computes."""

    def __init__(self) -> None:
        self._of: dict[str, Counter[str]] = {}

    def enter(self, chain: Sequence[str]) -> None:
        """Record that a chain computes one more stream."""
        for name in chain[1:]:
            self._of.setdefault(name, Counter())[chain[0]] += 1

    def leave(self, chain: Sequence[str]) -> None:
        """Record that a chain computes one stream less."""
        for name in chain[1:]:
            known = self._of[name]
            known[chain[0]] -= 1
            if not known[chain[0]]:
                del known[chain[0]]
            if not known:
                del self._of[name]

    def is_split(self, name: str, first: str) -> bool:
        """Tell whether a replica has steps, but none of a certain replica of stage 0.

        Args:
            name: The replica.
            first: The one of stage 0.
        """
        return name in self._of and first not in self._of[name]


class Chains:
    """The replicas, as one gateway sees them, and its streams at each.

    Args:
        connected: Replicas that the gateway is connected to.
        chance: Returns a random number, for the choice among equals.

    Attributes:
        silent: Replicas that have not been heard of.
        load: Streams at each replica, and those that are being moved to it.
    """

    def __init__(self, connected: Container[str], chance: Callable[[], float]) -> None:
        self._connected, self._chance = connected, chance
        self._table = RoutingTable()
        self._prefix_routes = PrefixRoutes()
        self._ready_since: dict[str, float] = {}
        self._schedulers = Schedulers()
        self.silent: set[str] = set()
        self.load: Counter[str] = Counter()

    def table_changed(self, table: RoutingTable, now: float) -> None:
        """Use a new routing table.

        Args:
            table: The table.
            now: Monotonic time in seconds.
        """
        self._table = table
        self._ready_since = {
            name: self._ready_since.get(name, now)
            for name, replica in table.replicas.items()
            if replica.state is ReplicaState.READY
        }

    def enter(self, stream: Stream) -> None:
        """Record that a stream is computed by its chain from now on."""
        self._prefix_routes.record(stream.prefixes, stream.chain)
        self._schedulers.enter(stream.chain)
        self.load.update(stream.chain)

    def leave(self, chain: Sequence[str]) -> None:
        """Record that a stream is not computed by a chain any more."""
        self._schedulers.leave(chain)
        self.load.subtract(chain)

    def release(self, replicas: Iterable[str]) -> None:
        """Record that a stream is not moved to some replicas."""
        self.load.subtract(replicas)

    def choose(self, stream: Stream) -> Chain | None:
        """Return a replica of each stage for a stream that waits for a chain.

        Those that keep the attempt before stay; others are the least loaded.

        Returns:
            The chain; None if a stage has no replica.
        """
        route = self._table.routes.get(stream.model)
        if route is None:
            return None
        versions = [stream.version]
        if not stream.via and route.version != stream.version:
            versions.append(route.version)  # the version that it began with may be gone
        for version in versions:
            found = self._complete(stream, version, stream.kept)
            if found is not None:
                return found
        return None

    def leaving(self, stream: Stream) -> Chain | None:
        """Return a chain without the replicas that drain.

        Returns:
            The chain, of another version if that has the same weights; None if no
            replica drains, or there is no other chain.
        """
        if not self.is_leaving(stream):
            return None
        replicas = self._table.replicas
        staying = tuple(
            name if self._state(name) is ReplicaState.READY else ""
            for name in stream.chain
        )
        found = self._complete(stream, stream.version, staying, is_ready=True)
        route = self._table.routes.get(stream.model)
        if found is not None or route is None or route.version == stream.version:
            return found
        weights = {replicas[name].weights for name in stream.chain if name in replicas}
        found = self._complete(stream, route.version, (), is_ready=True)
        if found is None or "" in weights:
            return None
        weights |= {replicas[name].weights for name in found.replicas}
        return found if len(weights) == 1 else None

    def is_leaving(self, stream: Stream) -> bool:
        """Tell whether a replica of a stream's chain drains."""
        return any(self._state(n) is ReplicaState.DRAINING for n in stream.chain)

    def around(self, stream: Stream, chain: Chain, replica: str) -> Chain | None:
        """Return a chain with another replica in the place of one of its own.

        Args:
            stream: The stream that the chain is for.
            chain: The chain.
            replica: The replica.

        Returns:
            The chain; None if no other replica is usable.
        """
        kept = tuple("" if name == replica else name for name in chain.replicas)
        return self._complete(
            stream, chain.version, kept, is_ready=True, without=replica
        )

    def uneven(self, now: float) -> Iterator[Uneven]:
        """Yield the new replicas that have less to do than others of their stage.

        Args:
            now: Monotonic time in seconds.
        """
        for name, since in self._ready_since.items():
            if now - since > NEW_S or not self._is_usable(name):
                continue
            new = self._table.replicas[name]
            others = self._table.stage(new.model, new.version, new.stage)
            busiest = max(others, key=lambda r: self.load[r.name]).name
            surplus = surplus_of(self.load[busiest], self.load[name])
            if surplus:
                yield Uneven(busiest, name, surplus)

    def is_there(self, chain: Chain) -> bool:
        """Tell whether all replicas of a chain are still there."""
        known = self._table.replicas
        return all(n in known and n in self._connected for n in chain.replicas)

    def others_of(self, replica: str) -> bool:
        """Tell whether another replica of the same stage is usable."""
        known = self._table.replicas.get(replica)
        return known is not None and any(
            self._is_usable(other.name)
            for other in self._table.stage(known.model, known.version, known.stage)
        )

    def _state(self, name: str) -> ReplicaState | None:
        known = self._table.replicas.get(name)
        return None if known is None else known.state

    def _is_usable(self, name: str) -> bool:
        is_ready = self._state(name) is ReplicaState.READY
        return is_ready and name in self._connected and name not in self.silent

    def _complete(
        self,
        stream: Stream,
        version: str,
        kept: Sequence[str],
        *,
        is_ready: bool = False,
        without: str = "",
    ) -> Chain | None:
        """Return a chain with the replicas that are kept, as far as they can be.

        Args:
            stream: The stream.
            version: Version of the chain.
            kept: Replicas to keep, by stage; empty names are chosen.
            is_ready: Whether all of it must be usable now.
            without: Replica that is not chosen; empty: any may be.
        """
        route = self._table.routes.get(stream.model)
        if route is None:
            return None  # the model was removed
        found: tuple[str, ...] = ()
        for stage in range(route.stages.get(version, 0)):
            name = self._kept(kept, version, stage)
            name = name or self._replica(stream, version, stage, found[:1], without)
            if name is None:
                return None
            found += (name,)
        if not found:
            return None
        if is_ready and not all(self._is_usable(name) for name in found):
            return None
        return Chain(version, found)

    def _kept(self, kept: Sequence[str], version: str, stage: int) -> str | None:
        """Return the replica of a stage that is to be kept, if it can."""
        name = kept[stage] if stage < len(kept) else ""
        known = self._table.replicas.get(name)
        is_there = name in self._connected and name not in self.silent
        is_same = known is not None and known.version == version
        return name if is_there and is_same else None

    def _replica(
        self,
        stream: Stream,
        version: str,
        stage: int,
        first: Sequence[str],
        without: str,
    ) -> str | None:
        wanted = stream.via.get(stage)
        found = [
            replica
            for replica in self._table.stage(stream.model, version, stage)
            if replica.name in self._connected
            and replica.name != without
            and wanted in (None, replica.name)
        ]
        usable = [r for r in found if r.state is ReplicaState.READY]
        if stream.via:  # a probe also goes through others that are starting
            usable = usable or found
        usable = [r for r in usable if r.name not in self.silent] or usable
        alike = stream.fingerprints.get(stage)
        usable = [r for r in usable if alike in (None, r.fingerprint)] or usable
        known = self._prefix_routes.matches(stream.prefixes, stage)
        home = ""
        if stream.session and usable:
            home = max((r.name for r in usable), key=partial(affinity, stream.session))

        def cost(replica: Replica) -> tuple[float, float]:
            saved = known.get(replica.name, 0) * PREFIX_BLOCK / TOKENS_PER_STREAM
            saved += HOME * (replica.name == home)
            splits = any(self._schedulers.is_split(replica.name, f) for f in first)
            return self.load[replica.name] + SPLIT * splits - saved, self._chance()

        return min(usable, key=cost).name if usable else None
