"""Sequences of a replica with a simulated whole engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.errors import InvalidRequestError, ModelFailedError
from multiworld.serve.engine.compute.sampler import finish_of
from multiworld.serve.engine.external.whole_engine import (
    BusyError,
    EngineLostError,
    EngineSettings,
    EngineToken,
    Run,
    RunFailedError,
)
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.replica.sequences.actions import Send
from multiworld.serve.replica.sequences.events import (
    Disconnected,
    GatewaysChanged,
    Received,
)
from multiworld.serve.replica.whole_engines.engine_sequences import (
    MAX_FAILURES,
    OWN_FAILURES,
    Abort,
    Begin,
    EngineSequences,
    Event,
    Generated,
    GiveUp,
    RunEnded,
    RunOver,
)
from multiworld.serve.routing.poison_rules import PROOF_TOKENS
from multiworld.serve.wire.generation_messages import (
    BeginSequences,
    ComputeBegun,
    EndSequences,
    PauseSequences,
    PrepareSequence,
    RunsAlone,
    Sampling,
    SequenceFailed,
    SequencePrepared,
    SequenceStart,
    TokenItem,
    Tokens,
)
from multiworld.serve.wire.protocol import Key
from tests.unit.inner_state import leaks_of

GATEWAY = "gateway/1"
VOCABULARY = 1000
END = 7
NAMES = 100
"""The first token of sequence n is NAMES + n, so that its runs are known by it."""


def key(number: int, attempt: int = 0, gateway: str = GATEWAY) -> Key:
    return gateway, number, attempt


def start(
    number: int,
    *more: int,
    attempt: int = 0,
    gateway: str = GATEWAY,
    share: Share = DEFAULT_SHARE,
    probe: bool = False,
    suspect: bool = False,
    watched: bool = False,
    **sampling: Any,
) -> SequenceStart:
    """Return a sequence with a prompt of two tokens, and ``more`` output tokens."""
    return SequenceStart(
        key(number, attempt, gateway),
        (NAMES + number, 1, *more),
        2,
        ("replica",),
        Sampling(**{"max_tokens": 9, **sampling}),
        share=share,
        is_probe=probe,
        is_suspect=suspect,
        is_watched=watched,
    )


def check(sampling: Sampling) -> None:
    if sampling.prompt_logprobs is not None:
        raise InvalidRequestError("there are none of the prompt", param="logprobs")


class Replica:
    """The sequences of a replica, and a fake engine that runs what it is told to."""

    def __init__(self, max_num_seqs: int = 4, *, is_slow: bool = False) -> None:
        settings = EngineSettings(
            replica="r",
            path="",
            vocabulary=VOCABULARY,
            end_tokens=(END,),
            max_num_seqs=max_num_seqs,
        )
        self.sequences = EngineSequences(settings, check, finish_of)
        self.runs: dict[int, Run] = {}
        self.sent: list[Any] = []
        self.reported: list[Key] = []  # sequences whose computation begins
        self.given_up: list[str] = []
        self.alone: Key | None = None
        self.log: list[tuple[str, int]] = []
        self._begun = 0
        self.trial = 0
        self.leaving: list[int] = []
        self._is_slow = is_slow

    def handle(self, event: Event) -> None:
        """Handle an event, carry out the actions, and check their invariants."""
        for action in self.sequences.handle(event):
            match action:
                case Begin(number, run) if run.tokens == (0,):
                    self._begun = self.trial = number
                case Abort(number) if number == self.trial:
                    self.trial = 0
                case Begin(number, run):
                    assert number > self._begun, "each run has a number of its own"
                    assert self.alone is None or not self.runs
                    self._begun, self.runs[number] = number, run
                    self.log.append(("begin", name_of(run)))
                case Abort(number):
                    self.log.append(("abort", name_of(self.runs.pop(number))))
                    self.leaving.append(number)
                case GiveUp(text):
                    self.given_up.append(text)
                    self.alone = None  # the process ends, and its gateways know
                case Send(_, ComputeBegun(keys), True):
                    self.reported += keys
                case Send(peer, message, is_urgent):
                    self._sent(peer, message, is_urgent)
        assert self.sequences.running == len(self.runs)
        if self.leaving and not self._is_slow:
            self.run_over()

    def run_over(self) -> None:
        """Report that the first leaving run is over."""
        self.handle(RunOver(self.leaving.pop(0)))

    def _sent(self, peer: str, message: Any, is_urgent: bool) -> None:
        self.sent.append(message)
        if isinstance(message, RunsAlone):
            assert is_urgent
            assert peer == message.key[0]
            assert (self.alone == message.key) == message.is_over
            is_empty = not self.runs and not self.leaving
            assert message.is_over or is_empty, "all others were aborted"
            self.alone = None if message.is_over else message.key
            self.log.append(("over" if message.is_over else "alone", message.key[1]))
        if isinstance(message, SequenceFailed) and message.key == self.alone:
            self.alone = None
            self.log.append(("over", message.key[1]))
        if isinstance(message, Tokens):
            self.log += [("token", item.key[1]) for item in message.items]

    def begin(self, *starts: SequenceStart) -> None:
        self.handle(Received(starts[0].key[0], BeginSequences(starts)))

    def prepare(self, one: SequenceStart) -> None:
        self.handle(Received(one.key[0], PrepareSequence(one, (0,))))

    def end(self, *keys: Key) -> None:
        self.handle(Received(keys[0][0], EndSequences(keys)))

    @property
    def running(self) -> list[int]:
        return [name_of(run) for run in self.runs.values()]

    def number_of(self, sequence: int) -> int:
        (number,) = [n for n, run in self.runs.items() if name_of(run) == sequence]
        return number

    def generate(self, sequence: int, *tokens: int) -> None:
        made = [EngineToken(token) for token in tokens]
        self.handle(Generated(self.number_of(sequence), made))

    def prove(self, sequence: int) -> None:
        """Generate enough tokens to clear a suspect."""
        self.generate(sequence, *[5] * PROOF_TOKENS)

    def fail(self, sequence: int, error: Exception | None = None) -> None:
        number = self.number_of(sequence)
        del self.runs[number]
        self.leaving.append(number)
        self.handle(RunEnded(number, error))

    @property
    def items(self) -> list[TokenItem]:
        """The tokens that gateways received."""
        found = [m for m in self.sent if isinstance(m, Tokens)]
        return [item for message in found for item in message.items]


def name_of(run: Run) -> int:
    return run.tokens[0] - NAMES


# Sequences that run.


def test_no_more_sequences_run_than_allowed() -> None:
    replica = Replica(2)
    replica.begin(*(start(number) for number in range(4)))
    assert replica.running == [0, 1]
    assert replica.sequences.waiting == 2
    replica.end(key(0))
    assert replica.running == [1, 2]
    replica.generate(1, END)
    assert replica.running == [2, 3], "its last token ends a run"
    assert replica.sequences.waiting == 0


def test_engine_gets_all_that_a_sequence_needs() -> None:
    replica = Replica()
    replica.begin(start(1, 5, 6, share=Share("t"), stop_token_ids=(9,), max_tokens=5))
    (run,) = replica.runs.values()
    assert (run.tokens, run.prompt, run.tenant) == ((NAMES + 1, 1, 5, 6), 2, "t")
    assert (run.ends, run.remaining) == ((END, 9), 3)
    assert run.sampling.max_tokens == 5


def test_tenant_with_few_sequences_does_not_wait_for_a_flood() -> None:
    """Tenants share the engine's slots by fair queueing."""
    replica = Replica(2)
    replica.begin(*(start(number, share=Share("loud")) for number in range(8)))
    replica.begin(*(start(number, share=Share("quiet")) for number in (8, 9)))
    for number in range(4):
        replica.end(key(number))
        if number == 2:
            assert {8, 9} <= {name for what, name in replica.log if what == "begin"}


