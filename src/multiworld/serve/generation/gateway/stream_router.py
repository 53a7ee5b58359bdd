"""The streams of one gateway: where each is computed, and what was delivered.

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
    UnknownModelError,
)
from multiworld.liveness.pause_detector import PauseDetector
from multiworld.serve.core import refusals
from multiworld.serve.core.attainment import Attainment
from multiworld.serve.generation.gateway.chain_selection import (
    PREFIX_BLOCK,
    PREFIX_TOKENS,
    Chains,
)
from multiworld.serve.generation.gateway.moves import Moves
from multiworld.serve.generation.gateway.stream import (
    NO_LIMITS,
    Chain,
    Stream,
    TimeLimits,
)
from multiworld.serve.generation.gateway.stream_counts import StreamCounts
from multiworld.serve.generation.prefixes import digests
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport import generation_messages, protocol
from multiworld.serve.transport.edge_messages import EdgeMessage
from multiworld.serve.transport.edges import SILENT_S, Outbox
from multiworld.serve.transport.frames import Entry
from multiworld.serve.transport.generation_messages import Opening, Sampling, TokenItem
from multiworld.serve.transport.protocol import Key
from multiworld.serve.transport.routing_table import Route, RoutingTable

logger = logging.getLogger("multiworld.serve")

TICK_S = 0.05
"""Seconds between checks of deadlines and of silent replicas, while there are
streams."""

OWED = 65536
"""Most ended sequences that a replica is told of when it connects again."""

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
        chance: Returns a random number from 0 to 1.

    Attributes:
        table: The routing table in use.
        counts: Events since the start, by kind.
        timed: Tokens and times of all streams.
        attainment: Streams within their objectives.
        on_missing: Called with the name of a model that may scale to zero, again and
            again, while a stream of it waits for a chain.
    """

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.name, self._clock = name, clock
        self.table = RoutingTable()
        self.counts: Counter[str] = Counter()
        self.timed = StreamCounts()
        self.attainment = Attainment()
        self._streams: dict[int, Stream] = {}
        self._unplaced: dict[int, Stream] = {}
        self._owed: dict[str, deque[Key]] = {}
        self.on_missing: Callable[[str], None] = lambda model: None
        self._numbers = itertools.count(1)
        self._edges: dict[str, Outbox] = {}
        self._chains = Chains(self._edges, chance)
        self._moves = Moves(name, self._chains, self._tell, self._end_at, self.counts)
        self._is_busy = asyncio.Event()
        self._pauses = PauseDetector(TICK_S)
        self._without_token: Counter[str] = Counter()
        self._came_back: list[Stream] = []

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
        session: str = "",
        request: str = "",
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
            session: Streams of a tenant's session prefer the same replicas.
            request: Id of its request, for logs.
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
            self._arrive(model)
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
            request=request,
            began_at=self._clock(),
        )
        if via is None:
            whose = f"{model}\0{share.tenant}"
            names = digests(tokens[:PREFIX_TOKENS], PREFIX_BLOCK, whose)
            stream.prefixes = tuple(names)
            stream.session = session and f"{whose}\0{session}"
        self._streams[stream.number] = self._unplaced[stream.number] = stream
        self._without_token[model] += 1
        self._is_busy.set()
        self._place(stream)
        failed: BaseException | None = None
        try:
            async with aclosing(stream.items()) as found:
                yield found
        except BaseException as error:
            failed = error
            raise
        finally:
            del self._streams[stream.number]
            self._without_token[model] -= stream.first_at is None
            self._leave_chain(stream)
            self._unplaced.pop(stream.number, None)
            if not stream.via:
                made = len(stream.tokens) - stream.prompt
                took_s = stream.last_at - (stream.first_at or 0.0)
                self.timed.ended(model, stream.prompt, made, took_s)
                is_late = self._is_late(stream)
                self.attainment.count(model, failed, is_late=is_late)

    def _arrive(self, model: str) -> None:
        """Count a stream, and check that it may wait."""
        self.check_room(model)
        self.attainment.arrived[model] += 1

    def _is_late(self, stream: Stream) -> bool:
        """Tell whether an objective of a stream has passed."""
        route = self.table.routes.get(stream.model)
        if route is None:
            return False
        first_at = stream.first_at
        if route.ttft_s is not None:
            until = self._clock() if first_at is None else first_at
            if until - stream.began_at > route.ttft_s:
                return True
        more = len(stream.tokens) - stream.prompt - 1
        if route.tpot_s is None or first_at is None or more < 1:
            return False
        return stream.last_at - first_at > route.tpot_s * more

    def check_room(self, model: str) -> None:
        """Check that one more stream may wait for a model.

        Raises:
            UnknownModelError: The table has no route for the model.
            OverloadedError: Too many streams wait.
        """
        waiting = self._without_token[model]
        if waiting >= self._route(model).max_queued_requests + 1:
            self.attainment.arrived[model] += 1
            refused = OverloadedError(f"{waiting} requests wait for {model!r}")
            self.attainment.count(model, refused, is_late=True)
            raise refused

    def without_token(self, model: str) -> int:
        """Return the number of a model's streams that have no token yet."""
        return self._without_token[model]

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

    def quarantine(self, tenant: str, model: str) -> None:
        """End a tenant's streams without a token that wait for a chain, of any kind."""
        names = {model, f"{model}@{tenant}"}
        for stream in self._unplaced.values():
            is_its = stream.share.tenant == tenant and stream.model in names
            if is_its and stream.first_at is None:
                stream.put(refusals.quarantined(model))

    def load(self) -> dict[str, int]:
        """Return the streams at each replica."""
        return dict(+self._chains.load)

    def waiting(self, model: str) -> int:
        """Return the number of streams that wait for a chain."""
        return sum(s.model == model and not s.chain for s in self._streams.values())

    # The table and the edges.

    def table_changed(self, table: RoutingTable) -> None:
        """Use a new routing table."""
        self.table = table
        self._chains.table_changed(table, self._clock())
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
        self._chains.silent.discard(peer)
        for stream in self._streams.values():
            if stream.move is not None and peer in stream.move.chain.replicas:
                self._moves.give_up(stream, self._clock())
        there = self._at(peer)
        if not is_polite:
            there += self._count_loss(peer)
        for stream in there:
            stream.returns = 0
            self._again(stream, f"{peer} is gone")
        self._place_waiting()

    def _count_loss(self, replica: str) -> list[Stream]:
        """Count the loss of a replica for the streams that it may be the fault of.

        Another replica of a chain may notice it first and give a stream back, so that
        it is elsewhere by now.

        Returns:
            Streams that are elsewhere, and now have to be computed alone or not at all.
        """
        streams = self._streams.values()
        had = [s for s in streams if replica in s.chain or replica in s.left]
        alone = [s for s in had if s.is_alone or s.was_alone]
        for stream in alone or had:
            is_alone = stream.is_alone or stream.was_alone
            stream.losses.add(self._clock(), is_alone=is_alone)
            stream.left, stream.was_alone = (), False
        moved = [s for s in alone or had if replica not in s.chain]
        return [s for s in moved if s.losses.is_suspect and not s.has_ended]

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        """Handle the messages of a frame that has arrived.

        Args:
            outbox: The edge.
            frame: The messages.

        Raises:
            MessageError: A message is not its sender's to send.
        """
        for message, _ in frame:
            match message:
                case generation_messages.Tokens(items):
                    for item in items:
                        self._token(item, outbox.edge.peer)
                case generation_messages.Alone(key):
                    stream = self._known(key)
                    if stream is not None and stream.attempt == key[2]:
                        peer = outbox.edge.peer
                        _require(peer in stream.chain[:1], key, peer)
                        stream.is_alone = stream.losses.has_begun = True
                case generation_messages.ComputeBegan(keys):
                    for key in keys:
                        self._compute_began(key, outbox.edge.peer)
                case generation_messages.SequenceFailed(key, error):
                    self._failed(key, error, outbox.edge.peer)
                case generation_messages.Prepared(key):
                    self._prepared(key, outbox.edge.peer)
        came_back, self._came_back = self._came_back, []
        for stream in came_back:
            if stream.number in self._unplaced and stream.not_before <= self._clock():
                self._place(stream)

    def _compute_began(self, key: Key, replica: str) -> None:
        stream = self._known(key)
        if stream is not None and stream.attempt == key[2]:
            _require(replica in stream.chain, key, replica)
            stream.losses.has_begun = True

    def _at(self, replica: str) -> list[Stream]:
        return [s for s in self._streams.values() if replica in s.chain]

    def _known(self, key: Key) -> Stream | None:
        """Return a stream of this gateway, if it has not ended."""
        return self._streams.get(key[1]) if key[0] == self.name else None

    def _token(self, item: TokenItem, replica: str) -> None:
        stream = self._known(item.key)
        if stream is None or item.key[2] != stream.attempt or not stream.chain:
            return  # of an earlier attempt
        is_one_more = item.index < stream.sampling.max_tokens
        _require(is_one_more and replica == stream.chain[-1], item.key, replica)
        index = len(stream.tokens) - stream.prompt
        if item.index != index:
            self._again(stream, f"token {item.index} came in place of {index}")
            return
        stream.tokens.append(item.token)
        stream.losses.clear()
        stream.left, stream.was_alone = (), False
        stream.returns, stream.is_alone = 0, False
        stream.last_at = self._clock()
        if stream.first_at is None:
            stream.first_at = stream.last_at
            self._without_token[stream.model] -= 1
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
        stream = self._known(key)
        if stream is None:
            return
        if stream.move is not None and key[2] == stream.move.attempt:
            known = {*stream.move.chain.replicas, *stream.chain}
            _require(replica in known, key, replica)
            if error is None and replica in stream.chain:
                self._moves.not_filled(stream, replica, self._clock())
            else:
                self._moves.give_up(stream, self._clock())
        if key[2] != stream.attempt or not stream.chain:
            return
        _require(replica in stream.chain, key, replica)
        if error is None:
            left, was_alone = stream.chain, stream.is_alone
            self._again(stream, f"{replica} gave it back")
            stream.left, stream.was_alone = left, was_alone
            return
        self._leave_chain(stream)
        stream.put(error.error())

    # Chains.

    def _again(self, stream: Stream, why: str) -> None:
        """Make another attempt at a stream, with what is left of its chain."""
        self.counts["replayed"] += not stream.via  # probes are nobody's streams
        logger.info("%s again: %s", stream.name, why)
        is_kept = (
            not stream.losses.is_suspect
            and stream.returns < KEPT_RETURNS
            and not stream.via
        )
        self._leave_chain(stream, is_kept=is_kept)
        self._came_back.append(stream)
        if stream.losses.is_poison:
            lost = stream.losses.isolated
            stream.put(refusals.poisoned(stream.number, stream.model, lost))
            return
        stream.not_before = stream.losses.not_before
        if stream.returns:
            pause_s = PAUSE_S * 2.0 ** min(stream.returns, 10)
            not_before = self._clock() + min(LONGEST_PAUSE_S, pause_s)
            stream.not_before = max(stream.not_before, not_before)
        stream.returns += 1

    def _leave_chain(self, stream: Stream, *, is_kept: bool = False) -> None:
        """End the current attempt.

        Args:
            stream: The stream.
            is_kept: Whether the replicas keep it for the next attempt; stage 0 does
                not go on with it meanwhile.
        """
        self._moves.drop(stream)
        self._chains.leave(stream.chain)
        key = self._key(stream, stream.attempt)
        if stream.chain and is_kept:
            stream.kept, stream.kept_attempt = stream.chain, stream.attempt
            self._tell(stream.kept[0], generation_messages.Pause((key,)))
        elif stream.chain:
            self._end_at(stream.chain, key)
        else:  # it waits; those that keep it have an earlier attempt
            self._forget_kept(stream)
        if stream.chain:
            stream.chain = ()
            stream.attempt = stream.next_attempt()
        stream.is_alone = False
        self._unplaced[stream.number] = stream

    def _forget_kept(self, stream: Stream) -> None:
        """End the earlier attempt at the replicas that keep it."""
        self._end_at(stream.kept, self._key(stream, stream.kept_attempt))
        stream.kept = ()

    def _key(self, stream: Stream, attempt: int) -> Key:
        return self.name, stream.number, attempt

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
        hopeless: set[tuple[str, str]] = set()
        for stream in list(self._unplaced.values()):
            kind = stream.model, stream.version
            if stream.not_before > now or kind in hopeless:
                continue
            is_placed = self._place(stream)
            if not is_placed and not stream.kept and not stream.via:
                hopeless.add(kind)  # a stage has no replica, for all of them

    def _place(self, stream: Stream) -> bool:
        """Pin a stream to a chain and begin it there.

        Returns:
            False if a stage has no replica for it.
        """
        if stream.has_ended:
            return True
        chain = self._chains.choose(stream)
        if chain is None:
            route = self.table.routes.get(stream.model)
            if route is not None and route.on_demand:
                self.on_missing(stream.model)
            return False
        gone = [name for name in stream.kept if name not in chain.replicas]
        is_kept = len(gone) < len(stream.kept)
        self._end_at(gone, self._key(stream, stream.kept_attempt))
        stream.kept = ()
        del self._unplaced[stream.number]
        self._begin(stream, chain, stream.kept_attempt if is_kept else -1)
        return True

    def _prepared(self, key: Key, replica: str) -> None:
        """Move a stream to its new chain, if that is prepared."""
        stream = self._known(key)
        if stream is None or stream.move is None or stream.move.attempt != key[2]:
            return
        _require(replica in stream.move.chain.replicas, key, replica)
        if not self._moves.prepared(stream, key[2], self._clock()):
            return
        self.counts["moved"] += 1
        move = self._moves.finish(stream)
        before, previous = stream.chain, stream.attempt
        self._chains.leave(before)
        gone = [name for name in before if name not in move.chain.replicas]
        self._end_at(gone, self._key(stream, previous))
        stream.attempt = stream.next_attempt()
        self._begin(stream, move.chain, previous, move.attempt)

    def _begin(
        self, stream: Stream, chain: Chain, previous: int, prepared: int = -1
    ) -> None:
        """Begin the attempt of a stream at a chain.

        Args:
            stream: The stream.
            chain: The chain.
            previous: The attempt that some of it have; -1: none.
            prepared: The attempt that the others were prepared for; -1: none.
        """
        stream.version, stream.chain = chain.version, chain.replicas
        opening = Opening(
            self._key(stream, stream.attempt),
            tuple(stream.tokens),
            stream.prompt,
            stream.chain,
            stream.sampling,
            stream.share,
            previous,
            bool(stream.via),
            stream.losses.is_suspect,
            prepared,
            # A loss may be noticed only after a neighbour gave the stream back.
            is_watched=stream.losses.counted > 0 or stream.returns > 0,
        )
        self._note_kinds(stream)
        self._chains.enter(stream)
        for replica in stream.chain:
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
                    "%s goes on with another kind of machine in stage %d, and may go "
                    "on differently: %s in place of %s",
                    stream.name,
                    stage,
                    found or "an unknown one",
                    before or "an unknown one",
                )

    # Time.

    async def look(self) -> None:
        """Check deadlines and silent replicas again and again, until cancelled.

        Cancellation: Safe.
        """
        while True:
            if not self._streams:
                self._is_busy.clear()
                await self._is_busy.wait()
                self._pauses.rest()
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Check deadlines and silent replicas, move streams, and place waiting ones.

        After a pause of this process nothing is judged before what arrived is read.
        """
        now = self._clock()
        if self._pauses.look(now):
            return
        for stream in list(self._streams.values()):
            late = stream.late(now, self._pauses.resumed_at)
            if late and not stream.has_ended:
                self._leave_chain(stream)
                stream.put(DeadlineExceededError(late))
        self._look_for_silence()
        self._move(now)
        self._place_waiting()

    def _move(self, now: float) -> None:
        """Move streams from replicas that drain or are busy."""
        streams = self._streams.values()
        for stream in list(self._moves.waiting(streams, now)):
            self.counts["moved"] += 1
            self._leave_chain(stream)
            self._place(stream)
        self._moves.look(streams, now)

    def _look_for_silence(self) -> None:
        edges = self._edges.items()
        silent = {name for name, outbox in edges if outbox.silent_s() > SILENT_S}
        self._chains.silent = silent  # all, before any stream is placed anew
        for name in silent:
            if self._chains.others_of(name):
                for stream in self._at(name):
                    if not stream.via:
                        self._again(stream, f"{name} is silent")


def _require(is_theirs: bool, key: Key, replica: str) -> None:
    """Check that a message is its sender's to send; else its edge is closed."""
    if not is_theirs:
        raise protocol.MessageError(
            f"{replica} sent a message about sequence {key[1]} (attempt {key[2]}) of "
            f"{key[0]}, which it does not compute, or that it may not send"
        )
