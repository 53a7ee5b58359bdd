"""The logits processor for vLLM, whose tokens are those of our own sampler."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import random
import shutil
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import llguidance
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.serve.engine.compute.sampler import Choice, TokenHistory, sample
from multiworld.serve.engine.external import vllm_plugin
from multiworld.serve.text.grammar import grammar_of_regex
from multiworld.serve.wire.generation_messages import Sampling
from tests.tiny_decoder import VOCABULARY, save_tokenizer

END = 0
PROMPT = [5, 6, 7, 5]

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7, "seed": 3},
    "top_k": {"top_k": 9, "seed": 4},
    "large top_k": {"top_k": 120, "seed": 4},
    "top_p": {"top_p": 0.6, "seed": 5, "choice": 2},
    "min_p": {"min_p": 0.1, "seed": 6},
    "penalties": {
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.3,
        "seed": 7,
    },
    "bias": {"logit_bias": {9: 4.0, 11: -100.0}, "seed": 8},
    "min_tokens": {"min_tokens": 6, "logit_bias": {END: 50.0}, "seed": 9},
    "all": {
        "temperature": 1.3,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "presence_penalty": 0.4,
        "logit_bias": {3: 1.5},
        "seed": 2**64 - 1,
        "choice": 1,
    },
}


Added = tuple[int, Any, list[int], list[int]]
"""Row, parameters, prompt and output of a sequence that vLLM adds."""


class Direction(Enum):
    """vLLM's ``MoveDirectionality``."""

    UNIDIRECTIONAL = 0
    SWAP = 1


@dataclass
class BatchUpdate:
    """vLLM's ``BatchUpdate``."""

    removed: Sequence[int] = ()
    added: Sequence[Added] = ()
    moved: Sequence[tuple[int, int, Direction]] = ()


@dataclass
class Asked:
    """A sequence as vLLM has it; ``output`` is its live list."""

    name: str
    sampling: Sampling
    tokens: list[int] = field(default_factory=lambda: [*PROMPT])
    prompt: int = len(PROMPT)
    ends: tuple[int, ...] = (END,)
    output: list[int] = field(default_factory=list)
    other: dict[str, Any] = field(default_factory=dict)

    def at(self, row: int) -> Added:
        """Return what vLLM passes to add the sequence to a row."""
        options = {
            **msgspec.to_builtins(self.sampling),
            "name": self.name,
            "prompt": self.prompt,
            "ends": self.ends,
            **self.other,
        }
        return as_added(row, json.dumps(options), self.tokens, self.output)


def as_added(row: int, options: str, tokens: list[int], output: list[int]) -> Added:
    return row, SimpleNamespace(extra_args={"multiworld": options}), tokens, output


def imported_copy(folder: Path, name: str) -> ModuleType:
    """Copy the package into a folder and import a module from there, as vLLM does."""
    for source in Path(vllm_plugin.__path__[0]).glob("*.py"):
        shutil.copyfile(source, folder / source.name)
    package = f"copied_{abs(hash(str(folder)))}"
    spec = importlib.util.spec_from_file_location(package, folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{name}")


class Beside:
    """The module, as vLLM imports it, and the folder of its reports."""

    def __init__(self, folder: Path) -> None:
        save_tokenizer(folder)
        facts = {"vocabulary": VOCABULARY, "end_tokens": [END]}
        (folder / "model.json").write_text(json.dumps(facts))
        self.module: ModuleType = imported_copy(folder, "sampling")
        self.structures: ModuleType = sys.modules[self.module.Structure.__module__]
        self.reports = folder / "failures"
        self.reports.mkdir()

    def processor(self, *asked: Asked) -> Any:
        made = self.module.MultiworldSampling(None, torch.device("cpu"), False)
        rows = [one.at(row) for row, one in enumerate(asked)]
        made.update_state(BatchUpdate(added=rows))
        return made

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Reports that have come since the last call: names and errors."""
        found = []
        for report in sorted(self.reports.iterdir()):
            found.append((report.name, report.read_text()))
            report.unlink()
        return found


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Beside:
    return Beside(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def beside(opened: Beside) -> Beside:
    assert opened.failures == [], "of another test"
    return opened


def logits_after(tokens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return the logits of a model: a function of the tokens."""
    seed = random.Random(repr(list(tokens))).getrandbits(60)
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(VOCABULARY, generator=generator) * 3).to(dtype)