def test_probes_do_not_wait_and_preparations_wait_for_a_slot() -> None:
    """A stream that moves to a full replica would otherwise stall there."""
    replica = Replica(1)
    replica.begin(start(1), start(2))
    replica.begin(start(3, probe=True))
    replica.prepare(start(4, 5, 6))
    assert replica.running == [1, 3]
    replica.end(key(3), key(1))
    assert replica.running == [4], "it ran elsewhere before 2 came"
    replica.generate(4, 7)
    assert replica.sent[-1] == SequencePrepared(key(4))
    assert replica.running == [], "the place is held"
    replica.begin(start(4, 5, 6, 7, attempt=1))
    assert replica.running == [4]
    replica.end(key(4, 1))
    assert replica.running == [2]


def test_slot_of_a_cancelled_move_is_free() -> None:
    replica = Replica(1)
    replica.prepare(start(1))
    replica.prepare(start(2))
    replica.generate(1, 7)
    assert leaks_of(replica.sequences)["held"] == 1
    replica.end(key(2))
    replica.begin(start(3))
    replica.end(key(1))
    assert replica.running == [3]


def test_prepared_sequence_fills_the_cache_and_is_reported() -> None:
    """The engine generates one token from the whole prefix, which is discarded."""
    replica = Replica()
    replica.prepare(start(1, 5, 6, temperature=0.5, grammar="g"))
    (run,) = replica.runs.values()
    assert (run.tokens, run.prompt) == ((NAMES + 1, 1, 5, 6), 4)
    assert (run.remaining, run.sampling.grammar, run.ends) == (1, "", ())
    replica.generate(1, 3)
    assert replica.sent == [SequencePrepared(key(1))]
    assert replica.runs == {}
    replica.begin(start(1, 5, 6, 8, attempt=1))
    replica.generate(1, 3)
    assert [(item.key, item.index) for item in replica.items] == [(key(1, 1), 3)]
    replica.end(key(1, 1))
    assert leaks_of(replica.sequences) == {}
    assert replica.sequences.counts["requests"] == 1


