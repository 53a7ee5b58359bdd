"""The sampler, compared with transformers' processors."""

from __future__ import annotations

import ast
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.serve.engine.compute import sampler
from multiworld.serve.engine.compute.sampler import (
    BLOCK,
    WORDS,
    Choice,
    TokenHistory,
    clocks,
    finish_of,
    hash_of,
    sample,
)
from multiworld.serve.wire.generation_messages import Sampling


def choose(
    logits: torch.Tensor,
    sampling: Sampling,
    tokens: Sequence[int],
    prompt: int,
    ends: Sequence[int] = (),
) -> Choice:
    (found,) = sample(
        logits[None].clone(), [TokenHistory(sampling, tokens, prompt, ends)]
    )
    assert isinstance(found, Choice), found
    return found


LOGITS = torch.tensor([1.0, 3.0, 2.0, 2.5, -1.0, 0.0])


def drawn(sampling: dict[str, Any], count: int = 400) -> Counter[int]:
    """Return how often each token is chosen, over many indices."""
    made = Sampling(seed=11, **sampling)
    tokens = [0]
    found: Counter[int] = Counter()
    for index in range(count):
        found[choose(LOGITS, made, [*tokens, *[0] * index], 1, ()).token] += 1
    return found


def test_without_temperature_the_most_likely_token_is_taken() -> None:
    assert choose(LOGITS, Sampling(temperature=0.0), [0], 1, ()).token == 1
    tie = torch.tensor([1.0, 2.0, 2.0])
    assert choose(tie, Sampling(temperature=0.0), [0], 1, ()).token == 1


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    count = 4000
    found = drawn({}, count)
    for token, share in enumerate(LOGITS.softmax(-1).tolist()):
        spread = 5 * (count * share * (1 - share)) ** 0.5 + 1
        assert abs(found[token] - count * share) < spread


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.5}, {1, 3}),
        ({"top_p": 0.0}, {1}),
        ({"min_p": 0.55}, {1, 3}),
        ({"temperature": 1e-4}, {1}),
        ({"logit_bias": {4: 100.0}}, {4}),
        ({"logit_bias": {1: -100.0, 3: -100.0}, "top_k": 1}, {2}),
    ],
)
def test_only_some_tokens_are_drawn_from(
    sampling: dict[str, Any], kept: set[int]
) -> None:
    assert set(drawn(sampling)) == kept


@settings(deadline=None)
@given(
    st.lists(st.integers(-320, 320), min_size=3, max_size=20, unique=True),
    st.floats(0.1, 1.0),
    st.integers(1, 20),
    st.floats(0.0, 1.0),
)
def test_kept_tokens_are_those_of_transformers(
    numbers: list[int], top_p: float, top_k: int, min_p: float
) -> None:
    """Libraries apply these parameters in different orders, so one at a time."""
    from transformers import (
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.tensor(numbers) / 64
    found: tuple[tuple[Any, dict[str, Any]], ...] = (
        (TopPLogitsWarper(top_p), {"top_p": top_p}),
        (TopKLogitsWarper(top_k), {"top_k": top_k}),
        (MinPLogitsWarper(min_p), {"min_p": min_p}),
    )
    for theirs, ours in found:
        kept = theirs(torch.zeros((1, 1)), logits[None].double())[0].isfinite()
        token = choose(logits, Sampling(seed=3, **ours), [0], 1, ()).token
        assert kept[token]


def expected(logits: torch.Tensor, sampling: Sampling, index: int, slack: float) -> int:
    """Return the token that sorting the whole vocabulary in float64 gives."""
    likely = (logits.double() / sampling.temperature).softmax(-1)
    likely[likely < sampling.min_p * float(likely.max())] = 0
    if sampling.top_k:
        last = likely.sort(descending=True).values[: sampling.top_k][-1]
        likely[likely < last] = 0
    ordered = likely.sort(descending=True).values
    above = ordered.cumsum(-1) - ordered
    count = int((above < (sampling.top_p + slack) * ordered.sum()).sum())
    likely[likely < ordered[max(count, 1) - 1]] = 0
    hashes = torch.tensor([[hash_of(sampling.seed, sampling.choice, index)]])
    numbers = torch.arange(len(likely))
    blocks = numbers // BLOCK
    sums = torch.zeros(int(blocks[-1]) + 1, dtype=torch.float64)
    sums.index_add_(0, blocks, likely)
    times = clocks(hashes, numbers[None, : len(sums)])[0] / sums
    first = int(times.argmin())
    times = clocks(hashes, numbers[None] + WORDS)[0] / likely
    times[blocks != first] = torch.inf
    return int(times.argmin())


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 100.0, "top_p": 0.999},
    {"temperature": 3.0, "top_p": 0.9},
    {"top_p": 0.5},
    {"top_p": 0.95, "min_p": 0.02},
    {"min_p": 0.1},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 63},
    {"top_k": 64},
    {"top_k": 250},
    {"top_k": 10_000},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
    {"top_k": 200, "top_p": 0.9, "min_p": 0.001, "temperature": 2.0},
]