def expected(one: Asked, dtype: torch.dtype) -> int:
    tokens = [*one.tokens, *one.output]
    history = TokenHistory(one.sampling, tokens, one.prompt, one.ends)
    logits = logits_after(tokens, dtype).float()[None].clone()
    (found,) = sample(logits, [history])
    assert isinstance(found, Choice)
    return found.token


def apply(
    processor: Any, rows: Sequence[Asked], dtype: torch.dtype = torch.float32
) -> list[int]:
    """Take a step as vLLM does; return the token that it takes from each row."""
    made = torch.stack([logits_after([*o.tokens, *o.output], dtype) for o in rows])
    before = made.clone()
    found = processor.apply(made)
    assert found.dtype == dtype
    likeliest: list[int] = found.argmax(-1).tolist()
    for row, token in enumerate(likeliest):
        if not torch.equal(found[row], before[row]):
            assert only(found[row]) == token
        else:
            assert rows[row].sampling.temperature == 0.0
    return likeliest


def only(row: torch.Tensor) -> int:
    """Return the only token that is left in a row."""
    (token,) = (row > -math.inf).nonzero().flatten().tolist()
    assert row[token] == 0.0
    return int(token)


def generated(processor: Any, one: Asked, count: int) -> list[int]:
    """Generate a sequence alone in its batch; return all tokens after its prompt."""
    while len(one.tokens) + len(one.output) < one.prompt + count:
        one.output += apply(processor, [one])
    return [*one.tokens, *one.output][one.prompt :]


# The tokens.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_token_is_the_one_that_our_sampler_chooses(
    beside: Beside, name: str, dtype: torch.dtype
) -> None:
    one = Asked(name, Sampling(**SAMPLINGS[name]))
    processor = beside.processor(one)
    for _ in range(8):
        token = expected(one, dtype)
        assert apply(processor, [one], dtype) == [token]
        one.output.append(token)
    assert beside.failures == []


def test_sequences_of_a_batch_do_not_affect_each_other(beside: Beside) -> None:
    every = [Asked(name, Sampling(**given)) for name, given in SAMPLINGS.items()]
    processor = beside.processor(*every)
    for _ in range(4):
        tokens = [expected(one, torch.float32) for one in every]
        assert apply(processor, every) == tokens
        for one, token in zip(every, tokens, strict=True):
            one.output.append(token)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_sequence_that_continues_gets_the_tokens_of_an_undisturbed_one(
    beside: Beside, name: str
) -> None:
    """vLLM's prompt then contains output tokens as well."""
    sampling = Sampling(**SAMPLINGS[name])
    whole = Asked("whole", sampling)
    tokens = generated(beside.processor(whole), whole, 8)
    for cut in range(8):
        rest = Asked("rest", sampling, [*PROMPT, *tokens[:cut]])
        assert generated(beside.processor(rest), rest, 8) == tokens


def test_sequence_that_vllm_preempted_continues(beside: Beside) -> None:
    one = Asked("one", Sampling(**SAMPLINGS["penalties"]))
    tokens = generated(beside.processor(one), one, 8)
    again = Asked("again", one.sampling, output=tokens[:5])
    processor = beside.processor(again)
    processor.update_state(BatchUpdate(removed=[0]))
    processor.update_state(BatchUpdate(added=[again.at(0)]))
    assert generated(processor, again, 8) == tokens


def staged(beside: Beside, *asked: Asked) -> Any:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )
    made = beside.module.MultiworldSampling(config, torch.device("cpu"), False)
    made.update_state(BatchUpdate(added=[one.at(n) for n, one in enumerate(asked)]))
    return made