def test_watched_sequence_is_reported_before_it_runs() -> None:
    """A replica lost before the report was not lost because of this sequence."""
    replica = Replica(1)
    replica.begin(start(1, 5), start(2, 5, watched=True))
    assert replica.reported == []
    replica.end(key(1))
    assert replica.reported == [key(2)]
    assert replica.running == [2]


def test_sequence_without_tokens_is_reported_when_it_leaves_the_queue() -> None:
    replica = Replica(1)
    replica.begin(start(1), start(2))
    assert replica.reported == [key(1)]
    replica.end(key(1))
    assert replica.reported == [key(1), key(2)]


# Suspects.


def test_aborted_run_keeps_its_slot_until_it_has_ended() -> None:
    """An engine may take time to abort, and a suspect must not run beside the rest."""
    replica = Replica(2, is_slow=True)
    replica.begin(start(1), start(2), start(3), start(4))
    replica.end(key(1))
    replica.fail(2)
    assert replica.running == []
    replica.run_over()
    assert replica.running == [3]
    replica.begin(start(5, suspect=True))
    assert replica.running == []
    replica.run_over()
    assert replica.running == []
    replica.run_over()
    assert replica.running == [5]


@pytest.mark.parametrize("is_slow", [False, True])
def test_moved_sequence_waits_for_a_suspect_to_leave(is_slow: bool) -> None:
    replica = Replica(1, is_slow=is_slow)
    replica.prepare(start(2))
    replica.generate(2, 3)
    if is_slow:
        replica.run_over()
    replica.begin(start(1, suspect=True))
    replica.begin(start(2, 3, attempt=1))
    replica.prove(1)
    assert replica.running == ([] if is_slow else [2])
    if is_slow:
        replica.run_over()
    assert replica.running == [2]


