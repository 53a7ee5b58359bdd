"""Router: dispatch, replay, hedging and isolation of poison requests. Pure.

A router keeps each request until it is answered, and knows which replica holds each of
the request's attempts: the router chose the replica of stage 0, and every replica
reports the batches that it *begins*. When a replica is lost, the router treats its
requests as follows:

* A request that was only queued there is replayed at once. After two such losses it
  becomes a *suspect*.
* A request that was being computed may be a *poison request*, which kills replicas. It
  becomes a suspect at once or, if it was one of many in its batch, after a second loss.
  Suspects are replayed in *isolation*: one at a time, each alone in its batch, so that
  no other request is lost together with a poison request. A request is poison, and is
  refused, after two replicas died while they computed it in isolation.

A replica that has been silent for a fraction of a second receives no new work. The
requests that it holds are *hedged*: a second attempt goes to another replica, and the
first answer counts. Requests execute at least once; answers are delivered once.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator

from multiworld.errors import ServeError, UnknownModelError
from multiworld.serve.gateway.requests import events
from multiworld.serve.gateway.requests.actions import (
    Action,
    Cancel,
    Deliver,
    Dispatch,
    Reject,
    Replayed,
)
from multiworld.serve.gateway.requests.records import AttemptState, Queue, Request
from multiworld.serve.routing import refusals
from multiworld.serve.routing.load_balancer import Chance, choose
from multiworld.serve.routing.refusals import OutdatedError
from multiworld.serve.routing.replica_view import ReplicaView
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.inference_messages import Attempt
from multiworld.serve.wire.routing_table import Replica, Route, first_ready

# Seconds after a poison request during which its tenant's requests to the model run in
# isolation, behind other suspects.
ISOLATION_S = 60.0

# If deadlines exceed twice the number of requests by more than this, the router drops
# the deadlines of ended requests.
COMPACT = 1000


class Router:
    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._view = ReplicaView()
        self._requests: dict[int, Request] = {}
        self._queues: dict[str, Queue] = {}
        self._held: dict[str, dict[Attempt, None]] = {}
        # By replica whose connection ended: attempts that earlier stages held then. It
        # may have had them, without a report of its own.
        self._disconnected: dict[str, tuple[Attempt, ...]] = {}
        self._computing: dict[str, tuple[Attempt, ...]] = {}
        # Number of ended attempts that each replica still computes.
        self._abandoned: Counter[str] = Counter()
        self._deadlines: list[tuple[float, int]] = []
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    def load(self) -> dict[str, int]:
        return {name: len(held) for name, held in self._held.items()}

    def waiting(self, model: str) -> int:
        """Return the number of a model's waiting requests that were never sent."""
        queue = self._queues.get(model)
        return 0 if queue is None else queue.unsent.count

    def pending(self, model: str) -> int:
        """Return the number of waiting requests, including replays but not probes."""
        queue = self._queues.get(model)
        return 0 if queue is None else len(queue.regular) + len(queue.suspects)

    def missing(self, model: str) -> list[int]:
        route = self._view.table.routes.get(model)
        return [] if route is None else self._view.missing(model, route.version)

    def sent(self, number: int) -> tuple[events.Submitted, int] | None:
        """Return a request and its number of attempts; None if it has ended."""
        request = self._requests.get(number)
        return None if request is None else (request.job, request.attempted)

    def locations(self, number: int) -> list[str]:
        """Return the replicas that hold a request, or "waiting"; for error texts."""
        request = self._requests.get(number)
        if request is None:
            return []
        at = [state.replica for state in request.attempts.values()]
        return at or ["waiting"]

    def handle(self, event: events.Event, now: float) -> list[Action]:
        """Apply an event; return the actions to carry out, in order."""
        self._now = now
        match event:
            case events.Submitted():
                return self._submitted(event)
            case events.Received(replica, note):
                return self._received(replica, note)
            case events.Answered((number, nth)):
                return self._answered(number, nth)
            case events.TenantQuarantined(tenant, model):
                return self._tenant_quarantined(tenant, model)
            case events.Withdrawn(number):
                return self._end(number)
            case events.Connected(replica):
                self._view.connect(replica)
                return [*self._reconnected(replica), *self._pump_all()]
            case events.Lost():
                return self._lost(event)
            case events.Silent(replica, is_silent):
                return self._silence_changed(replica, is_silent)
            case events.TableChanged(table):
                before = self._view.table.routes
                self._view.table_changed(table)
                for name in self._disconnected.keys() - table.replicas.keys():
                    del self._disconnected[name]
                ended = self._reject_unserved()
                for name, route in table.routes.items():
                    if name in before and before[name].version != route.version:
                        ended += self._reject_outdated(name)
                return [*ended, *self._pump_all()]
            case events.Ticked():
                return self._expire(now)

    # Submission and completion.

    def _submitted(self, job: events.Submitted) -> list[Action]:
        if self._is_outdated(job):
            return [Reject(job.number, _outdated(job))]
        queue = self._queues.setdefault(job.model, Queue())
        is_limited = job.via is None and not job.is_resumed
        if is_limited and self._is_full(queue, job):
            own = queue.unsent.of(job.share.tenant)
            return [Reject(job.number, refusals.overloaded(job.model, own))]
        self._requests[job.number] = request = Request(job)
        request.is_suspect = job.via is None and self._is_isolated(queue, job)
        heapq.heappush(self._deadlines, (job.deadline_at, job.number))
        self._enqueue(request)
        return self._pump(job.model)

    def _is_full(self, queue: Queue, job: events.Submitted) -> bool:
        """Return whether to shed a request: too many wait, and no replica has room."""
        limit = self._view.table.routes[job.model].max_queued_requests
        return queue.unsent.is_full(job.share, limit) and not self._has_room(job)

    def _has_room(self, job: events.Submitted) -> bool:
        queue, route = self._queues[job.model], self._view.table.routes[job.model]
        can_send = not queue.unsent.count and not self.missing(job.model)
        return can_send and self._target(Request(job), route, can_send=True) is not None

    def _reject_unserved(self) -> list[Action]:
        actions: list[Action] = []
        for model in self._queues.keys() - self._view.table.routes.keys():
            for request in list(self._requests.values()):
                if request.job.model == model and not request.attempts:
                    actions += self._reject(request.job.number, _unserved(model))
        return actions

    def _reject_outdated(self, model: str) -> list[Action]:
        """Reject waiting requests for an old version; leave those in flight."""
        outdated = [
            r
            for r in self._requests.values()
            if r.job.model == model and self._is_outdated(r.job)
        ]
        # Dequeue all of them first: ``_reject`` would send those that still wait.
        for request in outdated:
            if request.is_waiting:
                self._dequeue(request)
        return [
            action
            for request in outdated
            if not request.attempts
            for action in self._reject(request.job.number, _outdated(request.job))
        ]

    def _is_outdated(self, job: events.Submitted) -> bool:
        route = self._view.table.routes.get(job.model)
        return route is not None and job.version not in ("", route.version)

    def _answered(self, number: int, nth: int) -> list[Action]:
        if number not in self._requests:
            return []
        return [Deliver(number), *self._end(number, keep=nth)]

    def _failed(self, number: int, nth: int, error: ServeError) -> list[Action]:
        return self._reject(number, error, nth) if number in self._requests else []

    def _reject(
        self, number: int, error: ServeError, keep: int | None = None
    ) -> list[Action]:
        return [Reject(number, error), *self._end(number, keep)]

    def _end(self, number: int, keep: int | None = None) -> list[Action]:
        """Forget a request and cancel its attempts, except attempt ``keep``."""
        request = self._requests.pop(number, None)
        if request is None:
            return []
        queue = self._queues[request.job.model]
        if request.is_waiting:
            self._dequeue(request)
        actions: list[Action] = []
        for nth, state in request.attempts.items():
            self._held[state.replica].pop((number, nth), None)
            if nth != keep:
                self._abandoned[state.replica] += state.is_computed
                actions.append(Cancel(state.replica, (number, nth)))
        if queue.isolated == number:
            queue.isolated = None
        if len(self._deadlines) > 2 * len(self._requests) + COMPACT:
            left = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapq.heapify(left)
            self._deadlines = left
        return actions + self._pump(request.job.model)

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            request = self._requests.get(number)
            if request is not None:
                actions += self._reject(number, self._too_late(request))
        return actions

    def _too_late(self, request: Request) -> ServeError:
        job = request.job
        missing = self.missing(job.model)
        if missing and not request.attempts:
            route = self._view.table.routes.get(job.model)
            is_refused = route is not None and route.is_refused
            return refusals.without_replica(
                job.model, missing[0], is_refused=is_refused
            )
        at = ", ".join(self.locations(job.number)).replace("waiting", "the gateway")
        return refusals.too_late(job.model, at)

    # Progress.

    def _received(self, replica: str, note: inference_messages.Note) -> list[Action]:
        match note:
            case inference_messages.BatchBegun():
                return self._begun(replica, note)
            case inference_messages.WorkDropped(attempts, stage):
                return self._dropped(attempts, stage)
            case inference_messages.WorkReturned(attempts, stage):
                return self._dropped(attempts, stage, is_returned=True)
            case inference_messages.WorkStuck(attempts):
                return self._stuck(attempts)
            case inference_messages.WorkFailed((number, nth), error):
                return self._failed(number, nth, error.error())

    def _begun(
        self, replica: str, batch: inference_messages.BatchBegun
    ) -> list[Action]:
        models: dict[str, None] = {}
        for attempt, request, state in self._in_flight(batch.attempts):
            if self._stage_of(replica) >= self._stage_of(state.replica):
                self._move(attempt, state, replica)
                state.is_begun, state.is_isolated = True, batch.is_isolated
                state.is_done = False
            models[request.job.model] = None
        self._note_done(replica, batch.attempts)
        if replica not in self._view.connected:
            # The replica was lost before this message arrived.
            return self._lost(events.Lost(replica))
        return [action for model in models for action in self._pump(model)]

    def _in_flight(
        self, attempts: Iterable[Attempt]
    ) -> Iterator[tuple[Attempt, Request, AttemptState]]:
        """Yield the attempts that are in flight, with their requests and states."""
        for number, nth in attempts:
            request = self._requests.get(number)
            if request is not None and nth in request.attempts:
                yield (number, nth), request, request.attempts[nth]

    def _note_done(self, replica: str, attempts: tuple[Attempt, ...]) -> None:
        """Mark the previous batch as done: a replica computes one batch at a time."""
        before = self._computing.get(replica, ())
        for attempt, _, state in self._in_flight(before):
            if state.replica == replica and attempt not in attempts:
                state.is_done = True
        self._computing[replica] = attempts
        self._abandoned.pop(replica, None)

    def _stage_of(self, replica: str) -> int:
        known = self._view.table.replicas.get(replica)
        return -1 if known is None else known.stage

    def _move(self, attempt: Attempt, state: AttemptState, replica: str) -> None:
        if state.replica != replica:
            self._held.get(state.replica, {}).pop(attempt, None)
            state.replica = replica
        self._held.setdefault(replica, {})[attempt] = None

    # Failures.

    def _lost(self, event: events.Lost) -> list[Action]:
        # Requests are not to blame for the loss of a draining replica: if it drains for
        # too long, the service shuts it down.
        is_harmless = event.is_polite or self._view.is_leaving(event.replica)
        self._view.disconnect(event.replica)
        self._disconnected[event.replica] = self._before(event.replica)
        self._computing.pop(event.replica, None)
        self._abandoned.pop(event.replica, None)
        actions: list[Action] = []
        held = self._held.pop(event.replica, {})
        computed = sum(state.is_computed for _, _, state in self._in_flight(held))
        counted: set[int] = set()
        for number, nth in sorted(held):
            if number not in self._requests:
                continue  # rejected by this loop, for an earlier attempt
            request = self._requests[number]
            state = request.attempts.pop(nth)
            if not is_harmless and number not in counted:
                counted.add(number)  # a request with two attempts here had one loss
                self._add_loss(request, state, computed)
            if request.losses.is_poison:
                job, losses = request.job, request.losses.isolated
                self._isolate_tenant(job)
                error = refusals.poisoned(number, job.model, losses)
                actions += self._reject(number, error)
            else:
                why = "the replica left" if event.is_polite else "the replica was lost"
                actions += self._replay(request, event.replica, why)
        return actions + self._pump_all()

    def _isolate_tenant(self, job: events.Submitted) -> None:
        """Isolate a tenant's requests for ``ISOLATION_S``, behind other suspects."""
        tenant = job.share.tenant
        if not tenant:
            return  # clients without a key share this name, and are not isolated
        self._queues[job.model].isolated_until[tenant] = self._now + ISOLATION_S
        for request in self._requests_of(tenant, job.model):
            if request.is_waiting and not request.is_suspect:
                request.is_suspect = True
                self._enqueue(request)

    def _tenant_quarantined(self, tenant: str, model: str) -> list[Action]:
        """Reject a tenant's waiting requests; those in flight may still be answered."""
        actions: list[Action] = []
        for request in self._requests_of(tenant, model):
            if not request.attempts:
                error = refusals.quarantined(model)
                actions += self._reject(request.job.number, error)
        return actions

    def _requests_of(self, tenant: str, model: str) -> list[Request]:
        key = tenant, model
        return [
            request
            for request in self._requests.values()
            if (request.job.share.tenant, request.job.model) == key
            and request.job.via is None
        ]

    def _is_isolated(self, queue: Queue, job: events.Submitted) -> bool:
        return queue.isolated_until.get(job.share.tenant, 0.0) > self._now

    def _add_loss(
        self, request: Request, state: AttemptState | None = None, together: int = 1
    ) -> None:
        losses = request.losses
        losses.has_begun = state is not None and state.is_computed
        is_alone = losses.has_begun and state is not None and state.is_isolated
        losses.add(self._now, is_alone=is_alone, together=together)
        request.is_suspect |= request.losses.is_suspect

    def _dropped(
        self, attempts: tuple[Attempt, ...], stage: int, *, is_returned: bool = False
    ) -> list[Action]:
        """Replay attempts that did not reach ``stage``, or may not have reached it."""
        # ``is_returned``: no replica of the stage accepted them, which is not a loss.
        actions: list[Action] = []
        models: dict[str, None] = {}
        for attempt, request, state in self._in_flight(attempts):
            if self._stage_of(state.replica) >= stage:
                continue  # it did arrive; ``_lost`` handles the loss of its replica
            del request.attempts[attempt[1]]
            self._held[state.replica].pop(attempt, None)
            if not is_returned:
                self._add_loss(request)
            actions += self._replay(
                request, state.replica, "it did not reach the next stage"
            )
            models[request.job.model] = None
        return actions + [a for model in models for a in self._pump(model)]

    def _replay(self, request: Request, replica: str, why: str) -> list[Action]:
        """Queue a request for another attempt, unless one is in flight."""
        number = request.job.number
        queue = self._queues[request.job.model]
        if queue.isolated == number:
            queue.isolated = None
        if request.is_waiting and request.is_suspect and not request.attempts:
            self._enqueue(request)  # moves the request to the suspects
        if request.attempts:
            return []
        if self._is_outdated(request.job):
            return self._reject(number, _outdated(request.job))
        if request.job.model not in self._view.table.routes:
            return self._reject(number, _unserved(request.job.model))
        if request.is_waiting:
            return []
        self._enqueue(request)
        return [Replayed(number, replica, why)]

    def _silence_changed(self, replica: str, is_silent: bool) -> list[Action]:
        if not is_silent:
            self._view.set_silent(self._view.silent - {replica})
            # This replica continues the attempts that it holds. Dequeue their waiting
            # hedges, which might otherwise be sent to this replica, too.
            for _, request, _ in list(self._in_flight(self._held.get(replica, {}))):
                if request.is_waiting and not request.is_suspect:
                    self._dequeue(request)
            return self._pump_all()
        self._view.set_silent(self._view.silent | {replica})
        return self._stuck(tuple(sorted(self._held.get(replica, {}))))

    def _before(self, replica: str) -> tuple[Attempt, ...]:
        """Return the attempts that replicas of earlier stages hold."""
        replicas = self._view.table.replicas
        known = replicas.get(replica)
        if known is None:
            return ()
        return tuple(
            attempt
            for name, held in self._held.items()
            if (other := replicas.get(name)) is not None
            and (other.model, other.version) == (known.model, known.version)
            and other.stage < known.stage
            for attempt in held
        )

    def _reconnected(self, replica: str) -> list[Action]:
        """Hedge the requests that a replica may have ended while it was disconnected.

        Its process lives, so the replica before it does not report them as dropped.
        """
        stage = self._stage_of(replica)
        before = self._in_flight(self._disconnected.pop(replica, ()))
        attempts = tuple(
            attempt
            for attempt, _, state in before
            if self._stage_of(state.replica) < stage
        )
        return self._stuck(attempts, f"{replica} was disconnected for a moment")

    def _stuck(
        self,
        attempts: tuple[Attempt, ...],
        why: str = "this replica or the next one is silent",
    ) -> list[Action]:
        """Hedge requests that a replica holds or was sent, oldest first."""
        actions: list[Action] = []
        models: dict[str, None] = {}
        for (number, _), request, state in self._in_flight(sorted(attempts)):
            is_hedged = request.is_waiting or len(request.attempts) > 1
            if is_hedged or request.is_suspect or self._is_outdated(request.job):
                continue
            self._enqueue(request)
            actions.append(Replayed(number, state.replica, why))
            models[request.job.model] = None
        return actions + [a for model in models for a in self._pump(model)]

    # Queueing and sending.

    def _enqueue(self, request: Request) -> None:
        queue = self._queues[request.job.model]
        was_waiting, request.is_waiting = request.is_waiting, True
        job, number = request.job, request.job.number
        if job.via is not None:
            queue.probes.append(number)
        else:
            queue.regular.drop(number)  # the request may have become a suspect
            waiting = queue.suspects if request.is_suspect else queue.regular
            waiting.put(number, job.share, job.rows, number)
        if request.attempted == 0 and not was_waiting:
            queue.unsent.add(job.share)

    def _dequeue(self, request: Request) -> None:
        request.is_waiting = False
        queue, tenant = self._queues[request.job.model], request.job.share.tenant
        queue.regular.drop(request.job.number)
        queue.suspects.drop(request.job.number)
        if not request.attempted:
            queue.unsent.remove(tenant)

    def _pump_all(self) -> list[Action]:
        return [action for model in self._queues for action in self._pump(model)]

    def _pump(self, model: str) -> list[Action]:
        queue, route = self._queues[model], self._view.table.routes.get(model)
        actions: list[Action] = []
        if route is None or queue.is_empty:
            return actions
        number: int | None
        for number in queue.probes[:]:
            probe = self._requests.get(number)
            if probe is None or not probe.is_waiting:
                queue.probes.remove(number)
            elif (replica := self._target(probe, route, can_send=True)) is not None:
                queue.probes.remove(number)
                actions.append(self._send(probe, replica))
        can_send = not self.missing(model)
        if queue.isolated is None and (number := self._next_suspect(queue)) is not None:
            suspect = self._requests[number]
            replica = self._target(suspect, route, can_send=can_send)
            if replica is not None:
                queue.suspects.take(number)
                queue.isolated = number
                actions.append(self._send(suspect, replica))
        actions += self._send_regular(queue, route, can_send=can_send)
        return actions

    def _next_suspect(self, queue: Queue) -> int | None:
        """Return the next suspect; suspects of isolated tenants come last."""
        first = queue.suspects.next()
        if first is None or not queue.isolated_until:
            return first
        for number in queue.suspects.order():
            if not self._is_isolated(queue, self._requests[number].job):
                return number
        return first

    def _send_regular(
        self, queue: Queue, route: Route, *, can_send: bool
    ) -> list[Action]:
        actions: list[Action] = []
        while (number := queue.regular.next()) is not None:
            request = self._requests[number]
            replica = self._target(request, route, can_send=can_send)
            if replica is None:
                break
            queue.regular.take(number)
            actions.append(self._send(request, replica))
        if number is None or self._requests[number].job.session is None:
            return actions
        # The next request waits because its session's preferred replica has no room.
        # Later requests may go to other replicas.
        for number in list(queue.regular.order()):
            request = self._requests[number]
            if not self._is_any_free(request.job.model, route):
                break
            replica = self._target(request, route, can_send=can_send)
            if replica is not None:
                queue.regular.take(number)
                actions.append(self._send(request, replica))
            elif request.job.session is None:
                break
        return actions

    def _is_any_free(self, model: str, route: Route) -> bool:
        usable = self._view.usable(model, route.version, 0)
        return any(self._load(r.name) < route.max_ongoing_requests for r in usable)

    def _send(self, request: Request, replica: str) -> Dispatch:
        self._dequeue(request)
        request.attempted += 1
        nth = request.attempted
        request.attempts[nth] = AttemptState(replica, is_isolated=request.is_suspect)
        attempt = (request.job.number, nth)
        self._held.setdefault(replica, {})[attempt] = None
        return Dispatch(replica, attempt, request.is_suspect)

    def _target(self, request: Request, route: Route, *, can_send: bool) -> str | None:
        """Return the replica of stage 0 that can take a request now, or None."""
        via = request.job.via
        if via is not None:
            return self._probe_target(request.job, via, route)
        if not can_send:
            return None
        stage, limit = (request.job.model, route.version, 0), route.max_ongoing_requests
        if request.job.session is not None:
            home = self._view.home(*stage, request.job.session)
            return home if home and self._load(home) < limit else None
        usable = self._view.usable(*stage)
        chosen = choose(usable, self._load_of, self._chance)
        if chosen is not None and self._load(chosen.name) >= limit:
            usable = tuple(r for r in usable if self._load(r.name) < limit)
            chosen = choose(usable, self._load_of, self._chance)
        return None if chosen is None else chosen.name

    def _load(self, replica: str) -> int:
        return len(self._held.get(replica, ()))

    def _load_of(self, replica: Replica) -> int:
        return self._load(replica.name) + self._abandoned[replica.name]

    def _probe_target(
        self, job: events.Submitted, via: dict[int, str], route: Route
    ) -> str | None:
        probed = [self._view.table.replicas.get(name) for name in via.values()]
        version = next((r.version for r in probed if r is not None), route.version)
        if 0 in via:
            return via[0] if via[0] in self._view.connected else None
        replicas = self._view.connected_at(job.model, version, 0)
        candidates = first_ready(
            [r for r in replicas if r.name not in self._view.silent]
        )
        return choose(candidates, self._load, self._chance)


def _unserved(model: str) -> UnknownModelError:
    return UnknownModelError(f"model {model!r} is no longer served")


def _outdated(job: events.Submitted) -> OutdatedError:
    return OutdatedError(f"version {job.version} of {job.model!r} is not active")
