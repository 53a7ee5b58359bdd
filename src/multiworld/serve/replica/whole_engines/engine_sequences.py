"""Sequences of a replica with a whole engine, and the scheduling of their runs. Pure.

Waiting sequences are admitted by fair queueing, at most ``max_num_seqs`` at once, so
that the engine's own queue stays empty. The tokens generated so far are kept here, so a
sequence can be aborted in the engine at any time and continue later. A *suspect* runs
alone, or with its group, until it has a few tokens; then the others run again. An
aborted run keeps its slot until the engine has stopped it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from multiworld.errors import InvalidRequestError, ModelFailedError
from multiworld.serve.engine.external.whole_engine import (
    WARM_UP,
    BusyError,
    EngineLostError,
    EngineSettings,
    EngineToken,
    RequestRefusedError,
    Run,
)
from multiworld.serve.queueing.fair_queue import FairQueue
from multiworld.serve.replica.sequences.actions import Send
from multiworld.serve.replica.sequences.events import (
    Disconnected,
    GatewaysChanged,
    Received,
)
from multiworld.serve.routing.poison_rules import PROOF_TOKENS
from multiworld.serve.wire import generation_messages
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.generation_messages import (
    Sampling,
    SequenceStart,
    TokenItem,
)
from multiworld.serve.wire.protocol import Key, RemoteError, StreamId

# Number of runs in a row without a token after which a trial run tests the engine. If
# the trial run gets a token, the sequences were at fault; otherwise the engine is lost.
MAX_FAILURES = 8
OWN_FAILURES = 4  # the same limit for the runs of a single sequence
KEPT_FAILURES = 1024  # maximum number of sequences whose failed runs are remembered


@dataclass(frozen=True, slots=True)
class Generated:
    """The engine generated tokens in a run."""

    run: int
    tokens: Sequence[EngineToken]


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The engine ended a run by itself; ``error``: what it raised, or None."""

    run: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class RunOver:
    """A run has left the engine, after its end or an abort."""

    run: int


Event = Received | Disconnected | GatewaysChanged | Generated | RunEnded | RunOver


@dataclass(frozen=True, slots=True)
class Begin:
    """Start a run in the engine."""

    number: int
    run: Run


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort a run in the engine."""

    number: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Exit this process, so that the replica is replaced: the engine is unusable."""

    text: str


Action = Send | Begin | Abort | GiveUp


class Phase(StrEnum):
    QUEUED = "queued"  # waits for a slot, in the order of fair queueing
    PROBE = "probe"  # waits ahead of all others
    SUSPECT = "suspect"  # waits until nothing else runs
    MOVING = "moving"  # waits for a slot in which to be prepared
    CONTINUING = "continuing"  # waits to run in the slot in which it was prepared
    RUNNING = "running"
    HELD = "held"  # prepared; its slot is reserved until its gateway continues it
    DOUBTED = "doubted"  # too many runs without a token; a trial run tests the engine
    OVER = "over"  # kept only until its gateway ends it


WAITING = (
    Phase.QUEUED,
    Phase.PROBE,
    Phase.SUSPECT,
    Phase.MOVING,
    Phase.CONTINUING,
)

# The phases that may follow each phase. A sequence may be forgotten in every phase.
TRANSITIONS: dict[Phase | None, frozenset[Phase]] = {
    None: frozenset(WAITING),
    **dict.fromkeys(WAITING, frozenset({Phase.RUNNING})),
    # A sequence waits again if its run was aborted: to let a suspect run alone, or to
    # free the extra slot of a suspect that has proved itself.
    Phase.RUNNING: frozenset({*Phase} - {Phase.RUNNING, Phase.CONTINUING}),
    Phase.HELD: frozenset(),
    Phase.DOUBTED: frozenset({Phase.OVER}),
    Phase.OVER: frozenset(),
}


