"""Selection of the replicas that compute a stream, at one gateway. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from multiworld.serve.gateway.streams.stream import Chain, Stream
from multiworld.serve.routing.replica_view import ReplicaView
from multiworld.serve.text.prefixes import TOKENS_PER_STREAM, PrefixRoutes
from multiworld.serve.wire.routing_table import Replica, ReplicaState

# Tokens per block of a prefix, and maximum tokens of a prefix used for routing.
PREFIX_BLOCK, PREFIX_TOKENS = 64, 4096
# Seconds for which a replica counts as new. Running streams move from busier replicas
# to a new replica; later, the replica gets only new streams.
NEW_S = 60.0
# A session's preferred replica gets the session's next stream unless the load of that
# replica exceeds another replica's load by more than this many streams.
HOME = 2
# A replica that computes the steps of one stage-0 replica gets streams of a second
# stage-0 replica only if other replicas have at least this many streams more. Each
# stage-0 replica sends its own step for every token, and a step costs about as much as
# nine tokens.
SPLIT = 4
# Penalty for a replica that lacked a connection to its neighbour in a chain: number of
# streams added to its load, and seconds for which they are added.
AVOIDED_LOAD, AVOIDED_S = 8, 10.0
# Maximum number of random replicas of a stage to compare for a new stream.
COMPARED = 64


@dataclass(frozen=True, slots=True)
class Uneven:
    """A new replica, and the busiest replica of its stage."""

    busiest: str
    new: str
    surplus: int  # number of streams that the new replica should take over


def surplus_of(highest: int, lowest: int) -> int:
    is_uneven = highest - lowest >= max(2, highest / 2)
    return (highest - lowest) // 2 if is_uneven else 0


class StepSources:
    """The stage-0 replicas that send steps to each replica of a later stage."""

    def __init__(self) -> None:
        self._of: dict[str, Counter[str]] = {}

    def enter(self, chain: Sequence[str]) -> None:
        for name in chain[1:]:
            self._of.setdefault(name, Counter())[chain[0]] += 1

    def leave(self, chain: Sequence[str]) -> None:
        for name in chain[1:]:
            known = self._of[name]
            known[chain[0]] -= 1
            if not known[chain[0]]:
                del known[chain[0]]
            if not known:
                del self._of[name]

    def is_split(self, name: str, first: str) -> bool:
        """Return whether a replica gets steps from others, but not from ``first``."""
        return name in self._of and first not in self._of[name]


class ChainSelection:
    """Chooses replica chains by the load of each replica."""

    def __init__(self, view: ReplicaView, chance: Callable[[], float]) -> None:
        self.view, self._chance = view, chance
        self._prefix_routes = PrefixRoutes()
        self._ready_since: dict[str, float] = {}
        self._new: dict[str, float] = {}
        self.draining: tuple[str, ...] = ()
        self.sources = StepSources()
        # Number of streams at each replica, including streams being moved to it.
        self.load: Counter[str] = Counter()
        # Time until which a replica that lacked a connection to another replica is
        # avoided, by name.
        self._avoided_until: dict[str, float] = {}

    def avoid(self, replicas: Sequence[str], now: float) -> bool:
        """Avoid replicas that lack a connection; False if all were already avoided."""
        is_known = all(name in self._avoided_until for name in replicas)
        self._avoided_until.update(dict.fromkeys(replicas, now + AVOIDED_S))
        return not is_known

    def tick(self, now: float) -> None:
        """Stop avoiding replicas that have been avoided for ``AVOIDED_S``."""
        over = [name for name, until in self._avoided_until.items() if until <= now]
        for name in over:
            del self._avoided_until[name]

    def table_changed(self, now: float) -> None:
        replicas = self.view.table.replicas
        self._ready_since = {
            name: self._ready_since.get(name, now)
            for name, replica in replicas.items()
            if replica.state is ReplicaState.READY
        }
        self._new = dict(self._ready_since)
        states = ((name, replica.state) for name, replica in replicas.items())
        self.draining = tuple(n for n, s in states if s is ReplicaState.DRAINING)
        for name in self.load.keys() - replicas.keys():
            if not self.load[name]:
                del self.load[name]  # the name is never used again

    def enter(self, stream: Stream) -> None:
        self._prefix_routes.record(stream.prefixes, stream.chain)
        self.sources.enter(stream.chain)
        self.load.update(stream.chain)

    def leave(self, chain: Sequence[str]) -> None:
        self.sources.leave(chain)
        self.load.subtract(chain)

    def choose(self, stream: Stream, avoided: Collection[str] = ()) -> Chain | None:
        """Return a chain for a waiting stream; None if a stage has no replica."""
        # ``avoided``: replicas to choose only if a stage has no others. Replicas that
        # keep the KV of an earlier attempt are reused; for other stages, the replica
        # with the least load is chosen.
        route = self.view.table.routes.get(stream.model)
        if route is None:
            return None
        versions = [stream.version]
        if not stream.via and route.version != stream.version:
            versions.append(route.version)  # the stream's own version may be gone
        for version in versions:
            found = None
            if avoided:
                found = self._complete(stream, version, stream.kept, without=avoided)
            found = found or self._complete(stream, version, stream.kept)
            if found is not None:
                return found
        return None

    def without_draining(self, stream: Stream) -> Chain | None:
        """Return a usable chain without the stream's draining replicas, or None."""
        if not self.is_leaving(stream):
            return None
        staying = tuple(
            name if self.view.state(name) is ReplicaState.READY else ""
            for name in stream.chain
        )
        found = self._complete(stream, stream.version, staying, is_ready=True)
        route = self.view.table.routes.get(stream.model)
        if found is not None or route is None or route.version == stream.version:
            return found
        # Another version is acceptable if it has the same weights.
        found = self._complete(stream, route.version, (), is_ready=True)
        if found is None:
            return None
        replicas = self.view.table.replicas
        both = (*stream.chain, *found.replicas)
        weights = {replicas[name].weights for name in both if name in replicas}
        return found if len(weights) == 1 and "" not in weights else None

    def is_leaving(self, stream: Stream) -> bool:
        states = map(self.view.state, stream.chain)
        return any(state is ReplicaState.DRAINING for state in states)

    def around(self, stream: Stream, chain: Chain, replica: str) -> Chain | None:
        """Return a usable chain like ``chain`` without ``replica``, or None."""
        kept = tuple("" if name == replica else name for name in chain.replicas)
        return self._complete(
            stream, chain.version, kept, is_ready=True, without=(replica,)
        )

    def uneven(self, now: float) -> Iterator[Uneven]:
        """Yield the new replicas with much less load than others of their stage."""
        busiest: dict[tuple[str, str, int], str] = {}
        for name, since in list(self._new.items()):
            if now - since > NEW_S:
                del self._new[name]
            elif self.view.is_usable(name):
                new = self.view.table.replicas[name]
                stage = new.model, new.version, new.stage
                if stage not in busiest:
                    others = self.view.table.stage(*stage)
                    busiest[stage] = max(others, key=lambda r: self.load[r.name]).name
                surplus = surplus_of(self.load[busiest[stage]], self.load[name])
                if surplus:
                    yield Uneven(busiest[stage], name, surplus)

    def chain_with_new(self, stream: Stream, uneven: Uneven) -> Chain | None:
        """Return the chain with the busiest replica replaced by the new one, or None.

        None: the hardware fingerprint or the noise differs, or a replica is gone.
        """
        new = self.view.table.replicas[uneven.new]
        if stream.fingerprints.get(new.stage) not in (None, new.fingerprint):
            return None
        if stream.noise not in (None, new.noise):
            return None
        swap = {uneven.busiest: uneven.new}
        names = tuple(swap.get(name, name) for name in stream.chain)
        chain = Chain(stream.version, names)
        return chain if self.is_connected(chain) else None

    def is_connected(self, chain: Chain) -> bool:
        known, connected = self.view.table.replicas, self.view.connected
        return all(name in known and name in connected for name in chain.replicas)

    def _complete(
        self,
        stream: Stream,
        version: str,
        kept: Sequence[str],  # by stage; an empty name: choose a replica
        *,
        is_ready: bool = False,  # all replicas must be usable now
        without: Collection[str] = (),
    ) -> Chain | None:
        """Return a chain with the replicas ``kept`` where possible, or None."""
        route = self.view.table.routes.get(stream.model)
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
        if is_ready and not all(map(self.view.is_usable, found)):
            return None
        return Chain(version, found)

    def _kept(self, kept: Sequence[str], version: str, stage: int) -> str | None:
        name = kept[stage] if stage < len(kept) else ""
        known = self.view.table.replicas.get(name)
        is_there = name in self.view.connected and name not in self.view.silent
        is_same = known is not None and known.version == version
        return name if is_there and is_same else None

    def _with_same_noise(
        self, stream: Stream, found: Sequence[Replica]
    ) -> Sequence[Replica]:
        """Return the replicas whose noise source sampled the stream's tokens."""
        if stream.noise is None:
            return found
        return [r for r in found if r.noise == stream.noise]

    def _candidates(
        self, stream: Stream, version: str, stage: int
    ) -> Sequence[Replica]:
        usable = self._with_same_noise(
            stream, self.view.usable(stream.model, version, stage)
        )
        wanted = stream.via.get(stage)
        if usable and wanted is None:
            return usable
        found = self._with_same_noise(
            stream, self.view.connected_at(stream.model, version, stage)
        )
        found = [r for r in found if wanted in (None, r.name)]
        ready = [r for r in found if r.state is ReplicaState.READY]
        if stream.via:  # a probe may also pass replicas that are starting
            ready = ready or found
        elif stream.made and not ready:
            # A draining replica is better than a replica of another version.
            ready = [r for r in found if r.state is ReplicaState.DRAINING]
        return [r for r in ready if r.name not in self.view.silent] or ready

    def _replica(
        self,
        stream: Stream,
        version: str,
        stage: int,
        first: Sequence[str],
        without: Collection[str],
    ) -> str | None:
        found = self._candidates(stream, version, stage)
        known = self._prefix_routes.matches(stream.prefixes, stage)
        home = ""
        if stream.session:
            home = self.view.home(stream.model, version, stage, stream.session)
        same = stream.fingerprints.get(stage)
        if same is None and len(found) > COMPARED:
            some = self._some(found, [*known, home])
            found = self._with_same_noise(stream, some)
        usable = [r for r in found if r.name not in without]
        usable = [r for r in usable if same in (None, r.fingerprint)] or usable

        def cost(replica: Replica) -> tuple[float, float]:
            saved = known.get(replica.name, 0) * PREFIX_BLOCK / TOKENS_PER_STREAM
            saved += HOME * (replica.name == home)
            splits = any(self.sources.is_split(replica.name, f) for f in first)
            load = self.load[replica.name]
            load += AVOIDED_LOAD * (replica.name in self._avoided_until)
            return load + SPLIT * splits - saved, self._chance()

        return min(usable, key=cost).name if usable else None

    def _some(self, found: Sequence[Replica], names: Iterable[str]) -> list[Replica]:
        """Return random replicas of a stage, and usable replicas among ``names``."""
        drawn = [found[int(self._chance() * len(found))] for _ in range(COMPARED)]
        replicas, one = self.view.table.replicas, found[0]
        named = [replicas[name] for name in names if self.view.is_usable(name)]
        stage = one.model, one.version, one.stage
        return drawn + [r for r in named if (r.model, r.version, r.stage) == stage]