def test_suspect_runs_alone_until_it_has_some_tokens() -> None:
    replica = Replica()
    replica.begin(start(1), start(2))
    replica.generate(1, 5, 6)
    replica.log.clear()
    replica.begin(start(3, suspect=True))
    assert replica.log == [("abort", 1), ("abort", 2), ("alone", 3), ("begin", 3)]
    replica.begin(start(4), start(5, probe=True))
    assert replica.running == [3], "nobody joins it"
    replica.log.clear()
    replica.generate(3, *[8] * (PROOF_TOKENS - 1))
    assert replica.running == [3], "an engine may fail in decoding"
    replica.generate(3, 8)
    assert replica.log[-5:-3] == [("token", 3), ("over", 3)]
    assert replica.running == [3, 5, 1, 2]
    assert replica.runs[replica.number_of(1)].tokens == (NAMES + 1, 1, 5, 6)
    replica.generate(1, 7)
    assert replica.items[-1] == TokenItem(key(1), 2, 7, "stop")


def test_others_get_a_token_before_the_next_suspect() -> None:
    """A token of the suspect itself does not count as theirs."""
    replica = Replica()
    replica.begin(start(1))
    more = start(2, suspect=True, max_tokens=20)
    replica.begin(more, start(3, suspect=True))
    assert replica.running == [2]
    replica.prove(2)
    assert replica.running == [2, 1]
    replica.generate(2, 5)
    assert replica.running == [2, 1], "sequence 1 has none yet"
    replica.generate(1, 5)
    assert replica.running == [3]
    replica.prove(3)
    assert replica.running == [3, 1, 2]


def test_suspects_without_others_follow_each_other_at_once() -> None:
    """No other sequence is owed a turn, so the engine must not idle."""
    replica = Replica()
    replica.begin(start(1, suspect=True), start(2, suspect=True))
    replica.prove(1)
    assert replica.running == [2], "sequence 1 runs on after it"
    replica.prove(2)
    assert sorted(replica.running) == [1, 2]
    replica.begin(start(3, suspect=True))
    assert sorted(replica.running) == [1, 2], "sequence 1 has its turn first"
    replica.generate(1, 5)
    assert replica.running == [3]


@pytest.mark.parametrize("how", ["ended", "failed", "lost", "replaced", "done"])
def test_suspect_that_leaves_lets_the_others_run(how: str) -> None:
    replica = Replica()
    replica.begin(start(1))
    replica.begin(start(2, suspect=True, max_tokens=1))
    assert replica.running == [2]
    match how:
        case "ended":
            replica.end(key(2))
        case "failed":
            replica.fail(2)
        case "lost":
            replica.begin(start(3, gateway="other"))
            replica.handle(GatewaysChanged({"other"}))
        case "replaced":
            replica.begin(start(2, attempt=1))
        case "done":
            replica.generate(2, 5)
    assert replica.alone is None
    assert 2 not in replica.running or how == "replaced"
    assert replica.running


def test_suspect_that_has_a_token_runs_with_others_later() -> None:
    replica = Replica()
    replica.begin(start(1, suspect=True))
    replica.prove(1)
    replica.begin(start(2, suspect=True))
    replica.prove(2)
    alone = [m.key for m in replica.sent if isinstance(m, RunsAlone) and not m.is_over]
    assert alone == [key(1), key(2)]
    assert sorted(replica.running) == [1, 2]


# Tokens.


def test_tokens_have_the_index_after_those_that_were_delivered() -> None:
    replica = Replica()
    replica.begin(start(1, 5, 6))
    top = ((3, -0.5), (4, -1.5))
    made = [EngineToken(3, -0.5, top), EngineToken(4)]
    replica.handle(Generated(replica.number_of(1), made))
    replica.generate(1, 5)
    assert replica.items == [
        TokenItem(key(1), 2, 3, "", -0.5, top),
        TokenItem(key(1), 3, 4),
        TokenItem(key(1), 4, 5),
    ]
    assert replica.sequences.counts["tokens"] == 3


def test_log_probabilities_of_the_prompt_come_with_the_first_token_only() -> None:
    """A sequence that continues has sent them before."""
    prompt = ((-0.5, ((1, -0.5),)),)
    for more, found in (((), prompt), ((5,), ())):
        replica = Replica()
        replica.begin(start(1, *more))
        made = [EngineToken(3, None, (), prompt)]
        replica.handle(Generated(replica.number_of(1), made))
        assert replica.items[0].prompt == found