@dataclass(slots=True, eq=False)
class EngineSequence:
    """One attempt of a sequence."""

    start: SequenceStart
    ends: tuple[int, ...]
    is_prepared: bool
    arrived: int
    tokens: list[int] = field(default_factory=list)  # the prompt, and the output so far
    run: int = 0  # number of its run; 0 while it does not run
    phase: Phase | None = None  # None: it was not added yet, or is forgotten
    doubt: str = ""  # why it is in phase DOUBTED

    @property
    def key(self) -> Key:
        return self.start.key

    @property
    def group(self) -> tuple[str, int] | None:
        """Group of suspects that it runs with (gateway and number); None: alone."""
        return (self.key[0], self.start.group) if self.start.group else None

    @property
    def made(self) -> int:
        """Number of tokens generated in this attempt."""
        return len(self.tokens) - len(self.start.tokens)

    @property
    def waiting_phase(self) -> Phase:
        """The phase in which it waits for a slot."""
        if self.is_prepared:
            return Phase.MOVING
        if self.start.is_probe:
            return Phase.PROBE
        is_suspect = self.start.is_suspect and self.made < PROOF_TOKENS
        return Phase.SUSPECT if is_suspect else Phase.QUEUED

    def next_run(self) -> Run:
        start = self.start
        sampling, ends = start.sampling, self.ends
        if self.is_prepared:
            sampling, ends = WARM_UP, ()
        prompt = len(self.tokens) if self.is_prepared else start.prompt
        return Run(
            tuple(self.tokens),
            prompt,
            sampling,
            ends,
            start.share.tenant,
            start.adapter,
            start.origin,
        )