@pytest.mark.parametrize("kind", ["plain", "peaked", "ties", "equal"])
@pytest.mark.parametrize("parameters", PARAMETERS, ids=str)
def test_same_token_is_drawn_as_by_sorting_the_vocabulary(
    parameters: dict[str, Any], kind: str
) -> None:
    chance = torch.Generator().manual_seed(5)
    for seed in range(40):
        logits = torch.randn(700, generator=chance) * 2
        if kind == "peaked":
            logits[::35] += 6
        elif kind == "ties":
            logits = logits.round()
        elif kind == "equal":
            logits = torch.zeros(700)
        made = Sampling(seed=seed, **parameters)
        token = choose(logits, made, [0] * seed, 0).token
        near = {expected(logits, made, seed, by) for by in (-1e-6, 0.0, 1e-6)}
        assert token in near


def mixed(
    count: int, vocabulary: int
) -> tuple[torch.Tensor, list[TokenHistory], list[torch.Tensor | None]]:
    chance = torch.Generator().manual_seed(7)
    logits = torch.randn(count, vocabulary, generator=chance) * 3
    adjusting: list[dict[str, Any]] = [
        {},
        {"presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {3: 9.0, 4: -100.0}, "logprobs": 3},
        {"min_tokens": 1000, "frequency_penalty": 0.1},
        {"logprobs": 0},
    ]
    histories, masks = [], []
    for row in range(count):
        parameters = PARAMETERS[row % len(PARAMETERS)] | adjusting[row % 5]
        if row % 7 == 0:
            parameters = parameters | {"temperature": 0.0}
        tokens = torch.randint(vocabulary, (30 + row,), generator=chance).tolist()
        made = Sampling(seed=row, **parameters)
        histories.append(TokenHistory(made, tokens, 10, (1, 2)))
        size = (-(-vocabulary // 8),)
        mask = torch.randint(256, size, generator=chance, dtype=torch.uint8)
        masks.append(mask if row % 3 == 0 else None)
    return logits, histories, masks


@pytest.mark.parametrize("vocabulary", [50_257, 700])
def test_token_depends_neither_on_the_others_of_a_step_nor_on_threads(
    vocabulary: int,
) -> None:
    logits, histories, masks = mixed(60, vocabulary)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [
            sample(logits[i : i + 1].clone(), histories[i : i + 1], masks[i : i + 1])[0]
            for i in range(60)
        ]
        for count in (1, 2, 3, 4, 5):
            torch.set_num_threads(count)
            assert sample(logits.clone(), histories, masks) == alone
        order = torch.randperm(60).tolist()
        moved = sample(
            logits[order], [histories[i] for i in order], [masks[i] for i in order]
        )
        assert moved == [alone[i] for i in order]
    finally:
        torch.set_num_threads(threads)
    for i, one in enumerate(alone):
        assert isinstance(one, Choice)
        mask = masks[i]
        assert mask is None or mask[one.token // 8] >> one.token % 8 & 1
        if histories[i].parameters.min_tokens:
            assert one.token not in (1, 2)


def test_rows_with_errors_fail_alone() -> None:
    logits = torch.zeros(5, 200)
    logits[1, 7], logits[2, 8], logits[3] = torch.nan, torch.inf, -torch.inf
    found = sample(logits, [TokenHistory(Sampling(), [0], 1)] * 5)
    assert [isinstance(one, ValueError) for one in found] == [
        *[False, True, True, True, False]
    ]


def test_words_outside_the_vocabulary_concern_their_sequence_alone() -> None:
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(1))
    plain = TokenHistory(Sampling(temperature=0.0), [0], 1)
    alone = sample(logits.clone(), [plain] * 6)
    wrong = [
        TokenHistory(Sampling(logit_bias={205: 100.0}), [0], 1),
        plain,
        TokenHistory(Sampling(logit_bias={-1: 100.0}), [0], 1),
        plain,
        TokenHistory(Sampling(repetition_penalty=9.0), [0, 203], 1),
        TokenHistory(Sampling(temperature=0.0, min_tokens=9), [0], 1, (204,)),
    ]
    found = sample(logits.clone(), wrong)
    assert [isinstance(one, ValueError) for one in found] == [
        *[True, False, True, False, True, False]
    ]
    assert [found[n] for n in (1, 3, 5)] == [alone[n] for n in (1, 3, 5)]


def test_step_without_a_last_row_samples_nothing() -> None:
    """Such a step computes only part of a prompt."""
    assert sample(torch.zeros(0, 200), []) == []


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=30), st.data())
def test_truncated_history_equals_a_shorter_one(
    tokens: list[int], data: st.DataObject
) -> None:
    prompt = data.draw(st.integers(0, len(tokens)))
    kept = data.draw(st.integers(prompt, len(tokens)))
    sampling = Sampling(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    )
    gone = TokenHistory(sampling, tokens[:prompt], prompt)
    for token in tokens[prompt:]:
        gone.append(token)
    gone.truncate(kept)
    fresh = TokenHistory(sampling, tokens[:kept], prompt)
    assert gone.tokens == fresh.tokens
    assert (gone.words is None) == (fresh.words is None)
    if gone.words is not None and fresh.words is not None:
        for one, other in zip(gone.words, fresh.words, strict=True):
            assert torch.equal(one, other)


def test_module_needs_torch_alone() -> None:
    """External engines load it in their own environment."""
    source = ast.parse(Path(sampler.__file__).read_text())
    # Imports for type checkers only are never loaded.
    source.body = [node for node in source.body if not isinstance(node, ast.If)]
    found = {
        (node.module or "").split(".")[0]
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom)
    } | {
        name.name.split(".")[0]
        for node in ast.walk(source)
        if isinstance(node, ast.Import)
        for name in node.names
    }
    assert found <= {"torch", *sys.stdlib_module_names}


