"""Recovery of one replica's sequences, from their start to their end. Pure.

Recovery has one rule: the input of every stage is logged. Stage 0 has the tokens, and
each other stage's input is in the activation log of the previous stage. When an attempt
begins, each replica, starting with the last stage, reports to the previous stage how
many tokens it has, and the previous stage replays the rest from its log. If that log
lacks rows, the previous stage rewinds to the first missing row, and its own previous
stage replays in turn. The tokens of stage 0 always suffice ("upstream backup", Hwang et
al., "High-Availability Algorithms for Distributed Stream Processing", 2005). A first
attempt without cached KV in stage 0 does not wait for reports: its first step announces
the sequence to the next stage.

A replica never decides which replicas compute a sequence. If it cannot continue a
sequence, it *returns* it to the gateway, and keeps the state until the gateway decides.
If the model raises an error for a sequence, the replica reports that, and the gateway
ends the stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from multiworld.errors import InvalidRequestError, ModelFailedError
from multiworld.serve.deadlines import UNCONFIRMED_S
from multiworld.serve.replica.scheduling.sample_costs import costs_of
from multiworld.serve.replica.scheduling.scheduled_sequence import ScheduledSequence
from multiworld.serve.replica.scheduling.scheduler import (
    Scheduler,
    TooManyTokensError,
)
from multiworld.serve.replica.scheduling.step_planner import PlannedStep
from multiworld.serve.replica.sequences import actions as act
from multiworld.serve.replica.sequences import events
from multiworld.serve.replica.sequences.kv_budget import KvBudget
from multiworld.serve.replica.sequences.sequence_state import (
    SequenceState,
    SequenceTable,
)
from multiworld.serve.wire import generation_messages
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.generation_messages import SequenceStart, StepPart
from multiworld.serve.wire.protocol import Key, RemoteError, StreamId

# Looks up a prompt in the prefix cache, and records the cached tokens.
FindPrefix = Callable[[SequenceState], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Identity and limits of a replica."""

    name: str  # name of this replica in the routing table
    stage: int  # number of its stage, from 0
    stage_name: str  # name of its stage, for error texts
    is_last: bool
    log_bytes: int  # maximum bytes of the activation log
    prefix_bytes: int = 0  # maximum bytes of the prefix cache
    overdue_s: float = 60.0  # seconds after which a step counts as lost in later stages