class EngineSequences:
    """The sequences of one replica."""

    def __init__(
        self,
        settings: EngineSettings,
        check: Callable[[Sampling], None],
        # Returns how a token ends a sequence, as ``sampler.finish_of`` does.
        finish_of: Callable[[int, int, Sampling, Sequence[int]], str],
    ) -> None:
        self.settings, self._check, self._finish_of = settings, check, finish_of
        # Number of events since the start, by kind.
        self.counts: Counter[str] = Counter()
        self._known: dict[StreamId, EngineSequence] = {}
        self._runs: dict[int, EngineSequence] = {}
        # Numbers of ended runs that are still in the engine.
        self._leaving: set[int] = set()
        self._in: dict[Phase, dict[StreamId, EngineSequence]] = {p: {} for p in Phase}
        self._queue: FairQueue[StreamId] = FairQueue()  # the sequences in phase QUEUED
        # ``_alone``: suspects that run in isolation now. ``_after``: suspects that last
        # ran in isolation; empty once another sequence has got a token.
        self._alone: list[EngineSequence] = []
        self._after: list[EngineSequence] = []
        self._failures = 0
        self._failures_of: Counter[StreamId] = Counter()
        # Number of the trial run that tests the engine; 0: there is none.
        self._trial = 0
        self._is_proved = False  # the engine has produced tokens since the trial began
        self._numbers, self._arrivals = 0, 0
        self._actions: list[Action] = []

    def __len__(self) -> int:
        return len(self._known)

    @property
    def running(self) -> int:
        return len(self._runs)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for a slot in the engine."""
        return sum(len(self._in[phase]) for phase in WAITING)

    def handle(self, event: Event) -> list[Action]:
        """Apply an event to the state; return the actions to carry out, in order."""
        match event:
            case Received(_, message):
                self._received(message)
            case Disconnected(peer):
                self._end_those(s for s in self._known.values() if s.key[0] == peer)
            case GatewaysChanged(names):
                known = self._known.values()
                self._end_those(s for s in known if s.key[0] not in names)
            case Generated(number, tokens):
                self._generated(number, tokens)
            case RunEnded(number, error):
                self._run_ended(number, error)
            case RunOver(number):
                self._leaving.discard(number)
        self._admit()
        actions, self._actions = self._actions, []
        return actions

    def _become(self, sequence: EngineSequence, phase: Phase | None) -> None:
        """Move a sequence to another phase; None: forget it."""
        before, stream = sequence.phase, sequence.key[:2]
        if phase is not None and phase not in TRANSITIONS[before]:
            raise AssertionError(f"{sequence.key} cannot go from {before} to {phase}")
        if before is not None:
            del self._in[before][stream]
        if before is Phase.QUEUED:
            self._queue.drop(stream)
        sequence.phase = phase
        if phase is None:
            del self._known[stream]
            return
        self._in[phase][stream] = sequence
        if phase is Phase.QUEUED:
            cost = float(len(sequence.tokens))
            self._queue.put(stream, sequence.start.share, cost, sequence.arrived)

    def _send(self, message: EdgeMessage, key: Key, *, is_urgent: bool = False) -> None:
        self._actions.append(Send(key[0], message, is_urgent))

    # Messages.

    def _received(self, message: EdgeMessage) -> None:
        match message:
            case generation_messages.BeginSequences(starts):
                for start in starts:
                    self._begin(start, is_prepared=False)
            case generation_messages.PrepareSequence(start):
                self._begin(start, is_prepared=True)
            case generation_messages.EndSequences(
                keys
            ) | generation_messages.PauseSequences(keys):
                known = (self._known.get(key[:2]) for key in keys)
                pairs = zip(known, keys, strict=True)
                self._end_those(s for s, key in pairs if s is not None and s.key == key)

    def _begin(self, start: SequenceStart, *, is_prepared: bool) -> None:
        stream = start.key[:2]
        before, has_slot = self._known.get(stream), stream in self._in[Phase.HELD]
        if before is not None:
            self._forget(before)
        try:
            self._check(start.sampling)
        except InvalidRequestError as error:
            self._fail(start.key, error)
            return
        except Exception as error:
            # The check belongs to an adapter, which may raise anything.
            text = f"the engine's check raised {type(error).__name__}: {error}"
            self._fail(start.key, ModelFailedError(text, stage="0"))
            return
        own = () if start.sampling.ignore_eos else self.settings.end_tokens
        ends = (*own, *start.sampling.stop_token_ids)
        self._arrivals += 1
        self._known[stream] = sequence = EngineSequence(
            start, ends, is_prepared, self._arrivals, list(start.tokens)
        )
        continues = has_slot and not start.is_suspect
        phase = Phase.CONTINUING if continues else sequence.waiting_phase
        self._become(sequence, phase)

    def _end_those(self, sequences: Iterable[EngineSequence]) -> None:
        for sequence in list(sequences):
            self._end(sequence)

    def _end(self, sequence: EngineSequence) -> None:
        is_counted = not (sequence.start.is_probe or sequence.is_prepared)
        self.counts["requests"] += is_counted
        self._forget(sequence)

    def _forget(self, sequence: EngineSequence) -> None:
        self._take_back(sequence)
        self._become(sequence, None)

    def _fail(self, key: Key, error: InvalidRequestError | ModelFailedError) -> None:
        failed = generation_messages.SequenceFailed(key, RemoteError.of(error))
        self._send(failed, key)

    # The engine.

    def _admit(self) -> None:
        """Start runs of all sequences that may run now."""
        if self._alone or (self._trial and not self._is_proved):
            return
        # No suspect beside a trial: it would be blamed for the trial's failure.
        if self._in[Phase.SUSPECT] and not self._trial and not self._owes_turn():
            for other in list(self._runs.values()):
                self._take_back(other)
                self._become(other, other.waiting_phase)
            if not self._leaving:
                self._run_alone(self._next_group())
            return
        while (probe := self._first(Phase.PROBE)) is not None:
            self._run(probe)
        while self._used_slots() <= self.settings.max_num_seqs:
            continuing = self._first(Phase.CONTINUING)
            if continuing is None:
                break
            self._run(continuing)
        while self._used_slots() < self.settings.max_num_seqs:
            # Moving sequences have already run elsewhere, so they precede queued ones.
            following = self._first(Phase.MOVING)
            if following is None:
                stream = self._queue.next()
                if stream is None:
                    return
                self._queue.take(stream)
                following = self._known[stream]
            self._run(following)

    def _first(self, phase: Phase) -> EngineSequence | None:
        """Return the sequence that has been in a phase for longest."""
        return next(iter(self._in[phase].values()), None)

    def _used_slots(self) -> int:
        """Return the number of slots that are in use or reserved."""
        held = len(self._in[Phase.HELD]) + len(self._in[Phase.CONTINUING])
        return len(self._runs) + len(self._leaving) + held

    def _owes_turn(self) -> bool:
        """Return whether other sequences must run before the next suspects do."""
        if not self._after:
            return False
        phases = Phase.RUNNING, Phase.QUEUED, Phase.CONTINUING
        running = sum(len(self._in[phase]) for phase in phases)
        # Suspects that ran in isolation last may still run or wait: do not count them.
        unfinished = (one.phase not in (None, Phase.OVER) for one in self._after)
        return running > sum(unfinished)

    def _next_group(self) -> list[EngineSequence]:
        """Return the suspects that run next, together."""
        suspects = list(self._in[Phase.SUSPECT].values())
        group = suspects[:1]
        if group[0].group is not None:
            group = [s for s in suspects if s.group == group[0].group]
        return group[: self.settings.max_num_seqs]

    def _run(self, sequence: EngineSequence) -> None:
        self._become(sequence, Phase.RUNNING)
        self._numbers += 1
        sequence.run = self._numbers
        self._runs[sequence.run] = sequence
        start = sequence.start
        if start.is_watched or len(start.tokens) == start.prompt:
            begun = generation_messages.ComputeBegun((sequence.key,))
            self._send(begun, sequence.key, is_urgent=True)
        self._actions.append(Begin(sequence.run, sequence.next_run()))

    def _run_alone(self, group: list[EngineSequence]) -> None:
        """Run suspects while nothing else is in the engine."""
        self._alone, self._after = list(group), list(group)
        for sequence in group:
            alone = generation_messages.RunsAlone(sequence.key)
            self._send(alone, sequence.key, is_urgent=True)
        for sequence in group:
            self._run(sequence)

    def _take_back(self, sequence: EngineSequence) -> None:
        """Abort the run of a sequence, if it has one."""
        if not sequence.run:
            return
        self._actions.append(Abort(sequence.run))
        self._ended(sequence)

    def _ended(self, sequence: EngineSequence, *, has_failed: bool = False) -> None:
        """Record that a sequence no longer runs."""
        del self._runs[sequence.run]
        self._leaving.add(sequence.run)
        sequence.run = 0
        if has_failed and sequence in self._alone:
            # Do not notify the gateway that the suspect no longer runs alone: the
            # suspect may have killed the engine, and then this process exits next.
            self._alone.remove(sequence)
        self._no_longer_alone(sequence)

    def _no_longer_alone(self, sequence: EngineSequence) -> None:
        if sequence in self._alone:
            self._alone.remove(sequence)
            over = generation_messages.RunsAlone(sequence.key, is_over=True)
            self._send(over, sequence.key, is_urgent=True)

    def _generated(self, number: int, tokens: Sequence[EngineToken]) -> None:
        if number == self._trial and tokens:
            self._trial_succeeded(tokens[0].token)
            return
        sequence = self._runs.get(number)
        if sequence is None or not tokens:
            return
        if sequence.is_prepared:
            self._prepared(sequence)
            return
        items: list[TokenItem] = []
        foreign: int | None = None
        for each in tokens:
            if not 0 <= each.token < self.settings.vocabulary:
                foreign = each.token
                break
            items.append(self._append(sequence, each))
            if items[-1].finish:
                break
        was_alone = sequence in self._alone
        if items:
            self._failures = 0
            self._is_proved = True
            self._failures_of.pop(sequence.key[:2], None)
            if sequence not in self._after:
                self._after = []
            self.counts["tokens"] += len(items)
            self._send(generation_messages.Tokens(tuple(items)), sequence.key)
            if sequence.made >= PROOF_TOKENS:
                self._no_longer_alone(sequence)
        if items and items[-1].finish:
            self._take_back(sequence)
            self._become(sequence, Phase.OVER)
        elif foreign is not None:
            self._no_token(sequence, f"the engine returned token {foreign}")
        elif (
            was_alone
            and sequence not in self._alone
            and self._used_slots() > self.settings.max_num_seqs
        ):
            # The suspect got a slot although none was free. It has proved itself, so it
            # returns the slot and waits like others.
            self._take_back(sequence)
            self._become(sequence, sequence.waiting_phase)

    def _append(self, sequence: EngineSequence, each: EngineToken) -> TokenItem:
        sampling = sequence.start.sampling
        index = len(sequence.tokens) - sequence.start.prompt
        sequence.tokens.append(each.token)
        finish = self._finish_of(each.token, index + 1, sampling, sequence.ends)
        return TokenItem(
            sequence.key,
            index,
            each.token,
            finish,  # type: ignore[arg-type]  # ``finish_of`` returns any str
            each.logprob,
            self._known_words(each.top),
            tuple((score, self._known_words(top)) for score, top in each.prompt)
            if index == 0
            else (),
        )

    def _known_words(
        self, top: Sequence[tuple[int, float]]
    ) -> tuple[tuple[int, float], ...]:
        """Drop tokens that are not in the vocabulary."""
        return tuple(p for p in top if 0 <= p[0] < self.settings.vocabulary)

    def _prepared(self, sequence: EngineSequence) -> None:
        """Report that a sequence can continue here; reserve its slot until then."""
        self._take_back(sequence)
        self._become(sequence, Phase.HELD)
        self._send(generation_messages.SequencePrepared(sequence.key), sequence.key)

    def _run_ended(self, number: int, error: Exception | None) -> None:
        """Handle a run that ended before its last token."""
        # A trial that fails while the engine produces tokens says nothing about it.
        is_spared = isinstance(error, BusyError) or self._is_proved
        if number == self._trial and is_spared:
            self._trial = 0
            for doubted in list(self._in[Phase.DOUBTED].values()):
                self._return(doubted)
            return
        if number == self._trial:
            first = self._first(Phase.DOUBTED)
            why = "its sequences failed" if first is None else first.doubt
            text = f"{why}; a trial run produced no token either: {error}"
            self._trial = 0
            self._actions.append(GiveUp(text))
            return
        sequence = self._runs.get(number)
        if sequence is None:
            return
        self._ended(sequence, has_failed=True)
        match error:
            case EngineLostError():
                self._become(sequence, Phase.OVER)
                self._actions.append(GiveUp(str(error)))
            case BusyError():
                self._return(sequence)
            case RequestRefusedError() if len(sequence.tokens) > sequence.start.prompt:
                # The request was accepted when it began, perhaps by another server, so
                # this is no error of the client.
                self._no_token(sequence, str(error))
            case InvalidRequestError() | ModelFailedError():
                self._end(sequence)
                self._fail(sequence.key, error)
            case None:
                self._no_token(sequence, "the engine ended a sequence early")
            case _:
                self._no_token(sequence, f"the engine failed: {error}")

    def _no_token(self, sequence: EngineSequence, why: str) -> None:
        """Return a sequence to its gateway; after too many failures, start a trial."""
        stream = sequence.key[:2]
        self.counts["failed_runs"] += 1
        self._failures += 1
        self._failures_of[stream] += 1
        while len(self._failures_of) > KEPT_FAILURES:
            del self._failures_of[next(iter(self._failures_of))]
        is_often = self._failures_of[stream] >= OWN_FAILURES
        if not is_often and self._failures < MAX_FAILURES:
            self._return(sequence)
            return
        self._take_back(sequence)
        self._become(sequence, Phase.DOUBTED)
        sequence.doubt = why
        if not self._trial:
            self._numbers += 1
            self._trial, self._is_proved = self._numbers, False
            self._actions.append(Begin(self._trial, Run((0,), 1, WARM_UP)))

    def _return(self, sequence: EngineSequence) -> None:
        """Return a sequence to its gateway, for another attempt."""
        self._take_back(sequence)
        self._become(sequence, Phase.OVER)
        failed = generation_messages.SequenceFailed(sequence.key)
        self._send(failed, sequence.key)

    def _trial_succeeded(self, token: int) -> None:
        """Fail the sequences that failed often themselves although the engine works.

        Others failed with many at once, for example when a proxy restarted.
        """
        self._actions.append(Abort(self._trial))
        self._trial = 0
        if not 0 <= token < self.settings.vocabulary:
            self._actions.append(GiveUp(f"the engine returned token {token}"))
            return
        for doubted in list(self._in[Phase.DOUBTED].values()):
            stream = doubted.key[:2]
            if self._failures_of[stream] < OWN_FAILURES:
                self._return(doubted)
                continue
            del self._failures_of[stream]
            self._end(doubted)
            text = f"the engine failed repeatedly: {doubted.doubt}"
            self._fail(doubted.key, ModelFailedError(text, stage="0"))
        self._failures = 0
