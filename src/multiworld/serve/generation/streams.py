"""The streams of one gateway: where each is computed, and what was delivered. Shell.

The gateway is the authority on a stream: what it has delivered is never changed. If a
replica of a stream's chain is lost, the stream becomes another attempt: another replica
takes the place of the lost one, and is filled by those that are left. If that fails
again and again, or the stream may be the cause, it begins anew on any replicas, from
its prompt and the delivered tokens. Tokens of earlier attempts are ignored, wherever
they still come from.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager

from multiworld.errors import (
    DeadlineExceededError,
    OverloadedError,
    RequestPoisonedError,
    UnknownModelError,
)
from multiworld.serve.generation.prefixes import (
    TOKENS_PER_STREAM,
    PrefixRoutes,
    digests,
)
from multiworld.serve.generation.stream import NO_LIMITS, Stream, TimeLimits
from multiworld.serve.generation.stream_counts import StreamCounts
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport import generation_messages, protocol
from multiworld.serve.transport.edge_messages import EdgeMessage
from multiworld.serve.transport.edges import SILENT_S, Outbox
from multiworld.serve.transport.frames import Entry
from multiworld.serve.transport.generation_messages import Opening, Sampling, TokenItem
from multiworld.serve.transport.protocol import Key
from multiworld.serve.transport.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)

logger = logging.getLogger("multiworld.serve")

PREFIX_BLOCK, PREFIX_TOKENS = 64, 4096
"""Tokens of a block of a prefix, and of the longest one, for the choice of a chain."""

TICK_S = 0.05
"""Seconds between checks of deadlines and of silent replicas, while there are
streams."""

POISON_LOSSES = 4
"""Replicas lost in a row while they had a stream that got no token in between, after
which the stream is taken to be the cause."""

OWED = 65536
"""Most ended sequences that a replica is told of when it connects again."""

SUSPECT_LOSSES = 2
"""Replicas lost in a row after which it is computed alone, until it has a token."""

KEPT_RETURNS = 3
"""Attempts that may come back in a row before a stream begins anew."""

PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Seconds until a stream that came back is tried again; doubles each time without a
token in between."""