@pytest.mark.parametrize("is_kept", [True, False])
def test_sequence_that_stages_add_again_is_not_read_again(
    beside: Beside, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    """With stages, every second step removes it; at most ``max_num_seqs`` are kept."""
    begun, sequence = [], beside.module.Sequence

    def counted(*given: Any) -> Any:
        begun.append(given)
        return sequence(*given)

    monkeypatch.setattr(beside.module, "Sequence", counted)
    one = structured("one", "[a-z]{6}", seed=5, presence_penalty=0.5)
    others = [Asked(str(n), Sampling()) for n in range(2 if is_kept else 3)]
    processor = staged(beside, one, *others)
    for _ in range(7):
        processor.update_state(BatchUpdate(removed=range(4)))
        processor.update_state(BatchUpdate(added=[one.at(0)]))
        assert len(begun) == (3 if is_kept else 5)
        if not is_kept:
            return
        one.output += apply(processor, [one])
    again = structured("one", "[a-z]{6}", seed=5, presence_penalty=0.5)
    assert one.output == generated(beside.processor(again), again, 7)


def test_sequence_of_that_name_with_other_tokens_is_read_again(beside: Beside) -> None:
    """vLLM may have preempted it."""
    one = Asked("one", Sampling(seed=3))
    processor = staged(beside, one)
    processor.update_state(BatchUpdate(removed=[0]))
    again = Asked("one", Sampling(seed=3), output=[8, 9])
    processor.update_state(BatchUpdate(added=[again.at(0)]))
    assert apply(processor, [again]) == [expected(again, torch.float32)]


class Ranks:
    """The ranks of a fake server, one of which samples first."""

    def __init__(self, *, is_first: bool, shared: list[list[int]]) -> None:
        self.is_first, self._shared = is_first, shared

    def share(self, tokens: list[int], device: torch.device) -> list[int]:
        assert device.type == "cpu"
        if self.is_first:
            self._shared.append(tokens)
        return self._shared[-1]


def test_ranks_take_the_tokens_of_the_first(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[list[int]] = []
    slow, is_asked = structured("slow", "x{3}"), threading.Event()

    class LateExecutor(ThreadPoolExecutor):
        """An executor whose tasks wait until the step has been computed."""

        def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            return super().submit(lambda: is_asked.wait(10.0) and task(*args, **kwargs))

    monkeypatch.setattr(beside.structures, "ThreadPoolExecutor", LateExecutor)
    every = [
        Asked("greedy", Sampling(temperature=0.0)),
        Asked("drawn", Sampling(seed=5)),
        Asked("bad", Sampling(), other={"seed": "x"}),
        slow,
    ]
    left = []
    for is_first in (True, False):
        ranks = partial(Ranks, is_first=is_first, shared=shared)
        monkeypatch.setattr(beside.module, "Ranks", ranks)
        monkeypatch.setattr(beside.module, "SHARED_S", 0.0)
        processor = beside.processor(*every)
        made = torch.stack([logits_after(one.tokens, torch.float32) for one in every])
        left.append(processor.apply(made))
        is_asked.set()
        assert len(beside.failures) == (2 if is_first else 0)
    assert torch.equal(*left)
    found = left[0].argmax(-1).tolist()
    assert found[:2] == [expected(one, torch.float32) for one in every[:2]]
    assert found[2:] == [END, END]


def test_ranks_of_vllm_are_those_with_the_same_logits(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those ranks are the tensor-parallel group of the last stage."""
    sent: list[tuple[list[int], int]] = []

    def broadcast(tokens: torch.Tensor, src: int) -> None:
        sent.append((tokens.tolist(), src))
        tokens.fill_(7)

    def vllm(size: int, rank: int, *, is_last: bool) -> Any:
        tensor = SimpleNamespace(
            world_size=size, rank_in_group=rank, broadcast=broadcast
        )
        stages = SimpleNamespace(is_last_rank=is_last)
        module = SimpleNamespace(
            get_tp_group=lambda: tensor, get_pp_group=lambda: stages
        )
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(distributed=module))
        monkeypatch.setitem(sys.modules, "vllm.distributed", module)
        return beside.module.Ranks()

    device = torch.device("cpu")
    assert beside.module.Ranks().is_first, "without vLLM"
    assert vllm(1, 0, is_last=True).share([1, 2], device) == [1, 2]
    assert sent == []
    assert not vllm(2, 0, is_last=False).is_first
    assert not vllm(2, 1, is_last=True).is_first
    first = vllm(2, 0, is_last=True)
    assert first.is_first
    assert first.share([1, 2], device) == [7, 7]
    assert sent == [([1, 2], 0)]


def test_likeliest_of_equal_words_is_the_first(beside: Beside) -> None:
    """vLLM chooses for greedy sequences, with the same result as our sampler."""
    one = Asked("one", Sampling(temperature=0.0))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [40, 90, 91]] = 2.0
    (choice,) = sample(logits.clone(), [TokenHistory(one.sampling, PROMPT, 4)])
    found = beside.processor(one).apply(logits.clone())
    assert torch.equal(found, logits), "left alone"
    assert isinstance(choice, Choice)
    assert choice.token == found.argmax(-1).item() == 40


def test_argmax_depends_on_it(beside: Beside) -> None:
    """Otherwise vLLM would skip it for sequences without temperature."""
    assert not beside.processor().is_argmax_invariant()


# Updates of the batch.


def test_sequence_without_our_parameters_is_left_alone(beside: Beside) -> None:
    one, other = Asked("one", Sampling()), Asked("other", Sampling())
    processor = beside.processor(one, other)
    for extra in (None, {}, {"theirs": 1}):
        params = SimpleNamespace(extra_args=extra)
        foreign: Added = (0, params, [*PROMPT], [])
        processor.update_state(BatchUpdate(added=[foreign]))
        logits = torch.zeros(2, VOCABULARY)
        processor.apply(logits)
        assert bool((logits[0] == 0.0).all())
        only(logits[1])


def test_steps_without_an_update_change_nothing(beside: Beside) -> None:
    """vLLM then passes None, and an empty batch has no rows."""
    one = Asked("one", Sampling())
    processor = beside.processor(one)
    processor.update_state(None)
    assert apply(processor, [one]) == [expected(one, torch.float32)]
    processor.apply(torch.zeros(0, VOCABULARY))
    assert beside.failures == []


Rows = dict[int, Asked]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sequences_keep_their_tokens_wherever_vllm_moves_them(
    opened: Beside, data: st.DataObject
) -> None:
    """An update lists what was removed, added and moved, in vLLM's order."""
    processor, rows, count = opened.processor(), Rows(), 0
    row = st.integers(0, 4)
    for _ in range(data.draw(st.integers(1, 6), "updates")):
        removed = (
            data.draw(st.lists(st.sampled_from(sorted(rows)), unique=True))
            if (rows)
            else []
        )
        for at in removed:
            del rows[at]
        added = []
        for at in data.draw(st.lists(row, max_size=3, unique=True), "added"):
            count += 1
            given = Sampling(seed=count, top_k=data.draw(st.sampled_from([0, 5])))
            rows[at] = Asked(str(count), given)
            added.append(rows[at].at(at))
        moved = []
        for _ in range(data.draw(st.integers(0, 3), "moves")):
            source, target = data.draw(row, "source"), data.draw(row, "target")
            if source == target:
                continue
            direction = data.draw(st.sampled_from(Direction), "direction")
            one, other = rows.pop(source, None), rows.pop(target, None)
            if one is not None:
                rows[target] = one
            if other is not None and direction is Direction.SWAP:
                rows[source] = other
            moved.append((source, target, direction))
        processor.update_state(BatchUpdate(removed, added, moved))
        logits = torch.zeros(5, VOCABULARY)
        for at, one in rows.items():
            logits[at] = logits_after([*one.tokens, *one.output], torch.float32)
        processor.apply(logits)
        for at in range(5):
            if at not in rows:
                assert bool((logits[at] == 0.0).all())
                continue
            token = expected(rows[at], torch.float32)
            assert only(logits[at]) == token
            rows[at].output.append(token)
    assert opened.failures == []


# Structured output.


def letters(tokens: Sequence[int], folder: Path) -> str:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    names = {token: letter for letter, token in model["vocab"].items()}
    return "".join(names[token] for token in tokens)


def structured(name: str, pattern: str, **sampling: Any) -> Asked:
    grammar = grammar_of_regex(pattern, "p")
    return Asked(name, Sampling(**{"grammar": grammar, **sampling}))


def test_structure_holds_and_ends(beside: Beside) -> None:
    for seed in range(4):
        one = structured("one", "(ab|cde){2}f", seed=seed)
        processor = beside.processor(one)
        while END not in one.output:
            one.output += apply(processor, [one])
        assert one.output[-1] == END
        text = letters(one.output[:-1], Path(beside.structures.HERE))
        assert text in {f"{a}{b}f" for a in ("ab", "cde") for b in ("ab", "cde")}
        assert apply(processor, [one]) == [END], "vLLM may be a step ahead"
    assert beside.failures == []


def test_structure_continues_at_every_cut(beside: Beside) -> None:
    whole = structured("whole", "[a-z]{6}", seed=5)
    tokens = generated(beside.processor(whole), whole, 7)
    assert tokens[-1] == END
    for cut in range(7):
        rest = structured("rest", "[a-z]{6}", seed=5)
        rest.tokens += tokens[:cut]
        assert generated(beside.processor(rest), rest, 7) == tokens


# Failures.


BROKEN_OPTIONS: dict[str, str] = {
    "no JSON": "{",
    "no object": "[1]",
    "empty": "{}",
    "no prompt": '{"name": "x", "ends": []}',
    "no ends": '{"name": "x", "prompt": 1}',
    "bias by name": '{"name":"x","prompt":1,"ends":[],"logit_bias":{"a":1}}',
    "huge token": '{"name":"x","prompt":1,"ends":[],"logit_bias":{"9e9":1}}',
    "bias of 80 bits": json.dumps(
        {"name": "x", "prompt": 1, "ends": [], "logit_bias": {str(2**80): 1}}
    ),
    "bias in words": '{"name":"x","prompt":1,"ends":[],"logit_bias":{"1":"a"}}',
    "penalty in words": '{"name":"x","prompt":1,"ends":[],"presence_penalty":"a"}',
    "grammar of numbers": '{"name":"x","prompt":1,"ends":[],"grammar":[5]}',
    "deep": '{"a":' * 100_000,
}


@pytest.mark.parametrize("name", BROKEN_OPTIONS)
def test_options_that_cannot_be_read_are_reported(beside: Beside, name: str) -> None:
    good = Asked("good", Sampling(seed=3))
    processor = beside.processor(good)
    options = BROKEN_OPTIONS[name]
    broken = as_added(1, options, [*PROMPT], [])
    processor.update_state(BatchUpdate(added=[broken]))
    logits = torch.stack([logits_after(PROMPT, torch.float32)] * 2)
    processor.apply(logits)
    assert only(logits[0]) == expected(good, torch.float32)
    ((found, error),) = beside.failures
    assert found == ("x" if '"x"' in options else "unnamed")
    assert error


ABSURD: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": "hot"},
    "top_k": {"top_k": "many"},
    "huge top_k": {"top_k": 2**80, "min_p": 0.5},
    "seed": {"seed": "x"},
    "choice": {"choice": -1},
    "penalty": {"repetition_penalty": "x"},
    "bias": {"logit_bias": {10**6: 1.0}},
    "negative bias": {"logit_bias": {-1: 1.0}},
    "min_tokens": {"min_tokens": "x"},
    "prompt": {"prompt": "x"},
    "ends": {"ends": ["x"], "min_tokens": 5},
    "far end": {"ends": [10**6], "temperature": "hot"},
    "negative end": {"ends": [-(10**6)], "temperature": "hot"},
    "no grammar": {"grammar": "no grammar"},
    "grammar of nothing": {"grammar": '{"grammars": []}'},
    "no matching token": {"grammar": grammar_of_regex("x", "p"), "prompt": 1},
}


@pytest.mark.parametrize("name", ABSURD)
def test_absurd_values_fail_their_own_sequence_alone(beside: Beside, name: str) -> None:
    goods = [Asked(str(n), Sampling(seed=n, top_k=9 * n)) for n in range(2)]
    bad = Asked("bad", Sampling(), other=ABSURD[name])
    processor = beside.processor(goods[0], bad, goods[1])
    for _ in range(2):
        tokens = [expected(one, torch.float32) for one in goods]
        first, _, last = apply(processor, [goods[0], bad, goods[1]])
        assert [first, last] == tokens
        for one, token in zip(goods, tokens, strict=True):
            one.output.append(token)
    ((found, error),) = beside.failures
    assert found == "bad"
    assert error


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_fail_their_sequence_alone(
    beside: Beside, value: float
) -> None:
    good, bad = Asked("good", Sampling()), Asked("bad", Sampling(), ends=(9,))
    processor = beside.processor(bad, good)
    logits = torch.full((2, VOCABULARY), value)
    logits[1] = logits_after(PROMPT, torch.float32)
    processor.apply(logits)
    assert only(logits[0]) == 9, "an end token"
    assert only(logits[1]) == expected(good, torch.float32)
    ((found, error),) = beside.failures
    assert found == "bad"
    assert "not finite" in error


def test_step_does_not_wait_for_grammars(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, matcher = threading.Event(), llguidance.LLMatcher

    def slow(*given: Any, **named: Any) -> Any:
        free.wait(60.0)
        return matcher(*given, **named)

    good = Asked("good", Sampling(seed=3))
    slow_ones = [structured(str(n), f"x{n}") for n in range(100)]
    monkeypatch.setattr(llguidance, "LLMatcher", slow)
    monkeypatch.setattr(beside.module, "ALONE_S", 0.1)
    processor = beside.processor(*slow_ones, good)
    assert apply(processor, [*slow_ones, good]) == [
        *[END] * 100,
        expected(good, torch.float32),
    ]
    failures = beside.failures
    assert len(failures) == 100
    assert {text for _, text in failures} == {"later: the grammar is not compiled yet"}
    for one in slow_ones[0], slow_ones[-1]:  # without others, too
        processor.update_state(BatchUpdate([*range(101)], [one.at(0)]))
        assert apply(processor, [one]) == [END]
    assert len(beside.failures) == 2
    free.set()
    monkeypatch.setattr(beside.module, "ALONE_S", 60.0)
    for one in slow_ones[1], slow_ones[-1]:  # the first has given way to others
        processor.update_state(BatchUpdate([0], [one.at(0)]))
        assert letters(apply(processor, [one]), beside.reports.parent) == "x"
    assert beside.failures == []


def test_grammar_without_a_thread_fails_its_sequence_this_time_only(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system may have threads again later."""

    def none_left(*given: Any) -> None:
        raise RuntimeError("can't start new thread")

    one, good = structured("one", "thread"), Asked("good", Sampling(seed=3))
    with monkeypatch.context() as patch:
        patch.setattr(beside.structures.ThreadPoolExecutor, "submit", none_left)
        processor = beside.processor(one, good)
    assert apply(processor, [one, good]) == [END, expected(good, torch.float32)]
    ((name, error),) = beside.failures
    assert name == "one"
    assert error.startswith("error: ")
    processor.update_state(BatchUpdate([0], [one.at(0)]))
    assert letters(apply(processor, [one, good])[:1], beside.reports.parent) == "t"


def test_every_sequence_that_fails_is_reported(beside: Beside) -> None:
    """Without a report, an end token would look like an answer."""
    bad = [Asked(str(n), Sampling(), other={"seed": "x"}) for n in range(600)]
    assert apply(beside.processor(*bad), bad) == [END] * 600
    assert {name for name, _ in beside.failures} == {one.name for one in bad}


def test_nobody_need_read_the_reports(tmp_path: Path) -> None:
    """Neither an exited replica nor an old report may stop vLLM."""
    alone = Beside(tmp_path)
    bad = Asked("bad", Sampling(), other={"seed": "x"})
    for _ in range(2):
        assert apply(alone.processor(bad), [bad]) == [END]
    assert len(alone.failures) == 1
    alone.reports.rmdir()
    assert apply(alone.processor(bad), [bad]) == [END]