@pytest.mark.parametrize(
    ("sampling", "tokens", "finish"),
    [
        ({}, [3, END], "stop"),
        ({"ignore_eos": True, "max_tokens": 3}, [3, END, 4], "length"),
        ({"stop_token_ids": (4,)}, [3, 4], "stop"),
        ({"stop_token_ids": (4,), "ignore_eos": True}, [END, 4], "stop"),
        ({"max_tokens": 2}, [3, 4], "length"),
        ({"max_tokens": 1}, [3], "length"),
        ({"max_tokens": 2}, [3, END], "stop"),
    ],
)
def test_run_is_aborted_at_its_end_though_the_engine_continues(
    sampling: dict[str, Any], tokens: list[int], finish: str
) -> None:
    replica = Replica()
    replica.begin(start(1, **sampling))
    number = replica.number_of(1)
    replica.generate(1, *tokens, 8, 9)
    found = [(item.token, item.finish) for item in replica.items]
    ends = [""] * (len(tokens) - 1) + [finish]
    assert found == list(zip(tokens, ends, strict=True))
    assert replica.log[-1] == ("abort", 1)
    replica.handle(Generated(number, [EngineToken(3)]))
    replica.handle(RunEnded(number))
    assert len(replica.items) == len(tokens)
    replica.end(key(1))
    assert leaks_of(replica.sequences) == {}


def test_tokens_after_an_abort_are_ignored() -> None:
    replica = Replica()
    replica.begin(start(1), start(2))
    first, second = replica.number_of(1), replica.number_of(2)
    replica.end(key(1))
    replica.begin(start(2, attempt=1))
    for number in (first, second):
        replica.handle(Generated(number, [EngineToken(3)]))
        replica.handle(RunEnded(number, EngineLostError("late")))
    assert replica.sent == []
    assert replica.given_up == []
    assert replica.running == [2]


def test_new_attempt_replaces_the_previous_one() -> None:
    replica = Replica(1)
    replica.begin(start(1), start(2))
    replica.begin(start(1, 5, attempt=1))
    assert replica.running == [2], "it waits behind those that came before it"
    replica.end(key(1))
    replica.end(key(2))
    assert replica.running == [1]
    replica.generate(1, 6)
    assert replica.items == [TokenItem(key(1, 1), 1, 6)]


# Failures.


def test_token_outside_the_vocabulary_returns_the_sequence_to_its_gateway() -> None:
    for foreign in (VOCABULARY, -1):
        replica = Replica()
        replica.begin(start(1), start(2))
        replica.generate(1, 3, foreign, 4)
        tokens = Tokens((TokenItem(key(1), 0, 3),))
        assert replica.sent == [tokens, SequenceFailed(key(1))]
        assert replica.running == [2]
        replica.end(key(1), key(2))
        assert leaks_of(replica.sequences) == {}


@pytest.mark.parametrize("error", [None, RunFailedError("x"), OSError("x")])
def test_run_that_ends_early_returns_the_sequence_to_its_gateway(
    error: Exception | None,
) -> None:
    """Another attempt may succeed here."""
    replica = Replica(1)
    replica.begin(start(1), start(2))
    replica.generate(1, 3)
    replica.fail(1, error)
    assert replica.sent[-1] == SequenceFailed(key(1))
    assert replica.running == [2]
    assert replica.sequences.counts["failed_runs"] == 1
    replica.begin(start(1, 3, attempt=1))
    replica.end(key(2))
    replica.generate(1, 4)
    assert replica.items[-1] == TokenItem(key(1, 1), 1, 4)


@pytest.mark.parametrize(
    "error", [InvalidRequestError("no such thing"), ModelFailedError("broken")]
)
def test_error_that_would_come_again_goes_to_the_client(error: Any) -> None:
    """Such an error says nothing about the engine."""
    replica = Replica()
    for number in range(2 * MAX_FAILURES):
        replica.begin(start(number))
        replica.fail(number, error)
        failed = replica.sent[-1]
        assert failed.key == key(number)
        assert failed.error.kind == type(error).__name__
    assert replica.given_up == []
    assert leaks_of(replica.sequences) == {}