class Recovery:
    """Recovery state of the sequences of one replica."""

    def __init__(
        self,
        settings: ReplicaSettings,
        scheduler: Scheduler,  # used only in stage 0
        find_prefix: FindPrefix,
    ) -> None:
        self.name, self._stage = settings.name, settings.stage
        self._is_last, self._stage_name = settings.is_last, settings.stage_name
        self._scheduler, self._overdue_s = scheduler, settings.overdue_s
        self._find_prefix = find_prefix
        self.table = SequenceTable(is_last=settings.is_last)
        self.counts: Counter[str] = Counter()
        # Tokens that the last stage sampled in KV rebuilds. None: the sequence has
        # ended.
        self.sampled: dict[Key, int | None] = {}
        limits = scheduler.limits
        self._memory = KvBudget(limits.blocks, scheduler.pool.blocks_of, self._rank_of)
        self._connected: set[str] = set()
        self._watched: set[Key] = set()
        self._alone: frozenset[Key] = frozenset()
        self._evicted: list[generation_messages.KvEvicted] = []
        self._actions: list[act.Action] = []
        self._now = 0.0

    def handle(self, event: events.Event, now: float) -> list[act.Action]:
        """Apply an event to the state; return the actions to carry out, in order."""
        self._now = now
        match event:
            case events.Received(peer, message):
                self._received(peer, message)
            case events.Compiled(key):
                self._compiled(key)
            case events.Connected(peer):
                self._connected.add(peer)
            case events.Disconnected(peer):
                self._disconnected(peer)
            case events.GatewaysChanged(names):
                for state in self.table:
                    if state.key[0] not in names:
                        self._end(state.key)
            case events.Ticked(was_paused):
                if was_paused:
                    self._scheduler.steps.excuse(now)
                    self.table.excuse(now)
                for key in self.table.unconfirmed(now - UNCONFIRMED_S):
                    # The gateway has not announced the sequence: it has lost its edge
                    # to this replica, and will not report the end of the sequence
                    # either.
                    self.return_to_gateway([key])
                    self._end(key)
                for key in self._scheduler.steps.overdue(now, self._overdue_s):
                    text = f"later stages did not return sequence {key} in time"
                    self._actions.append(act.Warn(text))
                    self.return_to_gateway([key])
        return self.take()

    def take(self) -> list[act.Action]:
        """Return the actions since the last call, in order."""
        actions, self._actions = self._actions, []
        return actions

    def _send(
        self, peer: str, message: EdgeMessage, *, is_urgent: bool = False
    ) -> None:
        self._actions.append(act.Send(peer, message, is_urgent))

    # Messages.

    def _received(self, peer: str, message: EdgeMessage) -> None:
        match message:
            case generation_messages.BeginSequences(starts):
                for start in starts:
                    self._begin(start)
            case generation_messages.Step():
                self._begin_with(message)
            case generation_messages.PrepareSequence(start, stages):
                self._begin(start, stages)
            case generation_messages.FetchActivations(key, previous, begin):
                self._fetch(peer, key, previous, begin)
            case generation_messages.KvHeld(key, count):
                self._next_has(key, count)
            case generation_messages.PauseSequences(keys):
                for key in keys:
                    self._pause(key)
            case generation_messages.EndSequences(keys):
                for key in keys:
                    self._end(key)
            case generation_messages.KvEvicted():
                self._pass_back(message)
            case generation_messages.StepDone(number, tokens):
                self._scheduler.sampled(number, tokens, self._now)
            case generation_messages.KvRebuilt(key, token):
                state = self.table.get(key)
                if state is not None and not state.is_paused:
                    self._scheduler.resume(key, token)

    def _disconnected(self, peer: str) -> None:
        """End the sequences of a lost gateway; return sequences of a lost replica."""
        self._connected.discard(peer)
        for state in self.table:
            if state.key[0] == peer:
                self._end(state.key)
            elif peer in state.start.chain:
                self.return_to_gateway([state.key], lacks=peer)

    # The life of a sequence.

    def _begin_with(self, step: generation_messages.Step) -> None:
        """Begin the sequences of a step that their gateways have not announced yet."""
        for start in step.starts:
            # The step may arrive before this process knows that the gateway is
            # connected.
            is_new = self.table.is_new(start.key)
            if is_new:
                self._begin(start)
            state = self.table.get(start.key)
            if state is not None:
                # The next stage may not know the sequence.
                state.is_untold = not self._is_last
                state.announced_at = self._now if is_new else state.announced_at

    def _begin(self, start: SequenceStart, prepared: Sequence[int] = ()) -> None:
        """Add an attempt, and report its KV here to the previous stage."""
        if not self.table.is_new(start.key):
            # The previous stage has announced it already, or the sequence has ended.
            self.table.confirm(start.key)
            return
        state, next_has = self.table.begin(start, prepared)
        self._watched.difference_update(state.earlier)
        for old in state.earlier:
            self.sampled.pop(old, None)
        is_new = self._stage == 0 and len(start.tokens) == start.prompt
        if start.is_watched or is_new:
            self._watched.add(start.key)
        self._actions.append(act.Open(start))
        if not state.held:
            self._find_prefix(state)
        if self._stage == 0 and not self._schedule(state):
            # Stage 0 has no room to prepare the sequence.
            self.return_to_gateway([start.key])
            self._end(start.key)
        elif away := neighbours_of(start.chain, self._stage) - self._connected:
            # Some neighbours are not connected yet, or no longer.
            self.return_to_gateway([start.key], lacks=min(away))
        elif next_has is not None and not self._is_end(state):
            self._next_has(start.key, next_has)
        elif self._stage == 0 and not self._is_last and _is_fresh(state):
            # No later stage has KV of the sequence, so do not wait for a report.
            state.sent, state.is_untold = 0, True
            self._resolve(state)

    def _compiled(self, key: Key) -> None:
        """Start recovery if this is the last stage that takes part in it."""
        state = self.table.get(key)
        if state is None or not self._is_end(state):
            return
        if neighbours_of(state.start.chain, self._stage) <= self._connected:
            self._resolve(state)

    def _schedule(self, state: SequenceState) -> bool:
        """Reserve blocks, or continue earlier attempts; return whether that worked."""
        pool = self._scheduler.pool
        if state.prepared:
            return pool.reserve(state.earlier, state.key, len(state.start.tokens))
        for old in state.earlier:
            if old in pool.known:
                self._scheduler.move(old, _scheduled(state))
            elif old in pool.reserved:
                self._scheduler.take_over(old, _scheduled(state))
        return True

    def _is_end(self, state: SequenceState) -> bool:
        """Return whether no later stage takes part in the recovery of a sequence."""
        return self._is_last or (
            bool(state.prepared) and self._stage + 1 not in state.prepared
        )

    def _next_has(self, key: Key, held: int) -> None:
        """Send the next stage the rows that it lacks, as far as they are logged."""
        state = self.table.get(key)
        if state is None:
            self.table.note_early(key, held)
            return
        if state.sent is not None:  # the attempt has begun without this report
            return
        state.sent = held
        if held < state.logged:
            # Only an earlier stage can replay the rows before those logged here.
            state.held = state.logged = held
        begin, end = min(held, state.held), state.held
        is_moved = key in self._scheduler.pool.known
        if begin < end or is_moved:
            peer = state.start.chain[self._stage + 1]
            self._actions.append(act.SendLogged(peer, key, begin, end, is_moved))
            state.sent = end
        self._resolve(state)

    def _resolve(self, state: SequenceState) -> None:
        """Continue a sequence: all later stages are ready for it."""
        key, start, before = state.key, state.start, self._stage - 1
        if state.prepared and before not in state.prepared:
            self._fill(state)
        elif before >= 0:
            held = generation_messages.KvHeld(key, state.held)
            self._send(start.chain[before], held)
        elif state.is_paused:
            return
        elif key in self._scheduler.pool.known:
            self._scheduler.rewind(key, state.held)
            if self._is_last:  # no later stage will report that it has caught up
                self._scheduler.resume(key, None)
        else:
            self._add(state)

    def _add(self, state: SequenceState) -> None:
        sequence = _scheduled(state)
        sequence.rebuild = min(state.sent or 0, len(sequence.tokens))
        try:
            self._scheduler.add(sequence)
        except TooManyTokensError as error:
            self.fail(state.key, InvalidRequestError(str(error)))

    def _fill(self, state: SequenceState) -> None:
        """Request the rows of a prepared sequence that this stage lacks."""
        key, start, held = state.key, state.start, state.held
        if self._stage > 0:
            fetch = generation_messages.FetchActivations(key, start.previous, held)
            self._send(start.chain[self._stage - 1], fetch)
        else:
            self._actions.append(act.Rebuild(key, held, start.tokens[held:]))

    def _fetch(self, peer: str, key: Key, previous: int, begin: int) -> None:
        """Send a prepared replica of the next stage the rows that it lacks."""
        state = self.table.get((*key[:2], previous))
        if state is None or begin < state.logged:
            self._send(key[0], generation_messages.SequenceFailed(key))
            return
        end = max(begin, state.held)
        self._actions.append(act.SendLogged(peer, key, begin, end, True))

    def _end(self, key: Key) -> None:
        state = self.table.end(key)
        if state is None:
            return
        self.counts["requests"] += not (state.start.is_probe or state.prepared)
        self._scheduler.pool.remove(key)
        self.sampled.pop(key, None)
        self._watched.discard(key)
        self._memory.free(state.stream)
        self._actions.append(act.Forget(state.stream))

    def _pause(self, key: Key) -> None:
        self._scheduler.pause(key)
        state = self.table.get(key)
        if state is not None:
            state.is_paused = True

    def return_to_gateway(self, keys: Iterable[Key], lacks: str = "") -> None:
        """Pause sequences; their gateways decide how to continue them."""
        for key in keys:
            self._pause(key)
            failed = generation_messages.SequenceFailed(key, lacks=lacks)
            self._send(key[0], failed)

    def fail(self, key: Key, error: Exception) -> None:
        """End a sequence with an error that any other replica would raise, too."""
        if not isinstance(error, InvalidRequestError | ModelFailedError):
            text = f"stage {self._stage_name!r} raised {type(error).__name__}: {error}"
            error = ModelFailedError(text, stage=self._stage_name)
        self._end(key)
        failed = generation_messages.SequenceFailed(key, RemoteError.of(error))
        self._send(key[0], failed)

    # Memory.

    def _rank_of(self, stream: StreamId) -> tuple[bool, bool, int, int, str]:
        """Return the rank of a sequence, which is the same in all stages."""
        state = self.table.of(stream)
        if state is None:
            return True, True, 0, stream[1], stream[0]
        # When memory is scarce, first drop sequences that are only prepared, then the
        # lowest priority; within a priority, the latest first. Drop probes last,
        # because streams may be waiting for the replica that a probe makes ready.
        priority, is_probe = state.start.share.priority, state.start.is_probe
        return bool(state.prepared), not is_probe, -priority, stream[1], stream[0]

    def fit(self, parts: Sequence[StepPart]) -> list[int]:
        """Allocate memory for parts; return the indices of the parts that fit."""
        if self._stage == 0:
            return [*range(len(parts))]  # the scheduler has allocated the memory
        for part in parts:
            if part.begin == 0:  # the sequence is recomputed, and starts without memory
                self._memory.free(part.key[:2])
        wanted = {part.key[:2]: part.begin + part.count for part in parts if part.count}
        # To make room, ``take`` may drop any sequence, even one of these parts.
        evicted = {*self._memory.take(wanted)}
        for stream in evicted:
            self._evict(stream)
        return [n for n, part in enumerate(parts) if part.key[:2] not in evicted]

    def _evict(self, stream: StreamId) -> None:
        state = self.table.of(stream)
        if state is None:
            return
        self.counts["evicted"] += 1
        self._drop_computed(state)
        state.is_evicted = True
        if state.prepared:
            failed = generation_messages.SequenceFailed(state.key)
            self._send(state.key[0], failed)
        else:
            self._pass_back(generation_messages.KvEvicted(state.key, self.name))

    def _drop_computed(self, state: SequenceState) -> None:
        state.reset()
        self.sampled.pop(state.key, None)
        self._memory.free(state.stream)
        self._actions.append(act.DropComputed(state.stream))

    def ignore_cached(self, key: Key) -> None:
        """Forget a cached prefix if the next stage has not reported its KV.

        That stage may lack the prefix, because stage 0 begins a fresh sequence without
        any reports, and sends all rows of the sequence.
        """
        state = self.table.get(key)
        is_unreported = state is not None and state.sent is None and not self._is_last
        if state is not None and is_unreported and state.is_cached:
            self._drop_computed(state)

    def _pass_back(self, evicted: generation_messages.KvEvicted) -> None:
        """Report an eviction to stage 0, through the stages between."""
        if self._stage == 0:
            # ``preempt_evicted`` handles it between two steps.
            self._evicted.append(evicted)
            return
        state = self.table.get(evicted.key)
        if state is None:
            # The sequence may not have begun here yet, so its gateway decides.
            self.return_to_gateway([evicted.key])
        else:
            self._send(state.start.chain[self._stage - 1], evicted)

    def preempt(self, keys: Iterable[Key]) -> None:
        """Free the memory of sequences, here and in later stages of their chains."""
        by_peer: dict[str, list[Key]] = {}
        for key in keys:
            state = self.table.get(key)
            if state is None:
                continue
            self._drop_computed(state)
            if not self._is_last:
                peer = state.start.chain[self._stage + 1]
                by_peer.setdefault(peer, []).append(key)
        for peer, those in by_peer.items():
            self._send(peer, generation_messages.PreemptSequences(tuple(those)))

    # Steps.

    def preempt_evicted(self, now: float) -> None:
        """Preempt the sequences that later stages have evicted for lack of memory."""
        evicted, self._evicted = self._evicted, []
        for each in evicted:
            if self.table.get(each.key) is None:
                self.return_to_gateway([each.key])
                continue
            is_elsewhere = self._scheduler.evict(each.key, each.replica, now)
            self.preempt([each.key])
            if is_elsewhere:
                self.return_to_gateway([each.key])

    def next_step(self, now: float) -> PlannedStep | None:
        """Return the next step that the scheduler plans, if there is one now."""
        planned = self._scheduler.next_step(now)
        # Preempt these sequences even if there is no step now: the scheduler counts
        # their blocks as free, and a KV rebuild may take them.
        preempted = self._scheduler.pool.take_preempted()
        self.preempt(preempted)
        # Return paused ones: later stages may be waiting for their rows, which are
        # dropped now.
        self.return_to_gateway(filter(self._scheduler.pool.is_paused, preempted))
        if planned is None:
            return None
        keys = (part.key for part in planned.parts)
        self._note_alone(frozenset(keys if planned.is_alone else ()))
        return planned

    def _note_alone(self, keys: frozenset[Key]) -> None:
        """Report which suspects run alone now, and which no longer do."""
        # Both reports are sent before the step, because the step may crash this
        # process.
        before, self._alone = self._alone, keys
        for key in sorted(before - keys):
            over = generation_messages.RunsAlone(key, is_over=True)
            self._send(key[0], over, is_urgent=True)
        for key in sorted(keys - before):
            alone = generation_messages.RunsAlone(key)
            self._send(key[0], alone, is_urgent=True)

    def rebuild_part(self, key: Key, begin: int, count: int) -> StepPart | None:
        """Return the part of a KV rebuild that is still to be computed."""
        state = self.table.get(key)
        if state is None or state.is_evicted:
            return None
        lacking = state.lacking(begin, count)
        if lacking is None:
            self.return_to_gateway([key])
        if not lacking:
            return None
        end = begin + count
        is_all = end == len(state.start.tokens)
        samples = self._is_last and is_all and not state.prepared
        return StepPart(key, end - lacking, lacking, samples)

    def begun(self, parts: Iterable[StepPart]) -> None:
        """Report that watched sequences run, before they can crash this process."""
        if not self._watched:
            return
        began: dict[str, list[Key]] = {}
        for part in parts:
            if part.key in self._watched:
                self._watched.discard(part.key)
                began.setdefault(part.key[0], []).append(part.key)
        for gateway, keys in began.items():
            message = generation_messages.ComputeBegun(tuple(keys))
            self._send(gateway, message, is_urgent=True)

    def unlogged(self, streams: Iterable[StreamId]) -> None:
        """Record that the activation log dropped sequences."""
        for stream in streams:
            state = self.table.of(stream)
            if state is not None:
                state.logged = state.held

    def rebuilt(
        self, key: Key, rows: Mapping[Key, int], *, is_end: bool
    ) -> tuple[str, int, int] | None:
        """Continue after a piece of a KV rebuild; return the rows to send, or None."""
        # ``rows`` has the number of output rows of each sequence. ``is_end`` is True
        # for the last piece.
        state = self.table.get(key)
        if state is None or state.is_evicted:
            return None
        if state.prepared and self._is_end(state):
            if is_end:
                self._send(key[0], generation_messages.SequencePrepared(key))
            return None
        if not self._is_last:
            made = rows.get(key, 0)
            count = state.take_unsent(state.held - made, made)
            peer = state.start.chain[self._stage + 1]
            # The result: replica of the next stage, position of the first row, number
            # of rows.
            return peer, state.held - count, count
        if is_end:
            token = self.sampled.pop(key, None)
            resumed = generation_messages.KvRebuilt(key, token)
            self._send(state.start.chain[0], resumed)
        return None


def _is_fresh(state: SequenceState) -> bool:
    """Return whether a sequence has nothing to recover, and is not watched."""
    start = state.start
    is_first = not (state.earlier or state.prepared or state.held)
    is_watched = start.is_probe or start.is_suspect or start.is_watched
    # With a grammar, stage 0 must wait until the last stage has compiled the grammar.
    return is_first and not is_watched and not start.sampling.grammar


def neighbours_of(chain: Sequence[str], stage: int) -> set[str]:
    """Return the replicas of a chain that have edges to its replica of ``stage``."""
    found = {*chain[max(0, stage - 1) : stage + 2]}
    if stage in (0, len(chain) - 1):
        found |= {chain[0], chain[-1]}
    return found - {chain[stage]}


def _scheduled(state: SequenceState) -> ScheduledSequence:
    start = state.start
    return ScheduledSequence(
        start.key,
        list(start.tokens),
        start.share,
        state.held,
        is_probe=start.is_probe,
        is_suspect=start.is_suspect,
        group=(start.key[0], start.group) if start.group else None,
        route=start.chain,
        costs=costs_of(start.sampling, start.prompt),
    )