def test_penalties_are_those_of_transformers_and_of_openai() -> None:
    """The repetition penalty counts the prompt too; the others only the output."""
    from transformers import RepetitionPenaltyLogitsProcessor

    tokens = [1, 4, 2, 2]
    theirs = RepetitionPenaltyLogitsProcessor(2.0)
    wanted = theirs(torch.tensor([tokens]), LOGITS[None].clone())[0]
    greedy = Sampling(temperature=0.0, repetition_penalty=2.0)
    assert choose(LOGITS, greedy, tokens, 2, ()).token == int(wanted.argmax())
    twice = Sampling(temperature=0.0, frequency_penalty=0.6)
    logits = torch.tensor([0.0, 1.0, 2.0])
    assert choose(logits, twice, [1, 1, 2], 2, ()).token == 2
    assert choose(logits, twice, [1, 1, 2, 2], 2, ()).token == 1
    once = Sampling(temperature=0.0, presence_penalty=0.6)
    assert choose(logits, once, [1, 1, 2, 2], 2, ()).token == 2


def test_sequence_does_not_end_before_min_tokens() -> None:
    sampling = Sampling(temperature=0.0, min_tokens=2)
    assert choose(LOGITS, sampling, [0], 1, (1, 3)).token == 2
    assert choose(LOGITS, sampling, [0, 2, 2], 1, (1, 3)).token == 1


def test_probabilities_are_those_before_any_parameter() -> None:
    sampling = Sampling(temperature=0.0, logit_bias={0: 50.0}, logprobs=2)
    found = choose(LOGITS, sampling, [0], 1, ())
    logprobs = LOGITS.log_softmax(-1)
    assert found.token == 0
    assert found.logprob == pytest.approx(float(logprobs[0]))
    assert [token for token, _ in found.top] == [1, 3]