def test_parameters_that_the_engine_lacks_are_refused_before_they_run() -> None:
    replica = Replica()
    replica.begin(start(1, prompt_logprobs=1), start(2))
    assert replica.running == [2]
    (failed,) = replica.sent
    assert failed.key == key(1)
    assert failed.error.kind == "InvalidRequestError"


def test_engine_is_tried_after_failures_in_a_row_and_given_up() -> None:
    replica = Replica()
    for number in range(MAX_FAILURES):
        assert not replica.trial
        replica.begin(start(number))
        if number % 2:
            replica.fail(number, RunFailedError("out of order"))
        else:
            replica.generate(number, VOCABULARY)
    assert replica.given_up == []
    replica.handle(RunEnded(replica.trial, RunFailedError("dead")))
    (text,) = replica.given_up
    assert "out of order" in text
    assert "dead" in text


def test_sequence_that_fails_on_an_engine_that_works_is_failed() -> None:
    """One request must not take down one replica after another."""
    replica = Replica()
    for attempt in range(OWN_FAILURES):
        assert not replica.trial
        replica.begin(start(1, attempt=attempt))
        replica.fail(1, RunFailedError("no such adapter"))
    replica.begin(start(2))
    assert replica.running == [], "the engine is tried first"
    replica.handle(Generated(replica.trial, [EngineToken(3)]))
    failed = replica.sent[-1]
    assert failed.key == key(1, OWN_FAILURES - 1)
    assert "no such adapter" in failed.error.text
    assert replica.running == [2]
    assert (replica.given_up, replica.trial) == ([], 0)


def test_trial_that_hangs_keeps_no_other_sequence_waiting() -> None:
    """The engine produces tokens of others meanwhile."""
    replica = Replica()
    replica.begin(start(9, max_tokens=99))
    for attempt in range(OWN_FAILURES):
        replica.begin(start(1, attempt=attempt))
        replica.fail(1)
    assert replica.trial
    replica.begin(start(2))
    assert replica.running == [9]
    replica.generate(9, 3)
    assert sorted(replica.running) == [2, 9]
    replica.handle(Generated(replica.trial, [EngineToken(3)]))
    assert replica.sent[-1].key == key(1, OWN_FAILURES - 1)


def test_trial_that_fails_beside_tokens_ends_no_engine() -> None:
    """Nor does a suspect run alone beside it, and bear the blame."""
    replica = Replica()
    replica.begin(start(9, max_tokens=99))
    for attempt in range(OWN_FAILURES):
        replica.begin(start(1, attempt=attempt))
        replica.fail(1)
    replica.generate(9, 3)
    replica.begin(start(5, suspect=True))
    assert replica.running == [9]
    assert replica.alone is None
    replica.handle(RunEnded(replica.trial, RunFailedError("reset")))
    assert replica.given_up == []
    assert SequenceFailed(key(1, OWN_FAILURES - 1)) in replica.sent


def test_many_that_fail_at_once_are_tried_elsewhere() -> None:
    """A proxy has restarted, say; the engine works."""
    replica, count = Replica(max_num_seqs=2 * MAX_FAILURES), 2 * MAX_FAILURES
    for number in range(count):
        replica.begin(start(number))
    for number in range(count):
        replica.fail(number, RunFailedError("connection reset"))
    replica.handle(Generated(replica.trial, [EngineToken(3)]))
    assert sorted(failed.key for failed in replica.sent) == [
        key(number) for number in range(count)
    ]
    assert all(failed == SequenceFailed(failed.key) for failed in replica.sent)
    assert (replica.given_up, replica.trial) == ([], 0)


def test_sequence_that_fails_beside_others_is_failed_too() -> None:
    """The tokens of others say nothing about this sequence."""
    replica = Replica()
    replica.begin(start(9, max_tokens=99))
    for attempt in range(OWN_FAILURES):
        replica.begin(start(1, attempt=attempt))
        replica.generate(9, 3)
        replica.fail(1)
    assert replica.trial
    replica.handle(RunEnded(replica.trial, BusyError("503")))
    assert replica.sent[-1] == SequenceFailed(key(1, OWN_FAILURES - 1))
    assert (replica.given_up, replica.running) == ([], [9])


