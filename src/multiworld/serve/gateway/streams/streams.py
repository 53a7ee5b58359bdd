"""The shell of one gateway's stream router: its clients and its edges."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec import structs

from multiworld.errors import ServeError, UnknownModelError
from multiworld.liveness.pause_detector import PauseDetector
from multiworld.serve.deadlines import SILENT_S
from multiworld.serve.gateway.streams import actions, events
from multiworld.serve.gateway.streams.chain_selection import (
    PREFIX_BLOCK,
    PREFIX_TOKENS,
)
from multiworld.serve.gateway.streams.live_streams import (
    chains_of,
    held_back,
    loads_of,
    oldest_of,
    shown,
)
from multiworld.serve.gateway.streams.stream import NO_LIMITS, Stream, TimeLimits
from multiworld.serve.gateway.streams.stream_router import StreamRouter
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.queueing.queue_limits import WaitingTenants
from multiworld.serve.text.prefixes import digests
from multiworld.serve.tracing.request_trace import CURRENT, WorkTrace
from multiworld.serve.wire.control_messages import (
    GatewayReport,
    ModelLoad,
    TenantLoad,
)
from multiworld.serve.wire.edges import Outbox
from multiworld.serve.wire.frames import Entry
from multiworld.serve.wire.generation_messages import (
    BeginSequences,
    Sampling,
    TokenItem,
)
from multiworld.serve.wire.origin import NOWHERE, Origin
from multiworld.serve.wire.protocol import MessageError
from multiworld.serve.wire.routing_table import RoutingTable

logger = logging.getLogger("multiworld.serve")

TICK_S = 0.05  # seconds between checks of deadlines and silent replicas, while needed


class Places:
    """Places in the queue that are reserved for the streams of a request.

    A context manager that releases the remaining places when its block exits.
    """

    def __init__(self, waiting: WaitingTenants, share: Share, count: int) -> None:
        self._waiting, self._share, self._left = waiting, share, count
        for _ in range(count):
            waiting.add(share)

    def take(self) -> None:
        """Release one place; the stream that takes it is opened next."""
        if self._left:
            self._left -= 1
            self._waiting.remove(self._share.tenant)

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *failure: object) -> None:
        while self._left:
            self.take()


@dataclass(frozen=True, slots=True)
class Delivered:
    """The part of a stream that another gateway has delivered."""

    tokens: tuple[int, ...] = ()
    # Noise source that sampled the tokens (``WholeEngine.noise``); None: any replica
    # may continue the stream.
    noise: str | None = None
    age_s: float = 0.0  # seconds since its request began


NOTHING = Delivered()


# Receives the items of a stream. Must neither raise, nor open or close streams.
OnItem = Callable[[actions.Item], object]


class OpenStream:
    """A stream that replicas compute, until it is closed."""

    def __init__(
        self, stream: Stream, close: Callable[[BaseException | None], None]
    ) -> None:
        self._stream, self._close = stream, close

    @property
    def noise(self) -> str | None:
        """Noise source of the tokens, known from the first token on; None: any."""
        return self._stream.noise

    def close(self, error: BaseException | None = None) -> None:
        """End the stream at all replicas, and count it, once; no error: complete."""
        self._close(error)


class Streams:
    """All streams of one gateway. An ``EdgeOwner``."""

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.name, self._clock, self._wall_clock = name, clock, wall_clock
        self.router = StreamRouter(name, chance)
        self.counts, self.timed = self.router.counts, self.router.timed
        self.attainment = self.router.attainment
        self.asked_at = self._clock()  # monotonic time of the latest stream
        # Called repeatedly while a stream waits for a model that may scale to zero.
        self.on_missing: Callable[[str], None] = lambda model: None
        self._clients: dict[int, OnItem] = {}
        self._traces: dict[int, WorkTrace] = {}
        self._number = 0
        self._edges: dict[str, Outbox] = {}
        self._has_streams = asyncio.Event()
        self._pauses = PauseDetector(TICK_S)

    # Clients.

    def open(
        self,
        model: str,
        tokens: Sequence[int],  # the prompt; at least one
        sampling: Sampling,
        delivered: Delivered,
        on_item: OnItem,
        *,
        deadline_s: float,
        version: str,  # of the model
        limits: TimeLimits = NO_LIMITS,
        share: Share = DEFAULT_SHARE,
        adapter: str = "",  # the LoRA adapter to compute with; empty: none
        session: str = "",  # streams of a tenant's session prefer the same replicas
        origin: Origin = NOWHERE,
        via: dict[int, str] | None = None,  # for a probe: replicas to pass, by stage
    ) -> OpenStream:
        """Generate tokens; ``on_item`` gets each as it arrives.

        The last item has ``finish``, or is an error, or a ``Cut`` at the deadline. The
        caller has reserved a place in the queue.
        """
        if via is None:
            self.asked_at = self._clock()
        self.router.route(model)  # raises UnknownModelError
        now = self._clock()
        # Numbers follow the clock, so that they order the streams of all gateways by
        # age: a replica that lacks memory preempts the latest sequence.
        self._number = max(self._number + 1, int(1000 * self._wall_clock()))
        stream = Stream(
            self._number,
            model,
            version,
            [*tokens, *delivered.tokens],
            len(tokens),
            sampling,
            now + deadline_s,
            via or {},
            limits,
            now,
            share=share,
            adapter=adapter,
            origin=origin,
            noise=delivered.noise,
            earlier_s=delivered.age_s,
            earlier=len(delivered.tokens),
        )
        if via is None:
            whose = f"{model}\0{adapter}\0{share.tenant}"
            names = digests(tokens[:PREFIX_TOKENS], PREFIX_BLOCK, whose)
            stream.prefixes = tuple(names)
            stream.session = session and f"{whose}\0{session}"
        self._clients[stream.number] = on_item
        if (trace := CURRENT.get()) is not None:
            self._traces[stream.number] = WorkTrace(trace, now)
        self._has_streams.set()
        self._handle(events.Opened(stream))
        return OpenStream(stream, partial(self._close, stream.number))

    def _close(self, number: int, error: BaseException | None) -> None:
        del self._clients[number]
        self._handle(events.Closed(number, error))
        if (work := self._traces.pop(number, None)) is not None:
            why = "" if error is None else type(error).__name__
            work.ended(self._clock(), why)

    async def probe(self, replica: str, prompt: Sequence[int], limit_s: float) -> None:
        """Generate two tokens through a replica; raise ServeError if that fails."""
        known = self.router.view.table.replicas.get(replica)
        if known is None:
            raise UnknownModelError(f"the routing table has no replica {replica!r}")
        sampling = Sampling(temperature=0.0, max_tokens=2, ignore_eos=True)
        ended: asyncio.Future[actions.Item] = asyncio.get_running_loop().create_future()

        def arrived(item: actions.Item) -> None:
            is_last = not isinstance(item, TokenItem) or bool(item.finish)
            if is_last and not ended.done():  # it is done if the probe was cancelled
                ended.set_result(item)

        stream = self.open(
            known.model,
            prompt,
            sampling,
            NOTHING,
            arrived,
            deadline_s=limit_s,
            via={known.stage: replica},
            version=known.version,
        )
        try:
            last = await ended
        finally:
            stream.close()
        if isinstance(last, ServeError):
            raise last

    @property
    def in_flight(self) -> int:
        return len(self.router.streams)

    def check_room(self, model: str, share: Share, count: int = 1) -> None:
        self.router.check_room(model, share, count)

    def reserve(self, model: str, share: Share, count: int) -> Places:
        """Reserve places for streams; raise OverloadedError if there is no room."""
        self.check_room(model, share, count)
        return Places(self.router.without_token[model], share, count)

    def resume(self, model: str, share: Share, count: int) -> Places:
        """Return places for another gateway's streams, even if the queue is full."""
        return Places(self.router.without_token[model], share, count)

    def quarantine(self, tenant: str, model: str) -> None:
        """End a tenant's waiting streams without a token, dedicated or shared."""
        self._handle(events.TenantQuarantined(tenant, model))

    def cancel(self, request: str) -> int:
        """End a request's streams with ``RequestCancelledError``; return how many."""
        count = sum(
            stream.origin.request == request and not stream.has_ended
            for stream in self.router.streams.values()
        )
        self._handle(events.RequestCancelled(request))
        return count

    def shown(self, report: GatewayReport) -> GatewayReport:
        """Return a report with live streams."""
        streams = self.router.streams.values()
        return structs.replace(
            report, streams=shown(streams, self._clock()), chains=chains_of(streams)
        )

    def in_progress(
        self,
    ) -> tuple[dict[str, TenantLoad], dict[str, ModelLoad], dict[str, float]]:
        """Return the loads by tenant and model, and the models' longest waits."""
        streams = self.router.streams.values()
        oldest_s = oldest_of(streams, self._clock())
        return loads_of(streams), held_back(streams), oldest_s

    # The table and the edges.

    def table_changed(self, table: RoutingTable) -> None:
        self._handle(events.TableChanged(table))

    def edge_up(self, outbox: Outbox) -> None:
        self._edges[outbox.edge.peer] = outbox
        self._handle(events.Connected(outbox.edge.peer))

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        peer = outbox.edge.peer
        if self._edges.get(peer) is outbox:
            del self._edges[peer]
            self._handle(events.Disconnected(peer, is_polite))

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        messages = [message for message, _ in frame]
        self._handle(events.Received(outbox.edge.peer, messages))

    # Time.

    async def look(self) -> None:
        """Check deadlines and silent replicas periodically, until cancelled."""
        while True:
            if not self._clients:
                self._has_streams.clear()
                await self._has_streams.wait()
                self._pauses.rest()
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Pass the time and the silent replicas to the router."""
        now = self._clock()
        # After a pause of this process, first read the messages that arrived during it.
        if not self._pauses.look(now):
            edges = self._edges.items()
            silent = {name for name, outbox in edges if outbox.silent_s() > SILENT_S}
            self._handle(events.Ticked(frozenset(silent), self._pauses.resumed_at))

    def _handle(self, event: events.Event) -> None:
        """Pass an event to the router, and carry out its actions."""
        refused: MessageError | None = None
        now = self._clock()
        for action in self.router.handle(event, now):
            if self._traces:
                self._trace(action, now)
            match action:
                case actions.Send(replica, message):
                    outbox = self._edges.get(replica)
                    # None: the edge has failed.
                    if outbox is not None:
                        outbox.put(message)
                case actions.Deliver(number, item):
                    if (on_item := self._clients.get(number)) is not None:
                        on_item(item)
                case actions.RequestReplicas(model):
                    self.on_missing(model)
                case actions.Log(text, _, request, is_warning):
                    level = logging.WARNING if is_warning else logging.INFO
                    logger.log(level, text, extra={"request": request})
                case actions.Refuse(error):
                    refused = error
        if refused is not None:
            raise refused  # closes the sender's edge

    def _trace(self, action: actions.Action, now: float) -> None:
        match action:
            case actions.Send(_, BeginSequences(starts)):
                for start in starts:
                    if (work := self._traces.get(start.key[1])) is not None:
                        work.attempt(start.key[2], start.chain, now)
            case actions.Deliver(number, item) if number in self._traces:
                if isinstance(item, TokenItem):
                    self._traces[number].answered(now)
            case actions.Log(text, number, is_loss=is_loss) if number in self._traces:
                if is_loss:
                    self._traces[number].lost(text, now)
                else:
                    self._traces[number].note(text, now)
