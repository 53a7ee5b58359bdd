"""Grammars that crash or hang their compiler, in a process for such trials."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import InvalidRequestError, ModelFailedError, NoReplicaError
from multiworld.serve.spec.stage import Generation
from multiworld.serve.text import grammar_trials
from multiworld.serve.text.grammar import (
    Trial,
    arguments_of,
    grammar_of_calls,
    grammar_of_lark,
    grammar_of_marked_calls,
    grammar_of_schema,
)
from multiworld.serve.text.grammar_trial_process import TokenizerData
from multiworld.serve.text.grammar_trials import (
    TOO_COMPLEX,
    GrammarTrials,
    TrialTokenizer,
)
from multiworld.serve.text.tokenizer import Tokenizer
from tests.tiny_decoder import VOCABULARY, save_tokenizer

GOOD = 'start: "a" | "b"'
CHAIN = "".join(f"a{n}: a{n + 1}\n" for n in range(4000))
CRASHING = f'start: a0\n{CHAIN}a4000: "x"\n'
PATTERNS = [f".*a.{{{n}}}" for n in range(5, 40)]
ENDLESS = "start: A\nA: " + " & ".join(f"/{each}/" for each in PATTERNS)
ENDLESS_SCHEMA = {
    "allOf": [{"type": "string", "pattern": f"{each}$"} for each in PATTERNS]
}
NAMES = [f"d{n}" for n in range(1000)]
DEEP_SCHEMA = {
    "$defs": {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}, {"type": "null"}]}
        for name, after in itertools.pairwise(NAMES)
    }
    | {NAMES[-1]: {"type": "string"}},
    "$ref": "#/$defs/d0",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TrialTokenizer:
    """Return a tokenizer with one token per byte."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    made = Tokenizer(folder)
    model = Generation(
        tokenizer=lambda: made,
        end_tokens=(0,),
        vocabulary=VOCABULARY,
        max_tokens=64,
        kv_bytes=[1],
    )
    return TrialTokenizer("bytes", partial(arguments_of, made.fast, model))


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    found = GrammarTrials(cpu_s=1)
    yield found
    found.close()


@pytest.fixture
def trial(trials: GrammarTrials, tokenizer: TrialTokenizer) -> Trial:
    return partial(trials.why_not, tokenizer)


@pytest.mark.parametrize("grammar", [CRASHING, ENDLESS])
def test_grammar_that_crashes_or_hangs_is_refused(grammar: str, trial: Trial) -> None:
    """Others are tried in a new process; the same one is not tried again."""
    assert trial(GOOD) is None
    with pytest.raises(InvalidRequestError, match=TOO_COMPLEX):
        grammar_of_lark(grammar, "structured_outputs", trial)
    assert trial(GOOD.replace("b", "c")) is None
    with pytest.raises(InvalidRequestError, match=TOO_COMPLEX):
        grammar_of_lark(grammar, "structured_outputs", trial)


@pytest.mark.parametrize("schema", [ENDLESS_SCHEMA, DEEP_SCHEMA])
def test_schema_that_crashes_or_hangs_is_refused(schema: Any, trial: Trial) -> None:
    with pytest.raises(InvalidRequestError, match=TOO_COMPLEX):
        grammar_of_schema(schema, "response_format", trial)
    with pytest.raises(InvalidRequestError, match=TOO_COMPLEX):
        grammar_of_calls([("f", schema)], is_single=False, trial=trial)


def test_valid_grammars_pass_and_invalid_ones_have_a_reason(trial: Trial) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    assert "%json" in grammar_of_schema(schema, "response_format", trial)
    marked = grammar_of_marked_calls([("f", schema)], 3, 4, [0], trial)
    assert "<[3]>" in marked
    with pytest.raises(InvalidRequestError, match="cannot be enforced"):
        grammar_of_lark("start: nothing", "structured_outputs", trial)


def test_process_that_was_killed_is_replaced(
    trials: GrammarTrials, tokenizer: TrialTokenizer
) -> None:
    """The system may kill it when memory is short."""
    assert trials.why_not(tokenizer, GOOD) is None
    before = _children()
    for process in before:
        os.kill(process, signal.SIGKILL)
    for number in range(5):
        grammar = f'start: "{number}"'
        assert trials.why_not(tokenizer, grammar) is None
    assert not before & _children()


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "import time; time.sleep(9)"])
def test_failure_of_the_process_is_not_the_clients_mistake(
    code: str, tokenizer: TrialTokenizer, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(code)
    failing = GrammarTrials(program=program)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_trials, "ANSWER_S", 0.5)
        for _ in range(2):
            with pytest.raises(NoReplicaError, match="could not be checked"):
                failing.why_not(tokenizer, "x" * 100_000)
    failing.close()


def test_tokenizer_that_is_of_no_use_is_named(trials: GrammarTrials) -> None:
    made_of = TokenizerData("{}", 5, [0])
    broken = TrialTokenizer("broken", lambda: made_of)
    for _ in range(2):
        with pytest.raises(ModelFailedError, match="for this model"):
            trials.why_not(broken, GOOD)


def test_every_model_has_its_own_tokenizer(
    trials: GrammarTrials, tokenizer: TrialTokenizer
) -> None:
    """The process keeps a few tokenizers, and asks again for others."""
    made: list[str] = []

    def made_of(name: str) -> TokenizerData:
        made.append(name)
        return tokenizer.made_of()

    for turn in range(2):
        for number in range(6):
            name = str(number)
            each = TrialTokenizer(name, partial(made_of, name))
            assert trials.why_not(each, f'start: "{turn}"') is None
            assert trials.why_not(each, f'start: "{turn}" "x"') is None
    assert made == [*"012345"] * 2


def test_process_ends_with_its_gateway(
    trials: GrammarTrials, tokenizer: TrialTokenizer
) -> None:
    assert trials.why_not(tokenizer, GOOD) is None
    (process,) = _children()
    trials.close()
    assert process not in _children()


def _children() -> set[int]:
    found = set()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            command = (each / "cmdline").read_bytes()
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"grammar_trial_process" in command and parent == os.getpid():
            found.add(int(each.name))
    return found