def test_busy_engine_is_not_at_fault() -> None:
    replica = Replica()
    for attempt in range(5 * MAX_FAILURES):
        replica.begin(start(1, attempt=attempt))
        replica.fail(1, BusyError("429"))
        assert replica.sent[-1] == SequenceFailed(key(1, attempt))
    assert (replica.given_up, replica.trial) == ([], 0)


def test_likely_tokens_outside_the_vocabulary_are_dropped() -> None:
    """They could be neither sent nor shown."""
    replica = Replica()
    replica.begin(start(1, logprobs=2))
    top = ((2**64, -0.1), (4, -0.2), (-1, -0.3))
    made = EngineToken(3, -0.5, top, ((-0.1, top),))
    replica.handle(Generated(replica.number_of(1), [made]))
    (item,) = replica.items
    assert item.top == ((4, -0.2),)
    assert item.prompt == ((-0.1, ((4, -0.2),)),)


def test_one_token_between_failures_keeps_the_engine() -> None:
    replica = Replica()
    for number in range(5 * MAX_FAILURES):
        replica.begin(start(number))
        if number % (MAX_FAILURES - 1) == 0:
            replica.generate(number, 3, VOCABULARY)
        else:
            replica.fail(number)
    assert replica.given_up == []


def test_engine_that_is_lost_is_given_up_at_once() -> None:
    replica = Replica()
    replica.begin(start(1))
    replica.fail(1, EngineLostError("it exited"))
    assert replica.given_up == ["it exited"]


# Gateways.


def test_sequences_of_a_lost_gateway_are_ended() -> None:
    events: list[Event] = [Disconnected(GATEWAY), GatewaysChanged({"gateway/2"})]
    for event in events:
        replica = Replica(2)
        replica.begin(start(1), start(2), start(3), start(4, suspect=True))
        replica.begin(start(5, gateway="gateway/2"))
        replica.handle(event)
        assert replica.running == [5]
        assert len(replica.sequences) == 1
        assert replica.sequences.waiting == 0


def test_paused_sequence_is_ended() -> None:
    """Its gateway has its tokens and will begin it again."""
    replica = Replica()
    replica.begin(start(1))
    replica.handle(Received(GATEWAY, PauseSequences((key(1),))))
    assert replica.runs == {}
    assert leaks_of(replica.sequences) == {}


def test_suspect_gives_way_to_reserved_slots() -> None:
    """It runs alone even if all slots are held, and then waits for one."""
    replica = Replica(1)
    replica.prepare(start(2))
    replica.generate(2, 3)
    replica.begin(start(1, suspect=True))
    assert replica.running == [1]
    replica.begin(start(2, 3, attempt=1))
    replica.prove(1)
    assert replica.running == [2]
    replica.end(key(2, 1))
    assert replica.running == [1]
    assert replica.runs[replica.number_of(1)].tokens[2:] == (5,) * PROOF_TOKENS


def test_suspect_that_gave_way_delays_no_other_suspect() -> None:
    """It waits for a slot, which another suspect does not need."""
    replica = Replica(1)
    replica.prepare(start(2))
    replica.generate(2, 3)
    replica.begin(start(1, suspect=True))
    replica.begin(start(5, suspect=True))
    replica.prove(1)
    assert replica.running == [5]


def test_leaks_are_named() -> None:
    replica = Replica(1)
    replica.begin(start(1), start(2), start(3))
    assert leaks_of(replica.sequences) == {"sequences": 3, "runs": 1, "waiting": 2}


TOKEN = st.sampled_from([3, 4, 3, 4, 3, 4, END, VOCABULARY])
ERROR = st.sampled_from(
    [
        None,
        *(
            kind("x")
            for kind in (
                RunFailedError,
                BusyError,
                InvalidRequestError,
                EngineLostError,
            )
        ),
    ]
)
NAMED = st.integers(0, 9)


