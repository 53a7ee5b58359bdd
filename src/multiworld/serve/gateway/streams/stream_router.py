"""Stream router: the recovery of streams at one gateway. Pure.

The gateway is the authority on a stream: delivered tokens never change. When a part of
a stream's chain fails, the stream continues as another *attempt*, and tokens of earlier
attempts are ignored. Other replicas replace the lost ones, and rebuild their KV from
the activation logs of the remaining replicas. If that fails repeatedly, or if the
stream may be the cause, the stream starts over on any replicas, from its prompt and
delivered tokens.

The router learns of a failure from a lost edge (``Disconnected``), a stream that a
neighbour returns (``SequenceFailed``), silence (``Ticked.silent``), or a gap in the
tokens. All lead to ``_retry``; only a lost edge counts as a loss.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from multiworld import errors
from multiworld.serve.deadlines import DOUBTED_S, KEPT_S
from multiworld.serve.gateway.streams import actions as act
from multiworld.serve.gateway.streams import events
from multiworld.serve.gateway.streams.chain_selection import ChainSelection
from multiworld.serve.gateway.streams.moves import Moves
from multiworld.serve.gateway.streams.poison_search import Suspects
from multiworld.serve.gateway.streams.stream import (
    Chain,
    Hit,
    Kind,
    Phase,
    Returned,
    Stream,
    StreamIndex,
    StreamTimers,
    WaitingStreams,
)
from multiworld.serve.gateway.streams.stream_counts import StreamCounts
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.queueing.queue_limits import WaitingTenants
from multiworld.serve.routing import refusals
from multiworld.serve.routing.attainment import Attainment
from multiworld.serve.routing.replica_view import ReplicaView
from multiworld.serve.wire import generation_messages, protocol
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.generation_messages import SequenceStart, TokenItem
from multiworld.serve.wire.protocol import Key
from multiworld.serve.wire.routing_table import Route, RoutingTable

# If an event causes more actions than this, the messages to each replica are merged.
MANY = 64
# The pause before the next attempt is ``PAUSE_S`` * 2 ** ``Stream.returns`` seconds, at
# most ``LONGEST_PAUSE_S``; the first retry has no pause.
PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0


class StreamRouter:
    """State of all streams of one gateway."""

    def __init__(self, name: str, chance: Callable[[], float]) -> None:
        self.name, self.view = name, ReplicaView()
        # From 0 on, because Prometheus sees no increase of a count's first value.
        self.counts: Counter[str] = Counter(cut=0, replayed=0)
        self.timed, self.attainment = StreamCounts(), Attainment()
        self._index = StreamIndex()
        # Streams by number, until their clients close them.
        self.streams = self._index.all
        self._waiting, self._timers = WaitingStreams(), StreamTimers()
        self._retried: list[Stream] = []
        # Streams without a token, by model.
        self.without_token: defaultdict[str, WaitingTenants]
        self.without_token = defaultdict(WaitingTenants)
        self._suspects = Suspects()
        # True: a suspect ended or was cleared, so waiting suspects may get a chain.
        self._has_room_for_suspects = False
        self._chains = ChainSelection(self.view, chance)
        self._moves = Moves(
            name,
            self._chains,
            self._index,
            self._send,
            self._end_at,
            self._log,
            self.counts,
        )
        self._actions: list[act.Action] = []
        self._now = 0.0

    def handle(self, event: events.Event, now: float) -> list[act.Action]:
        """Apply an event; return the actions to carry out, in order."""
        self._now = now
        match event:
            case events.Opened(stream):
                self._open(stream)
            case events.Closed(number, error):
                self._close(self.streams[number], error)
            case events.TableChanged(table):
                self._table_changed(table)
            case events.Connected(replica):
                self._connected(replica)
            case events.Disconnected(replica, is_polite):
                self._disconnected(replica, is_polite=is_polite)
            case events.Received(replica, messages):
                self._received(replica, messages)
            case events.Ticked(silent, resumed_at):
                self._ticked(silent, resumed_at)
            case events.TenantQuarantined(tenant, model):
                self._quarantine(tenant, model)
            case events.RequestCancelled(request):
                self._cancel(request)
        if self._has_room_for_suspects:
            self._has_room_for_suspects = False
            self._place_waiting()
        actions, self._actions = self._actions, []
        return act.merged(actions) if len(actions) > MANY else actions

    # Queries.

    def load(self) -> dict[str, int]:
        return dict(+self._chains.load)

    def waiting(self, model: str) -> int:
        """Return the number of a model's streams that have no chain."""
        return self._waiting.count(model)

    def route(self, model: str) -> Route:
        route = self.view.table.routes.get(model)
        if route is None:
            raise refusals.unknown_model(model)
        return route

    def check_room(self, model: str, share: Share, count: int = 1) -> None:
        """Raise OverloadedError if ``count`` more streams do not fit in the queue."""
        waiting = self.without_token[model]
        limit = self.route(model).max_queued_requests + 1
        if count > limit:
            raise errors.InvalidRequestError(
                f"request has {count} completions, but max_queued_requests of model "
                f"{model!r} allows {limit}; request fewer",
                param="n",
            )
        if waiting.is_full(share, limit, count):
            self.attainment.arrived[model] += 1
            error = refusals.overloaded(model, waiting.of(share.tenant))
            self.attainment.count(model, error, is_late=True)
            raise error

    # Clients.

    def _open(self, stream: Stream) -> None:
        self.streams[stream.number] = stream
        self._waiting.add(stream)
        self._timers.watch(stream)
        self.without_token[stream.model].add(stream.share)
        self.attainment.arrived[stream.model] += not stream.via
        self._place(stream)

    def _close(self, stream: Stream, error: BaseException | None) -> None:
        del self.streams[stream.number]
        self._end(stream)
        if stream.via:
            return  # probes are not counted
        took_s = stream.last_at - (stream.first_at or 0.0)
        self.timed.ended(
            stream.model, stream.prompt, stream.made, took_s, stream.made_here
        )
        is_late = self._is_late(stream)
        self.attainment.count(stream.model, error, is_late=is_late)

    def _end(
        self, stream: Stream, error: errors.ServeError | act.Cut | None = None
    ) -> None:
        if stream.has_ended:
            return
        self._leave_chain(stream)
        self._waiting.remove(stream)
        self._clear(stream)
        if stream.first_at is None:
            self.without_token[stream.model].remove(stream.share.tenant)
        stream.become(Phase.ENDED)
        if error is not None:
            is_wanted = isinstance(error, act.Cut | errors.RequestCancelledError)
            is_cut = stream.made > 0 and not is_wanted
            self.counts["cut"] += is_cut
            self._actions.append(act.Deliver(stream.number, error))

    def _clear(self, stream: Stream) -> None:
        """Clear a stream of suspicion, so that other suspects can be computed."""
        self._has_room_for_suspects |= stream.group is not None
        self._suspects.leave(stream)
        stream.is_alone = False

    def _is_late(self, stream: Stream) -> bool:
        route = self.view.table.routes.get(stream.model)
        if route is None:
            return False
        first_at = stream.first_at
        if route.ttft_s is not None and not stream.earlier:
            until = self._now if first_at is None else first_at
            if until - stream.began_at > route.ttft_s:
                return True
        if route.tpot_s is None or first_at is None or stream.made_here < 2:
            return False
        return stream.last_at - first_at > route.tpot_s * (stream.made_here - 1)

    def _quarantine(self, tenant: str, model: str) -> None:
        """End the tenant's streams that wait for a chain of this model and have no
        token yet."""
        names = {model, f"{model}@{tenant}"}
        for stream, _ in self._waiting:
            is_its = stream.share.tenant == tenant and stream.model in names
            if is_its and not stream.made:
                self._end(stream, refusals.quarantined(model))

    def _cancel(self, request: str) -> None:
        """End the streams of a request."""
        for stream in list(self.streams.values()):
            if stream.origin.request == request:
                error = errors.RequestCancelledError("an operator has cancelled it")
                self._end(stream, error)

    # Replicas.

    def _table_changed(self, table: RoutingTable) -> None:
        self.view.table_changed(table)
        self._chains.table_changed(self._now)
        self._place_waiting()

    def _connected(self, replica: str) -> None:
        self.view.connect(replica)
        self._place_waiting()

    def _disconnected(self, replica: str, *, is_polite: bool) -> None:
        is_harmless = is_polite or self.view.is_leaving(replica)
        self.view.disconnect(replica)
        self._moves.lost(replica, self._now)
        there = self._index.at(replica)
        if not is_harmless:
            there += self._count_loss(replica)
        for stream in there:
            stream.returns = 0
            self._retry(stream, f"{replica} is gone")
        self._place_waiting()

    def _count_loss(self, replica: str) -> list[Stream]:
        """Charge a loss to its likely causes; return suspects that must restart."""
        found = ((s, s.hit_by(replica, self._now)) for s in self.streams.values())
        hits = {stream: hit for stream, hit in found if hit is not None}
        alone = _ran_alone(hits)
        # Each stream of ``alone`` ran alone at its stage-0 replica, but the lost
        # replica may also have computed steps of other stage-0 replicas.
        sources = {hits[s].source for s in alone}
        others = [
            s
            for s, hit in hits.items()
            if s.losses.has_begun and hit.source not in sources
        ]
        is_shared = len({id(s.group) for s in alone}) > 1 or bool(others)
        counted = [*alone, *others] if alone else [*hits]
        accused: list[Stream] = []
        for stream in counted:
            is_single = stream.is_single and hits[stream].is_alone
            counts = stream.losses.add(
                self._now,
                is_alone=is_single and not is_shared,
                is_shared=is_single and is_shared,
            )
            if counts and stream.losses.is_suspect:
                accused.append(stream)
            if counts and stream.is_single and not is_single:
                source = hits[stream].source
                has_others = any(hit.source != source for hit in hits.values())
                stream.unclear = stream.attempt, has_others
            stream.returned = None
        self._suspects.accuse(accused)
        moved = [s for s in counted if hits[s].has_left]
        return [s for s in moved if s.is_isolated and not s.has_ended]

    # Messages.

    def _received(self, replica: str, messages: Iterable[EdgeMessage]) -> None:
        """Handle the messages of a frame, up to the first unauthorised message."""
        try:
            for message in messages:
                self._message(replica, message)
        except protocol.MessageError as error:
            self._actions.append(act.Refuse(error))
        for stream in self._retried:
            if stream.number in self._waiting and stream.not_before <= self._now:
                self._place(stream)
        self._retried.clear()

    def _message(self, replica: str, message: EdgeMessage) -> None:
        match message:
            case generation_messages.Tokens(items):
                for item in items:
                    self._token(replica, item)
            case generation_messages.RunsAlone(key, is_over):
                self._runs_alone(replica, key, is_over=is_over)
            case generation_messages.ComputeBegun(keys):
                for key in keys:
                    stream = self._current(key)
                    if stream is not None:
                        _require(replica in stream.chain, key, replica)
                        stream.losses.has_begun = True
                        if stream.computing_at is None:
                            stream.computing_at = self._now
            case generation_messages.SequenceFailed(key, error, lacks):
                self._failed(replica, key, error, lacks)
            case generation_messages.SequencePrepared(key):
                self._prepared(replica, key)

    def _runs_alone(self, replica: str, key: Key, *, is_over: bool) -> None:
        stream, current = self._known(key), self._current(key)
        if current is not None:
            _require(replica in current.chain[:1], key, replica)
            current.is_alone, current.losses.has_begun = not is_over, True
        elif stream is not None and stream.unclear[0] == key[2] and not is_over:
            # ``RunsAlone`` was sent before the step that the loss interrupted, but it
            # arrived only after the loss was counted.
            _, is_shared = stream.unclear
            stream.unclear = -1, False
            if stream.is_single:
                stream.losses.was_alone(is_shared=is_shared)
                self._end_poison(stream)

    def _end_poison(self, stream: Stream) -> None:
        if stream.losses.is_poison:
            losses = stream.losses.isolated + stream.losses.shared
            poisoned = refusals.poisoned(stream.number, stream.model, losses)
            self._end(stream, poisoned)

    def _known(self, key: Key) -> Stream | None:
        """Return a key's stream at this gateway, whichever attempt the key names."""
        return self.streams.get(key[1]) if key[0] == self.name else None

    def _current(self, key: Key) -> Stream | None:
        """Return a key's stream if the key names its current attempt on a chain."""
        stream = self._known(key)
        is_current = stream is not None and stream.attempt == key[2]
        return stream if is_current and stream is not None and stream.chain else None

    def _token(self, replica: str, item: TokenItem) -> None:
        stream = self._current(item.key)
        if stream is None:
            return  # a token of an earlier attempt
        is_one_more = item.index < stream.sampling.max_tokens
        _require(is_one_more and replica == stream.chain[-1], item.key, replica)
        if item.index != stream.made:
            self._retry(stream, f"expected token {stream.made}, got {item.index}")
            return
        if not stream.made:
            self._note_noise(stream)
        stream.tokens.append(item.token)
        stream.losses.advance()
        if stream.group is not None and not stream.losses.is_suspect:
            self._clear(stream)
        stream.returned = None
        stream.returns = 0
        if stream.first_at is not None and not stream.via:
            took_s = self._now - stream.last_at
            self.timed.between(stream.model, took_s)
            stream.longest_s = max(stream.longest_s, took_s)
        stream.last_at = self._now
        if stream.first_at is None:
            stream.first_at = self._now
            self.without_token[stream.model].remove(stream.share.tenant)
            if stream.limits.between_tokens_s is not None:
                self._timers.watch(stream)
            if not stream.earlier and not stream.via:
                self._count_first(stream)
        self.counts["tokens"] += 1
        self._actions.append(act.Deliver(stream.number, item))
        if item.finish:
            if not stream.via:
                self.timed.finished(stream.model, item.finish)
            self._end(stream)

    def _count_first(self, stream: Stream) -> None:
        # ``ComputeBegun`` comes from another replica, and may arrive after the token.
        begun_at = self._now if stream.computing_at is None else stream.computing_at
        self.timed.first(stream.model, begun_at - stream.began_at, self._now - begun_at)

    def _failed(
        self, replica: str, key: Key, error: protocol.RemoteError | None, lacks: str
    ) -> None:
        stream = self._known(key)
        if stream is None:
            return
        if stream.move is not None and key[2] == stream.move.attempt:
            known = {*stream.move.chain.replicas, *stream.chain}
            _require(replica in known, key, replica)
            if error is None and replica in stream.chain:
                self._moves.log_is_gone(stream, replica, self._now)
            else:
                self._moves.give_up(stream, self._now)
        if self._current(key) is None:
            return
        _require(replica in stream.chain, key, replica)
        if error is not None:
            self._end(stream, error.error())
            return
        if self._now - stream.attempt_at > KEPT_S:
            # The attempt ran long enough to count as the first one that failed.
            stream.returns = 0
        failing_s = self._now - stream.failing_since if stream.returns else 0.0
        is_elsewhere = False
        is_there = lacks in stream.chain and lacks in self.view.connected
        if is_there and not stream.via and failing_s > DOUBTED_S:
            both = replica, lacks
            # Go elsewhere at once only if one of ``both`` was not yet avoided;
            # otherwise pause first, so that attempts stay rare.
            is_elsewhere = self._chains.avoid(both, self._now)
            is_elsewhere = is_elsewhere and any(map(self.view.others, both))
        returned = Returned(stream.chain, stream.is_alone, self._now)
        self._retry(stream, f"{replica} returned the stream", is_elsewhere=is_elsewhere)
        stream.returned = returned

    def _prepared(self, replica: str, key: Key) -> None:
        stream = self._known(key)
        if stream is None or stream.move is None or stream.move.attempt != key[2]:
            return
        _require(replica in stream.move.chain.replicas, key, replica)
        if not self._moves.prepared(stream, key[2], self._now):
            return
        self.counts["moved"] += 1
        move = self._moves.finish(stream)
        previous, attempt = stream.chain, stream.attempt
        self._chains.leave(previous)
        self._index.leave(stream)
        gone = [name for name in previous if name not in move.chain.replicas]
        self._end_at(gone, self._key(stream, attempt))
        stream.attempt = stream.next_attempt()
        self._begin(stream, move.chain, attempt, move.attempt)

    # Attempts.

    def _retry(self, stream: Stream, why: str, *, is_elsewhere: bool = False) -> None:
        """Queue another attempt of a stream, on the rest of its chain or elsewhere."""
        if stream.has_ended:
            return
        self.counts["replayed"] += not stream.via
        self._log(stream, f"is retried: {why}", is_loss=True)
        stream.origin = stream.origin.recovered()
        self._end_poison(stream)
        if stream.has_ended:
            return
        if not stream.returns:
            stream.failing_since = self._now
        is_kept = (
            not stream.is_single  # keep no KV that may be the cause of a loss
            and self._now - stream.failing_since < KEPT_S
            and not stream.via
            and not is_elsewhere
            and len(stream.chain) > 1  # else no other replica can keep KV
        )
        self._leave_chain(stream, is_kept=is_kept)
        self._retried.append(stream)
        stream.not_before = stream.losses.not_before
        if stream.returns and not is_elsewhere:
            pause_s = PAUSE_S * 2.0 ** min(stream.returns, 10)
            not_before = self._now + min(LONGEST_PAUSE_S, pause_s)
            stream.not_before = max(stream.not_before, not_before)
        stream.returns += 1

    def _leave_chain(self, stream: Stream, *, is_kept: bool = False) -> None:
        # With ``is_kept``, replicas keep the stream's KV for the next attempt, and
        # stage 0 pauses the stream.
        self._moves.drop(stream)
        if stream.number in self._waiting:
            self._waiting.remove(stream)
        key = self._key(stream, stream.attempt)
        if not stream.chain:  # ``kept`` replicas have the KV of an earlier attempt
            self._end_at(stream.kept, self._key(stream, stream.kept_attempt))
            stream.kept = ()
        elif is_kept:
            stream.kept, stream.kept_attempt = stream.chain, stream.attempt
            self._send(stream.kept[0], generation_messages.PauseSequences((key,)))
        else:
            self._end_at(stream.chain, key)
        if stream.chain:
            self._chains.leave(stream.chain)
            self._index.leave(stream)
            stream.chain = ()
            stream.attempt = stream.next_attempt()
        stream.is_alone = False
        stream.become(Phase.PAUSED if stream.kept else Phase.WAITING)
        self._waiting.add(stream)

    def _key(self, stream: Stream, attempt: int) -> Key:
        return self.name, stream.number, attempt

    def _end_at(self, replicas: Iterable[str], key: Key) -> None:
        for replica in replicas:
            # ``_send`` skips a disconnected replica, which has already ended all
            # sequences of this gateway.
            self._send(replica, generation_messages.EndSequences((key,)))

    def _send(self, replica: str, message: EdgeMessage) -> None:
        if replica in self.view.connected:
            self._actions.append(act.Send(replica, message))

    def _place_waiting(self) -> None:
        hopeless: set[Kind] = set()
        for stream, kind in self._waiting:
            if len(hopeless) == len(self._waiting.kinds):
                return
            if stream.not_before > self._now or kind in hopeless:
                continue
            if not self._place(stream):
                hopeless.add(kind)  # a stage has no replica for streams of this kind

    def _place(self, stream: Stream) -> bool:
        """Begin an attempt on a chain; return False if a stage has no replica."""
        avoided = self._suspects.kept_from(stream)
        # If the only replica of a chain returned the stream, prefer another replica.
        is_back = len(stream.left) == 1 and not stream.via
        chain = self._chains.choose(
            stream, avoided.union(stream.left if is_back else ())
        )
        if chain is None:
            route = self.view.table.routes.get(stream.model)
            if route is None and not stream.via:
                text = f"model {stream.model!r} is no longer served"
                self._end(stream, errors.UnknownModelError(text))
                return True
            if route is not None and route.on_demand:
                self._actions.append(act.RequestReplicas(stream.model))
            return False
        if avoided.intersection(chain.replicas):
            return True  # wait for the other group, so that a loss has a single cause
        gone = [name for name in stream.kept if name not in chain.replicas]
        is_kept = len(gone) < len(stream.kept)
        self._end_at(gone, self._key(stream, stream.kept_attempt))
        self._waiting.remove(stream)
        stream.kept = ()
        self._begin(stream, chain, stream.kept_attempt if is_kept else -1)
        return True

    def _begin(
        self, stream: Stream, chain: Chain, previous: int, prepared: int = -1
    ) -> None:
        """Begin the current attempt of a stream on a chain."""
        # ``previous``: the attempt whose KV some replicas keep; -1: none. ``prepared``:
        # the attempt for which the other replicas were prepared; -1: none.
        if stream.made and chain.version != stream.version:
            self._log(stream, f"continues with version {chain.version}")
        stream.version, stream.chain = chain.version, chain.replicas
        stream.attempt_at = self._now
        # Measure how long attempts fail from here, unless two or more have already
        # ended since the latest token.
        if stream.returns <= 1:
            stream.failing_since = self._now
        stream.become(Phase.COMPUTING)
        start = SequenceStart(
            self._key(stream, stream.attempt),
            tuple(stream.tokens),
            stream.prompt,
            stream.chain,
            stream.sampling,
            stream.share,
            previous,
            bool(stream.via),
            stream.is_isolated,
            prepared,
            # Also after an attempt has ended without a counted loss: a lost replica may
            # be the cause, and this gateway may notice the loss only later.
            is_watched=stream.losses.counted > 0 or stream.returns > 0,
            adapter=stream.adapter,
            group=stream.group.number if stream.group and stream.is_isolated else 0,
            origin=stream.origin,
        )
        self._note_fingerprints(stream)
        self._chains.enter(stream)
        self._index.enter(stream)
        for replica in stream.chain:
            self._send(replica, generation_messages.BeginSequences((start,)))

    def _note_noise(self, stream: Stream) -> None:
        """Record the noise of a sampling stream's first token, for later attempts."""
        last = self.view.table.replicas.get(stream.chain[-1])
        if last is not None and stream.sampling.temperature > 0.0:
            stream.noise = last.noise

    def _note_fingerprints(self, stream: Stream) -> None:
        if stream.via:
            return  # a probe, whose tokens nobody reads
        for stage, name in enumerate(stream.chain):
            found = self.view.table.replicas[name].fingerprint
            if not found:
                # A replica that drains before it has loaded has no fingerprint.
                continue
            before = stream.fingerprints.setdefault(stage, found)
            if found != before:
                stream.fingerprints[stage] = found
                self.counts["other_kind"] += 1
                text = (
                    f"continues on other hardware in stage {stage}, so its tokens may "
                    f"differ: {found} in place of {before}"
                )
                self._log(stream, text, is_warning=True)

    # Time.

    def _ticked(self, silent: frozenset[str], resumed_at: float) -> None:
        for stream in self._timers.due(self._now, self.streams):
            if stream.has_ended:
                continue
            late = stream.late(self._now, resumed_at)
            if late:
                error = self._too_late(stream, late)
                is_cut = self._now > stream.deadline_at and not stream.via
                self._end(stream, act.Cut(error) if is_cut else error)
            else:
                self._timers.watch(stream, resumed_at)
        # Set silent replicas before any stream is placed, so that none goes to one.
        self.view.set_silent(silent)
        for name in silent:
            others = self.view.others(name)
            noises = {None, *(other.noise for other in others)}
            for stream in self._index.at(name) if others else ():
                if not stream.via and stream.noise in noises:
                    self._retry(stream, f"{name} is silent")
        for stream, chain in self._moves.to_restart(self._now):
            self.counts["moved"] += 1
            self._leave_chain(stream)
            self._waiting.remove(stream)
            self._begin(stream, chain, previous=-1)
        self._moves.tick(silent, self._now)
        self._chains.tick(self._now)
        self._place_waiting()

    def _too_late(self, stream: Stream, late: str) -> errors.ServeError:
        missing = self.view.missing(stream.model, stream.version)
        if missing and not (stream.chain or stream.via):
            route = self.view.table.routes.get(stream.model)
            is_refused = route is not None and route.is_refused
            return refusals.without_replica(
                stream.model, missing[0], is_refused=is_refused
            )
        return errors.DeadlineExceededError(late)

    def _log(
        self,
        stream: Stream,
        what: str,
        *,
        is_warning: bool = False,
        is_loss: bool = False,
    ) -> None:
        number, request = stream.number, stream.origin.request
        text = f"{stream.name} {what}"
        self._actions.append(act.Log(text, number, request, is_warning, is_loss))


def _ran_alone(hits: Mapping[Stream, Hit]) -> list[Stream]:
    """Return the streams whose stage-0 replicas had only their groups' steps in flight.

    If one member of a group is known to have run so, all did: the reports of the others
    may still be on their way.
    """
    groups = {
        (stream.group.number, hit.source)
        for stream, hit in hits.items()
        if hit.is_alone and stream.group is not None
    }
    return [
        stream
        for stream, hit in hits.items()
        if hit.is_alone
        or (stream.group is not None and (stream.group.number, hit.source) in groups)
    ]


def _require(is_theirs: bool, key: Key, replica: str) -> None:
    if not is_theirs:
        raise protocol.MessageError(
            f"{replica} sent a message about sequence {key[1]} (attempt {key[2]}) of "
            f"{key[0]}, but does not compute it, or may not send such messages"
        )
