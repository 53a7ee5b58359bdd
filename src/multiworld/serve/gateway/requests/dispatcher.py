"""Dispatcher of one gateway, which carries out its router's decisions."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from multiworld.errors import ServeError, UnknownModelError
from multiworld.serve.deadlines import SILENT_S
from multiworld.serve.gateway.admission.timing import Timing
from multiworld.serve.gateway.requests import actions, events
from multiworld.serve.gateway.requests.reply_validation import check
from multiworld.serve.gateway.requests.router import Router
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.routing import refusals
from multiworld.serve.routing.attainment import Attainment
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.tracing.request_trace import CURRENT, RequestTrace, WorkTrace
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.collation import rows_of
from multiworld.serve.wire.control_messages import GatewayReport, TenantLoad
from multiworld.serve.wire.edges import Outbox
from multiworld.serve.wire.frames import Entry
from multiworld.serve.wire.inference_messages import NOTHING_SPENT, Spent, WorkItem
from multiworld.serve.wire.origin import NOWHERE, Origin
from multiworld.serve.wire.routing_table import Route, RoutingTable

logger = logging.getLogger("multiworld.serve")

# Seconds between checks of deadlines and of silent replicas: while there are requests,
# and while there are none.
POLL_S, IDLE_S = 0.05, 0.5


@dataclass(slots=True, eq=False)
class _Call:
    tensors: Tensors
    deadline_at: float
    job: events.Submitted
    answered: asyncio.Future[Tensors]
    began_at: float
    sent_at: float | None = None
    spent: Spent = NOTHING_SPENT
    origin: Origin = NOWHERE
    replica: str = ""  # of the first attempt
    request: RequestTrace | None = None  # None: nothing is traced
    trace: WorkTrace | None = None

    def begin_trace(self) -> WorkTrace | None:
        """Begin to keep spans, with the first attempt; None if nothing is traced.

        Most requests are neither sampled nor disturbed, so they keep none.
        """
        if self.trace is None and self.request is not None:
            self.trace = WorkTrace(self.request, self.began_at, "compute")
            if self.sent_at is not None:
                self.trace.attempt(1, (self.replica,), self.sent_at)
        return self.trace


class Dispatcher:
    """Sends requests to the replicas of the routing table and returns the answers."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self._clock = name, clock
        self.table = RoutingTable()
        self._router = Router(random.random)
        self._calls: dict[int, _Call] = {}
        self._edges: dict[str, Outbox] = {}
        self._silent: set[str] = set()
        self._is_busy = asyncio.Event()
        self._numbers = itertools.count(1)
        # Events by kind: answers, replays, errors by class.
        self.counts: Counter[str] = Counter()
        self._attainment = Attainment()
        # Called repeatedly while requests wait for a model that scaled to zero.
        self.on_missing: Callable[[str], None] = lambda model: None
        self._latest: Tensors = {}
        self._spent = NOTHING_SPENT
        self.asked_at = self._clock()  # monotonic time of the latest request

    # Requests.

    async def infer(
        self,
        model: str,
        tensors: Tensors,
        *,
        deadline_s: float | None = None,
        session: str | None = None,
        # For a probe: replicas through which it must pass, by stage.
        via: dict[int, str] | None = None,
        share: Share = DEFAULT_SHARE,
        timing: Timing | None = None,
        version: str = "",
        origin: Origin = NOWHERE,
        is_resumed: bool = False,  # another gateway has admitted the request
    ) -> Tensors:
        """Answer a request; cancelling withdraws it and cancels its attempts."""
        route = self.table.routes.get(model)
        if route is None:
            raise refusals.unknown_model(model, sorted(self.table.routes))
        rows = rows_of(tensors)
        now = self.asked_at = self._clock()
        deadline_at = now + (route.deadline_s if deadline_s is None else deadline_s)
        number = next(self._numbers)
        job = events.Submitted(
            number=number,
            model=model,
            deadline_at=deadline_at,
            session=session,
            via=via,
            share=share,
            rows=rows,
            version=version,
            is_resumed=is_resumed,
        )
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Tensors] = loop.create_future()
        if not self._calls:
            self._is_busy.set()
            self._look_for_silence()
        call = _Call(tensors, deadline_at, job, answered, now, origin=origin)
        self._calls[number] = call
        call.request = CURRENT.get()
        if call.request is not None and call.request.is_wanted:
            call.begin_trace()
        if timing is not None:
            timing.asked(now)
        if via is None:
            self._attainment.arrived[model] += 1
            if route.on_demand and self.missing(model):
                self.on_missing(model)
        try:
            self._handle(job)
            answer = await answered
        except BaseException as error:
            self._count(job, now, route, error)
            if (trace := call.begin_trace()) is not None:
                trace.ended(self._clock(), type(error).__name__)
            if not isinstance(error, ServeError):
                self._handle(events.Withdrawn(number))
            raise
        finally:
            del self._calls[number]
        self._count(job, now, route, None)
        if call.trace is not None:
            call.trace.ended(self._clock())
        if timing is not None:
            waited_s = 0.0 if call.sent_at is None else call.sent_at - now
            queued_s = waited_s + call.spent.queued_s
            timing.answered(self._clock(), queued_s, call.spent.computed_s)
        return answer

    def _count(
        self,
        job: events.Submitted,
        started_at: float,
        route: Route,
        error: BaseException | None,
    ) -> None:
        """Count a finished request, unless it is a probe."""
        if job.via is None:
            limit_s = route.objective_s
            is_late = limit_s is not None and self._clock() - started_at > limit_s
            self._attainment.count(job.model, error, is_late=is_late)

    async def probe(self, replica: str, tensors: Tensors, limit_s: float) -> None:
        """Send one request through a replica and wait for its answer."""
        known = self.table.replicas.get(replica)
        if known is None:
            raise UnknownModelError(f"the routing table has no replica {replica!r}")
        via = {known.stage: replica}
        await self.infer(known.model, tensors, deadline_s=limit_s, via=via)

    def quarantine(self, tenant: str, model: str) -> None:
        """Reject a tenant's waiting requests to a model, dedicated or shared."""
        for name in (model, f"{model}@{tenant}"):
            self._handle(events.TenantQuarantined(tenant, name))

    def table_changed(self, table: RoutingTable) -> None:
        self.table = table
        self._handle(events.TableChanged(table))

    def missing(self, model: str) -> list[int]:
        return self._router.missing(model)

    @property
    def in_flight(self) -> int:
        return len(self._calls)

    def waiting(self, model: str) -> int:
        return self._router.waiting(model)

    def report(self) -> GatewayReport:
        return GatewayReport(
            in_flight=len(self._calls),
            load=dict(self._router.load()),
            waiting={model: self.waiting(model) for model in self.table.routes},
            pending={m: self._router.pending(m) for m in self.table.routes},
            silent=tuple(sorted(self._silent)),
            connected=tuple(sorted(self._edges)),
            counts=dict(self.counts),
            arrived=dict(self._attainment.arrived),
            attained=dict(self._attainment.attained),
            missed=dict(self._attainment.missed),
            refused=dict(self._attainment.refused),
            **self._in_progress(),
        )

    def _in_progress(self) -> dict[str, Any]:
        now = self._clock()
        calls = [call for call in self._calls.values() if call.job.via is None]
        counts = Counter(call.job.share.tenant for call in calls)
        oldest_s: dict[str, float] = {}
        for call in calls:
            oldest_s.setdefault(call.job.model, now - call.began_at)  # in order of age
        loads = {name: TenantLoad(count, count) for name, count in counts.items()}
        return {"tenants": loads, "oldest_s": oldest_s}

    # Edges.

    def edge_up(self, outbox: Outbox) -> None:
        peer = outbox.edge.peer
        self._edges[peer] = outbox
        self._handle(events.Connected(peer))

    def received(self, outbox: Outbox, frame: Sequence[Entry]) -> None:
        peer = outbox.edge.peer
        for message, contents in frame:
            check(message, contents, peer, self.table, self._router.sent)
            if isinstance(message, inference_messages.Answers):
                for item, tensors in zip(message.items, contents, strict=True):
                    self._latest, self._spent = tensors, item.spent
                    if item.is_last:
                        self._handle(events.Answered(item.attempt))
                self._latest = {}
            elif isinstance(message, inference_messages.Note):
                self._handle(events.Received(peer, message))

    def edge_down(self, outbox: Outbox, *, is_polite: bool) -> None:
        peer = outbox.edge.peer
        if self._edges.get(peer) is outbox:
            del self._edges[peer]
            self._silent.discard(peer)
            self._handle(events.Lost(peer, is_polite))

    async def look(self) -> None:
        """Check deadlines and silent replicas periodically, until cancelled."""
        while True:
            if not self._calls:
                self._is_busy.clear()
                try:
                    async with asyncio.timeout(IDLE_S):
                        await self._is_busy.wait()
                except TimeoutError:
                    pass
            await asyncio.sleep(POLL_S)
            self._handle(events.Ticked())
            for model, route in self.table.routes.items():
                is_wanted = route.on_demand and self._router.pending(model)
                if is_wanted and self.missing(model):
                    self.on_missing(model)
            self._look_for_silence()

    def _look_for_silence(self) -> None:
        for name, outbox in list(self._edges.items()):
            is_silent = outbox.silent_s() > SILENT_S
            if is_silent != (name in self._silent):
                (self._silent.add if is_silent else self._silent.discard)(name)
                self._handle(events.Silent(name, is_silent))

    # Actions.

    def _handle(self, event: events.Event) -> None:
        now = self._clock()
        to_send: dict[str, list[tuple[WorkItem, Tensors]]] = {}
        for action in self._router.handle(event, now):
            match action:
                case actions.Dispatch(replica, (number, nth), is_isolated):
                    call = self._calls[number]
                    via = call.job.via
                    if nth > 1:
                        call.origin = call.origin.recovered()
                    trace = call.begin_trace() if nth > 1 else call.trace
                    if call.sent_at is None:
                        call.sent_at, call.replica = now, replica
                    if trace is not None and trace.is_computed:
                        trace.hedge(nth, replica, now)
                    elif trace is not None:
                        trace.attempt(nth, (replica,), now)
                    item = WorkItem(
                        (self.name, number, nth),
                        call.deadline_at - now,
                        is_isolated,
                        call.job.session,
                        {str(k): v for k, v in via.items()} if via else None,
                        call.job.share,
                        origin=call.origin,
                    )
                    to_send.setdefault(replica, []).append((item, call.tensors))
                case actions.Cancel(replica, attempt):
                    if replica in self._edges:
                        cancel = inference_messages.Cancel((self.name, *attempt))
                        self._edges[replica].put(cancel)
                case actions.Deliver(number):
                    self.counts["answered"] += 1
                    self._deliver(number, self._latest)
                case actions.Reject(number, error):
                    self.counts[type(error).__name__] += 1
                    self._deliver(number, error)
                case actions.Replayed(number, replica, why):
                    self.counts["replayed"] += 1
                    call = self._calls[number]
                    what = f"is replayed (was at {replica}): {why}"
                    about = {"request": call.origin.request}
                    logger.info("%s %s", _name(call.origin), what, extra=about)
                    if (trace := call.begin_trace()) is not None:
                        trace.lost(what, now)
        for replica, pieces in to_send.items():
            header = inference_messages.Work(tuple(item for item, _ in pieces))
            outbox = self._edges[replica]
            # With only one request in flight, there is no need to wait for others to
            # share the frame.
            put = outbox.put_now if len(self._calls) == 1 else outbox.put
            put(header, [tensors for _, tensors in pieces])

    def _deliver(self, number: int, what: Tensors | ServeError) -> None:
        call = self._calls.get(number)
        if call is None or call.answered.done():  # the request was just withdrawn
            return
        if isinstance(what, ServeError):
            call.answered.set_exception(what)
        else:
            call.spent = self._spent
            call.answered.set_result(what)


def _name(origin: Origin) -> str:
    return f"request {origin.request}" if origin.request else "a probe"