def test_hashes_follow_from_seed_choice_and_index() -> None:
    seen = {
        hash_of(seed, choice, index)
        for seed in range(5)
        for choice in range(5)
        for index in range(5)
    }
    assert len(seen) == 125
    assert all(-(2**63) <= number < 2**63 for number in seen)
    assert hash_of(3, 1, 2) == hash_of(3, 1, 2)
    assert hash_of(-1, 0, 0) != hash_of(1, 0, 0)


def test_clocks_are_independent_exponential_variates() -> None:
    hashes = torch.tensor([[hash_of(0, 0, index)] for index in range(300)])
    found = clocks(hashes, torch.arange(1000)[None])
    assert found.min() > 0
    assert found.isfinite().all()
    assert abs(float(found.mean()) - 1) < 0.01
    assert abs(float(found.std()) - 1) < 0.02
    for limit in (0.1, 1.0, 5.0):
        share = float((found > limit).double().mean())
        assert share == pytest.approx(math.exp(-limit), rel=0.05)
    by_hash, by_number = torch.corrcoef(found[:50]), torch.corrcoef(found[:, :50].T)
    for matrix, count in ((by_hash, 1000), (by_number, 300)):
        others = matrix - torch.eye(50, dtype=torch.float64)
        assert float(others.abs().max()) < 6 / count**0.5


@pytest.mark.parametrize("extra", [{}, {"top_p": 0.95}, {"temperature": 2.0}])
def test_rounding_of_logits_draws_no_other_word(extra: dict[str, Any]) -> None:
    """Sampling by the cumulative distribution changed 10 to 42 of these 640 tokens."""
    chance = torch.Generator().manual_seed(4)
    logits = torch.randn(64, 20_000, generator=chance) * 1.5
    noise = torch.randn(logits.shape, generator=chance) * 3e-4
    histories = [
        TokenHistory(Sampling(seed=seed, **extra), [0], 1) for seed in range(64)
    ]
    changed = 0
    for _ in range(10):
        plain = sample(logits.clone(), histories)
        rounded = sample(logits + noise, histories)
        changed += sum(a != b for a, b in zip(plain, rounded, strict=True))
        for history in histories:
            history.append(1)
    assert changed <= 4


def test_last_token_says_why_it_is_the_last() -> None:
    sampling = Sampling(max_tokens=3)
    assert finish_of(9, 1, sampling, (9,)) == "stop"
    assert finish_of(9, 3, sampling, (9,)) == "stop"
    assert finish_of(8, 3, sampling, (9,)) == "length"
    assert finish_of(8, 2, sampling, (9,)) == ""


def test_bias_is_added_before_the_penalties() -> None:
    """As in vLLM: (1 + 2) / 2 is less than 2.25, and 1 / 2 + 2 would be more."""
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0, logit_bias={0: 2.0})
    assert choose(torch.tensor([1.0, 2.25]), sampling, [0], 1, ()).token == 1


def test_min_p_is_first_and_top_p_is_a_share_of_what_is_left() -> None:
    """As in vLLM: min_p leaves only the first token, which then has all of the mass."""
    logits = torch.tensor([0.5, 0.2, 0.15, 0.15]).log()
    drawn = {
        choose(logits, Sampling(top_p=0.7, min_p=0.45, seed=seed), [0], 1, ()).token
        for seed in range(50)
    }
    assert drawn == {0}


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=40),
    st.integers(0, 40),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
def test_history_is_the_same_from_all_tokens_and_from_one_after_the_other(
    tokens: list[int], prompt: int, presence: float, frequency: float
) -> None:
    """A stream that continues elsewhere must have the same penalties."""
    prompt = min(prompt, len(tokens))
    wanted = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    whole = TokenHistory(wanted, tokens, prompt)
    grown = TokenHistory(wanted, tokens[:prompt], prompt)
    for token in tokens[prompt:]:
        grown.append(token)
    if whole.words is None or grown.words is None:
        assert whole.words is grown.words
        return
    for one, other in zip(whole.words, grown.words, strict=True):
        assert torch.equal(one, other)
    assert whole.is_within(21)
    assert not whole.is_within(max(tokens))