class Random(Replica):
    """A replica with random events, which checks its invariants after each."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs, is_slow=True)
        self.attempts: dict[int, int] = {}
        self.urgent: set[int] = set()
        self.old: list[int] = []

    def step(self, data: st.DataObject) -> None:
        self.old += [n for n in self.runs if n not in self.old]
        events = ["begin", "begin", "begin", "prepare", "end", "gateway", "late"]
        events += ["token", "token", "token", "fail"] if self.runs else []
        events += ["trial"] * 3 if self.trial else []
        events += ["over"] * 3 if self.leaving else []
        what = data.draw(st.sampled_from(events), "event")
        number = data.draw(NAMED, "sequence")
        gateway = f"gateway/{number % 2}"
        attempt = self.attempts.get(number, -1)
        match what:
            case "begin" | "prepare":
                self.attempts[number] = attempt = attempt + 1
                is_probe = data.draw(st.integers(0, 5), "probe") == 0
                self.urgent.discard(number)
                if is_probe:
                    self.urgent.add(number)
                one = start(
                    number,
                    *[5] * data.draw(st.integers(0, 2), "tokens"),
                    attempt=attempt,
                    gateway=gateway,
                    share=Share(data.draw(st.sampled_from("abc"), "tenant")),
                    probe=is_probe,
                    suspect=data.draw(st.integers(0, 3), "suspect") == 0,
                    max_tokens=12,
                )
                (self.begin if what == "begin" else self.prepare)(one)
            case "end":
                before = data.draw(st.integers(0, 1), "attempts before")
                self.end(key(number, attempt - before, gateway))
            case "gateway":
                self.handle(Disconnected(gateway))
            case "late":
                self._late(data)
            case "over":
                self.run_over()
            case "trial" if data.draw(st.booleans(), "it works"):
                self.handle(Generated(self.trial, [EngineToken(3)]))
            case "trial":
                number, self.trial = self.trial, 0
                self.handle(RunEnded(number, RunFailedError("x")))
            case "token":
                name = data.draw(st.sampled_from(self.running), "run")
                self.generate(name, *data.draw(st.lists(TOKEN, max_size=9), "tokens"))
            case "fail":
                name = data.draw(st.sampled_from(self.running), "run")
                self.fail(name, data.draw(ERROR, "error"))

    def _late(self, data: st.DataObject) -> None:
        """Deliver news from a run that has ended."""
        for number in self.old[-3:]:
            if number not in self.runs:
                before = len(self.sent)
                self.handle(Generated(number, [EngineToken(data.draw(TOKEN))]))
                self.handle(RunEnded(number, data.draw(ERROR)))
                assert len(self.sent) == before

    def assert_holds(self) -> None:
        names = self.running
        assert len(set(names)) == len(names), "a sequence has one run"
        most = self.sequences.settings.max_num_seqs
        held = leaks_of(self.sequences).get("held", 0)
        if self.alone is None:
            assert len([n for n in names if n not in self.urgent]) + held <= most
        if self.alone is not None:
            assert names == [self.alone[1]]
        if self.sequences.waiting:
            is_busy = names or held or self.trial or self.leaving
            assert is_busy, "nobody waits for an idle engine"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_engine_runs_what_it_should_after_any_events(data: st.DataObject) -> None:
    replica = Random(data.draw(st.integers(1, 4), "max_num_seqs"))
    for _ in range(data.draw(st.integers(1, 40), "events")):
        replica.step(data)
        replica.assert_holds()
    following: dict[Key, int] = {}
    for item in replica.items:
        assert item.index == following.get(item.key, item.index), "tokens have an order"
        following[item.key] = VOCABULARY if item.finish else item.index + 1
    for number, attempt in replica.attempts.items():
        replica.end(key(number, attempt, f"gateway/{number % 2}"))
    while replica.leaving:
        replica.run_over()
    assert leaks_of(replica.sequences) == {}
    assert replica.runs == {}
    assert replica.alone is None
