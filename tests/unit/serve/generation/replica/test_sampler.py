"""The choice of tokens, beside transformers' own processors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.serve.generation.replica import sampler
from multiworld.serve.generation.replica.sampler import choose, finish_of, uniform
from multiworld.serve.transport.generation_messages import Sampling

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
    """The first of several."""
    assert choose(LOGITS, Sampling(temperature=0.0), [0], 1, ()).token == 1
    tie = torch.tensor([1.0, 2.0, 2.0])
    assert choose(tie, Sampling(temperature=0.0), [0], 1, ()).token == 1


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    """Within five deviations."""
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
    """As the parameters say."""
    assert set(drawn(sampling)) == kept


@settings(deadline=None)
@given(
    st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=20, unique=True),
    st.floats(0.1, 1.0),
    st.integers(1, 20),
    st.floats(0.0, 1.0),
)
def test_kept_tokens_are_those_of_transformers(
    numbers: list[float], top_p: float, top_k: int, min_p: float
) -> None:
    """One parameter at a time, because their order differs among libraries."""
    from transformers import (
        MinPLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.tensor(numbers)
    found: tuple[tuple[Any, dict[str, Any]], ...] = (
        (TopPLogitsWarper(top_p), {"top_p": top_p}),
        (TopKLogitsWarper(top_k), {"top_k": top_k}),
        (MinPLogitsWarper(min_p), {"min_p": min_p}),
    )
    for theirs, ours in found:
        kept = theirs(torch.zeros((1, 1)), logits[None].double())[0].isfinite()
        token = choose(logits, Sampling(seed=3, **ours), [0], 1, ()).token
        assert kept[token]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 30), st.floats(0, 1), st.floats(0, 0.5))
def test_few_tokens_are_sorted_and_the_same_is_drawn(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    """Whether those that stay are among the few most likely ones or not."""
    chance = torch.Generator().manual_seed(seed)
    logits = torch.randn(60, generator=chance) * 4
    made = Sampling(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for few in (1, 7, 60):
            patch.setattr(sampler, "FEW", few)
            found += [choose(logits, made, [0] * n, 1, ()).token for n in range(1, 6)]
    assert found[:5] == found[5:10] == found[10:]


def test_penalties_are_those_of_transformers_and_of_openai() -> None:
    """Repetition counts the prompt too; the others only what was generated."""
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


def test_text_does_not_end_before_its_least_length() -> None:
    """The tokens that end it cannot be chosen."""
    sampling = Sampling(temperature=0.0, min_tokens=2)
    assert choose(LOGITS, sampling, [0], 1, (1, 3)).token == 2
    assert choose(LOGITS, sampling, [0, 2, 2], 1, (1, 3)).token == 1
    assert float(LOGITS[1]) == 3.0, "the logits are not changed"


def test_probabilities_are_those_before_any_parameter() -> None:
    """And as many alternatives as asked for."""
    sampling = Sampling(temperature=0.0, logit_bias={0: 50.0}, logprobs=2)
    found = choose(LOGITS, sampling, [0], 1, ())
    logprobs = LOGITS.log_softmax(-1)
    assert found.token == 0
    assert found.logprob == pytest.approx(float(logprobs[0]))
    assert [token for token, _ in found.top] == [1, 3]


def test_random_numbers_follow_from_seed_choice_and_index() -> None:
    """And from nothing else."""
    seen = {
        uniform(seed, choice, index)
        for seed in range(5)
        for choice in range(5)
        for index in range(5)
    }
    assert len(seen) == 125
    assert all(0 <= number < 1 for number in seen)
    assert uniform(3, 1, 2) == uniform(3, 1, 2)
    assert uniform(-1, 0, 0) != uniform(1, 0, 0)


def test_last_token_says_why_it_is_the_last() -> None:
    """An end counts more than the length."""
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
    """As in vLLM: only the first one has half of 0.5, and it is all of the rest."""
    logits = torch.tensor([0.5, 0.2, 0.15, 0.15]).log()
    drawn = {
        choose(logits, Sampling(top_p=0.7, min_p=0.45, seed=seed), [0], 1, ()).token
        for seed in range(50)
    }
    assert drawn == {0}