class Streams:
    """All streams of one gateway. An ``EdgeOwner``.

    Args:
        name: Name of the gateway.
        clock: Returns the monotonic time in seconds.

    Attributes:
        table: The routing table in use.
        counts: Events since the start, by kind.
        timed: Tokens and times of all streams.
        on_missing: Called with the name of a model that may scale to zero, again and
            again, while a stream of it waits for a chain.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self._clock = name, clock
        self.table = RoutingTable()
        self.counts: Counter[str] = Counter()
        self.timed = StreamCounts()
        self._streams: dict[int, Stream] = {}
        self._unplaced: dict[int, Stream] = {}
        self._owed: dict[str, deque[Key]] = {}
        self.on_missing: Callable[[str], None] = lambda model: None
        self._numbers = itertools.count(1)
        self._edges: dict[str, Outbox] = {}
        self._silent: set[str] = set()
        self._load: Counter[str] = Counter()
        self._prefix_routes = PrefixRoutes()
        self._is_busy = asyncio.Event()

    # Clients.

    @asynccontextmanager
    async def stream(
        self,
        model: str,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        deadline_s: float | None = None,
        limits: TimeLimits = NO_LIMITS,
        share: Share = DEFAULT_SHARE,
        via: dict[int, str] | None = None,
        version: str | None = None,
    ) -> AsyncIterator[AsyncIterator[TokenItem]]:
        """Generate tokens; the stream ends with the block.

        Args:
            model: Name of the model.
            tokens: The prompt; at least one.
            sampling: How tokens are chosen.
            deadline_s: Seconds until the deadline; None: the model's default.
            limits: Its other time limits.
            share: Its tenant.
            via: For a probe: replicas by stage that it must go through.
            version: For a probe: version of the model; None: the active one.

        Yields:
            An iterator over the tokens, which raises a ``ServeError`` if the stream
            fails.

        Raises:
            UnknownModelError: The table has no route for the model.
            OverloadedError: Too many streams wait.

        Cancellation: Safe. The stream ends at once, and its replicas are told.
        """
        if via is None:
            self.check_room(model)
        route = self._route(model)
        limit_s = route.deadline_s if deadline_s is None else deadline_s
        stream = Stream(
            next(self._numbers),
            model,
            version or route.version,
            list(tokens),
            len(tokens),
            sampling,
            self._clock() + limit_s,
            via or {},
            limits,
            share=share,
            began_at=self._clock(),
        )
        if via is None:
            whose = f"{model}\0{share.tenant}"
            names = digests(tokens[:PREFIX_TOKENS], PREFIX_BLOCK, whose)
            stream.prefixes = tuple(names)
        self._streams[stream.number] = self._unplaced[stream.number] = stream
        self._is_busy.set()
        self._place(stream)
        try:
            async with aclosing(stream.items()) as found:
                yield found
        finally:
            del self._streams[stream.number]
            self._leave_chain(stream)
            self._unplaced.pop(stream.number, None)
            if not stream.via:
                made = len(stream.tokens) - stream.prompt
                took_s = stream.last_at - (stream.first_at or 0.0)
                self.timed.ended(model, stream.prompt, made, took_s)

    def check_room(self, model: str) -> None:
        """Check that one more stream may wait for a model.

        Raises:
            UnknownModelError: The table has no route for the model.
            OverloadedError: Too many streams wait.
        """
        waiting = sum(
            s.model == model and s.first_at is None and not s.has_ended
            for s in self._streams.values()
        )
        if waiting >= self._route(model).max_queued_requests + 1:
            raise OverloadedError(f"{waiting} requests wait for {model!r}")

    def _route(self, model: str) -> Route:
        route = self.table.routes.get(model)
        if route is None:
            raise UnknownModelError(f"no model {model!r} is served here")
        return route

    async def probe(self, replica: str, prompt: Sequence[int], limit_s: float) -> None:
        """Generate two tokens through a replica.

        Args:
            replica: Name of the replica.
            prompt: Tokens to begin with.
            limit_s: Seconds until the deadline.

        Raises:
            UnknownModelError: The table has no such replica.
            ServeError: The replica failed, or did not answer in time.

        Cancellation: Safe.
        """
        known = self.table.replicas.get(replica)
        if known is None:
            raise UnknownModelError(f"the routing table has no replica {replica!r}")
        sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
        async with self.stream(
            known.model,
            prompt,
            sampling,
            deadline_s=limit_s,
            via={known.stage: replica},
            version=known.version,
        ) as tokens:
            async for _ in tokens:
                pass

    @property
    def in_flight(self) -> int:
        """Number of streams."""
        return len(self._streams)

    def load(self) -> dict[str, int]:
        """Return the streams at each replica."""
        return dict(+self._load)

    def waiting(self, model: str) -> int:
        """Return the number of streams that wait for a chain."""
        return sum(s.model == model and not s.chain for s in self._streams.values())

    # The table and the edges.

    def table_changed(self, table: RoutingTable) -> None:
        """Use a new routing table."""
        self.table = table
        for name in self._owed.keys() - table.replicas.keys():
            del self._owed[name]
        self._place_waiting()

    def edge_up(self, outbox: Outbox) -> None:
        """Use a new incarnation of an edge."""
        peer = outbox.edge.peer
        self._edges[peer] = outbox
        owed = self._owed.pop(peer, ())
        if owed:
            outbox.put(generation_messages.End(tuple(owed)))
        self._place_waiting()

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        """Move the streams of a replica that is gone.

        Args:
            outbox: The incarnation of the edge.
            is_polite: Whether the replica left; otherwise it was lost.
        """
        peer = outbox.edge.peer
        if self._edges.get(peer) is not outbox:
            return
        del self._edges[peer]
        self._silent.discard(peer)
        there = self._at(peer)
        known_cause = any(stream.is_alone for stream in there)
        for stream in there:
            stream.losses += not is_polite and (stream.is_alone or not known_cause)
            stream.returns = 0
            self._again(stream, f"{peer} is gone")
        self._place_waiting()

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        """Handle the messages of a frame that has arrived."""
        for message, _ in frame:
            match message:
                case generation_messages.Tokens(items):
                    for item in items:
                        self._token(item)
                case generation_messages.Alone(key):
                    stream = self._streams.get(key[1])
                    if stream is not None and stream.attempt == key[2]:
                        stream.is_alone = True
                case generation_messages.SequenceFailed(key, error):
                    self._failed(key, error, outbox.edge.peer)
        self._place_waiting()

    def _at(self, replica: str) -> list[Stream]:
        return [s for s in self._streams.values() if replica in s.chain]

    def _token(self, item: TokenItem) -> None:
        stream = self._streams.get(item.key[1])
        if stream is None or item.key[2] != stream.attempt or not stream.chain:
            return  # of an earlier attempt
        index = len(stream.tokens) - stream.prompt
        if item.index != index:
            self._again(stream, f"token {item.index} came in place of {index}")
            return
        stream.tokens.append(item.token)
        stream.losses = stream.returns = 0
        stream.is_alone = False
        stream.last_at = self._clock()
        if stream.first_at is None:
            stream.first_at = stream.last_at
            if not stream.via:
                took_s = stream.first_at - stream.began_at
                self.timed.first(stream.model, took_s)
        self.counts["tokens"] += 1
        stream.put(item)
        if item.finish:
            self._leave_chain(stream)

    def _failed(
        self, key: Key, error: protocol.RemoteError | None, replica: str
    ) -> None:
        stream = self._streams.get(key[1])
        if stream is None or key[2] != stream.attempt:
            return
        if error is None:
            self._again(stream, f"{replica} gave it back")
            return
        self._leave_chain(stream)
        stream.put(error.error())

    # Chains.

    def _again(self, stream: Stream, why: str) -> None:
        """Make another attempt at a stream, with what is left of its chain."""
        self.counts["replayed"] += 1
        logger.info("stream %d again: %s", stream.number, why)
        is_kept = (
            stream.losses < SUSPECT_LOSSES
            and stream.returns < KEPT_RETURNS
            and not stream.via
        )
        self._leave_chain(stream, is_kept=is_kept)
        if stream.losses >= POISON_LOSSES:
            stream.put(
                RequestPoisonedError(
                    f"{stream.losses} replicas were lost in a row with this request"
                )
            )
            return
        if stream.returns:
            pause_s = PAUSE_S * 2.0 ** min(stream.returns, 10)
            stream.not_before = self._clock() + min(LONGEST_PAUSE_S, pause_s)
        stream.returns += 1

    def _leave_chain(self, stream: Stream, *, is_kept: bool = False) -> None:
        """End the current attempt.

        Args:
            stream: The stream.
            is_kept: Whether the replicas keep it for the next attempt; stage 0 does
                not go on with it meanwhile.
        """
        key = self.name, stream.number, stream.attempt
        for replica in stream.chain:
            self._load[replica] -= 1
        if stream.chain and is_kept:
            stream.kept = stream.chain
            self._tell(stream.kept[0], generation_messages.Pause((key,)))
        elif stream.chain:
            self._end_at(stream.chain, key)
        else:  # it waits; those that keep it have the attempt before
            self._forget_kept(stream)
        if stream.chain:
            stream.chain = ()
            stream.attempt += 1
        stream.is_alone = False
        self._unplaced[stream.number] = stream

    def _forget_kept(self, stream: Stream) -> None:
        """End the attempt before, at the replicas that keep it."""
        self._end_at(stream.kept, (self.name, stream.number, stream.attempt - 1))
        stream.kept = ()

    def _end_at(self, replicas: Iterable[str], key: Key) -> None:
        for replica in replicas:
            if replica in self._edges:
                self._tell(replica, generation_messages.End((key,)))
            elif replica in self.table.replicas:  # it may connect again
                self._owed.setdefault(replica, deque(maxlen=OWED)).append(key)

    def _tell(self, replica: str, message: EdgeMessage) -> None:
        outbox = self._edges.get(replica)
        if outbox is not None:
            outbox.put(message)

    def _place_waiting(self) -> None:
        now = self._clock()
        for stream in list(self._unplaced.values()):
            if stream.not_before <= now:
                self._place(stream)

    def _place(self, stream: Stream) -> None:
        """Pin a stream to a chain and begin it there, if there is one."""
        if stream.has_ended:
            return
        chain = self._chain(stream)
        if chain is None:
            route = self.table.routes.get(stream.model)
            if route is not None and route.on_demand:
                self.on_missing(stream.model)
            return
        kept, previous = stream.kept, stream.attempt - 1
        is_moved = any(name in kept for name in chain)
        self._end_at(
            [name for name in kept if name not in chain],
            (self.name, stream.number, previous),
        )
        stream.chain, stream.kept = chain, ()
        del self._unplaced[stream.number]
        opening = Opening(
            (self.name, stream.number, stream.attempt),
            tuple(stream.tokens),
            stream.prompt,
            chain,
            stream.sampling,
            stream.share,
            previous if is_moved else -1,
            bool(stream.via),
            stream.losses >= SUSPECT_LOSSES,
        )
        self._note_kinds(stream)
        self._prefix_routes.record(stream.prefixes, chain)
        for replica in chain:
            self._load[replica] += 1
            self._tell(replica, generation_messages.Begin((opening,)))

    def _note_kinds(self, stream: Stream) -> None:
        """Record the kinds of machines of a chain; tell if one has changed."""
        for stage, name in enumerate(stream.chain):
            found = self.table.replicas[name].fingerprint
            before = stream.fingerprints.setdefault(stage, found)
            if found != before:
                stream.fingerprints[stage] = found
                self.counts["other_kind"] += 1
                logger.warning(
                    "stream %d goes on with another kind of machine in stage %d, and "
                    "may go on differently: %s in place of %s",
                    stream.number,
                    stage,
                    found or "an unknown one",
                    before or "an unknown one",
                )

    def _chain(self, stream: Stream) -> tuple[str, ...] | None:
        """Return a replica of each stage; None if a stage has none.

        Those that keep the attempt before stay; others are the least loaded.
        """
        route = self.table.routes.get(stream.model)
        if route is None:
            return None
        versions = [stream.version]
        if not stream.via and route.version != stream.version:
            versions.append(route.version)  # the version that it began with may be gone
        for version in versions:
            chain = [
                self._kept(stream, version, stage)
                or self._replica(stream, version, stage)
                for stage in range(route.stages.get(version, 0))
            ]
            if chain and None not in chain:
                stream.version = version
                return tuple(name for name in chain if name is not None)
        return None

    def _kept(self, stream: Stream, version: str, stage: int) -> str | None:
        """Return the replica of a stage that keeps the attempt before, if it can."""
        name = stream.kept[stage] if stage < len(stream.kept) else ""
        known = self.table.replicas.get(name)
        is_there = name in self._edges and name not in self._silent
        is_same = known is not None and known.version == version
        return name if is_there and is_same else None

    def _replica(self, stream: Stream, version: str, stage: int) -> str | None:
        wanted = stream.via.get(stage)
        found = [
            replica
            for replica in self.table.stage(stream.model, version, stage)
            if replica.name in self._edges and wanted in (None, replica.name)
        ]
        usable = [r for r in found if r.state is ReplicaState.READY]
        if stream.via:  # a probe also goes through others that are starting
            usable = usable or found
        usable = [r for r in usable if r.name not in self._silent] or usable
        alike = stream.fingerprints.get(stage)
        usable = [r for r in usable if alike in (None, r.fingerprint)] or usable
        known = self._prefix_routes.matches(stream.prefixes, stage)

        def cost(replica: Replica) -> tuple[float, float]:
            saved = known.get(replica.name, 0) * PREFIX_BLOCK / TOKENS_PER_STREAM
            return self._load[replica.name] - saved, random.random()

        return min(usable, key=cost).name if usable else None

    # Time.

    async def look(self) -> None:
        """Check deadlines and silent replicas again and again, until cancelled.

        Cancellation: Safe.
        """
        while True:
            if not self._streams:
                self._is_busy.clear()
                await self._is_busy.wait()
            await asyncio.sleep(TICK_S)
            now = self._clock()
            for stream in list(self._streams.values()):
                late = stream.late(now)
                if late and not stream.has_ended:
                    self._leave_chain(stream)
                    stream.put(DeadlineExceededError(late))
            self._look_for_silence()
            self._place_waiting()

    def _look_for_silence(self) -> None:
        for name, outbox in list(self._edges.items()):
            is_silent = outbox.silent_s() > SILENT_S
            (self._silent.add if is_silent else self._silent.discard)(name)
            if not is_silent:
                continue
            known = self.table.replicas.get(name)
            if known is None:
                continue
            others = [
                r
                for r in self.table.stage(known.model, known.version, known.stage)
                if r.name in self._edges
                and r.name not in self._silent
                and r.state is ReplicaState.READY
            ]
            for stream in self._at(name) if others else ():
                if not stream.via:
                    self._again(stream, f"{name} is silent")
