"""Requests to vLLM, and its answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multiworld.errors import InvalidRequestError, ModelFailedError
from multiworld.serve.engine.external.vllm import (
    Runner,
    VllmEngine,
    failure_of,
    sampling_of,
    tokens_of,
)
from multiworld.serve.engine.external.whole_engine import (
    BusyError,
    EngineSettings,
    EngineToken,
    Run,
    RunFailedError,
)
from multiworld.serve.wire.generation_messages import Sampling

SCORES = {7: -3.0, 5: -0.5, 6: -1.0}
"""The sampled token comes first, as vLLM lists it."""


def event(*, is_old: bool) -> bytes:
    """Return an event with one token; before vLLM 0.32 its scores have no IDs."""
    scores = [
        {"logprob": value}
        | ({"token": f"token_id:{token}"} if is_old else {"token_id": token})
        for token, value in SCORES.items()
    ]
    content = [{**scores[0], "top_logprobs": scores}]
    choice = {"index": 0, "token_ids": [7], "logprobs": {"content": content}}
    return json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize("is_old", [True, False])
def test_scores_are_read_with_and_without_ids(*, is_old: bool) -> None:
    """Only the likeliest tokens are read; the sampled one need not be among them."""
    run = Run((1,), 1, Sampling(logprobs=2))
    (token,) = tokens_of(event(is_old=is_old), run)
    assert token == EngineToken(7, -3.0, ((5, -0.5), (6, -1.0)))


def test_more_tokens_than_asked_for_are_not_read() -> None:
    """A line may have millions of tokens."""
    choice = {"token_ids": [7] * 100}
    data = json.dumps({"choices": [choice]}).encode()
    run = Run((1, 2), 1, Sampling(max_tokens=4))
    assert tokens_of(data, run) == [EngineToken(7)] * 3


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("structured output failed: x", InvalidRequestError),
        ("later: the grammar is not compiled yet", BusyError),
        ("error: OutOfMemoryError()", RunFailedError),
        ("token 9 is outside the vocabulary", ModelFailedError),
        ("", RunFailedError),  # the disk was full
    ],
)
def test_reports_say_whether_another_replica_may_try(
    tmp_path: Path, text: str, kind: type[Exception]
) -> None:
    """Out of memory, one replica fails; with an impossible structure, all would."""
    (tmp_path / "x").write_text(text)
    assert type(failure_of(tmp_path / "x")) is kind


def test_limit_of_scores_is_checked_before_a_run() -> None:
    """Otherwise the run would fail on one replica after another."""
    for args, most in (
        ({}, 20),
        ({"max-logprobs": 5}, 5),
        ({"max_logprobs": None}, 20),
    ):
        engine = VllmEngine(
            EngineSettings(replica="r", path="", vocabulary=9, args=args)
        )
        engine.check(Sampling(logprobs=most))
        with pytest.raises(InvalidRequestError, match=f"at most {most} likely"):
            engine.check(Sampling(logprobs=most + 1))
    unlimited = {"max_logprobs": -1}
    settings = EngineSettings(replica="r", path="", vocabulary=9, args=unlimited)
    VllmEngine(settings).check(Sampling(logprobs=1000))


def test_text_in_place_of_a_token_fails_the_run() -> None:
    """It may be no token, or the token of another text."""
    text = event(is_old=True).replace(b"token_id:5", b"five")
    with pytest.raises(RunFailedError, match="returned 'five' in place"):
        tokens_of(text, Run((1,), 1, Sampling(logprobs=2)))


def test_stop_tokens_beyond_the_memory_of_runner_v2_are_refused() -> None:
    """They would crash vLLM, on one replica after another."""
    engine = VllmEngine(
        EngineSettings(replica="r", path="", vocabulary=999, end_tokens=(1,))
    )
    many = Sampling(min_tokens=1, stop_token_ids=tuple(range(120)))
    engine.check(many)  # our own sampler takes them
    engine.runner = Runner("v2", "0.32.0")
    with pytest.raises(InvalidRequestError, match="at most 120 stop tokens"):
        engine.check(many)
    engine.check(Sampling(stop_token_ids=tuple(range(1024))))
    engine.check(Sampling(min_tokens=1, stop_token_ids=tuple(range(119))))


def test_request_to_runner_v2_is_what_an_undisturbed_one_would_be() -> None:
    """The delivered tokens are subtracted from its limits."""
    given = Sampling(seed=2**63 - 1, choice=1, min_tokens=5, max_tokens=9, top_k=4)
    run = Run((1, 2, 3, 4, 5), 2, given)
    found = sampling_of(run)
    assert found["min_tokens"] == 2
    assert 0 <= found["seed"] < 2**63
    assert found["seed"] != sampling_of(Run((1,), 1, Sampling(seed=2**63 - 1)))["seed"]
    late = Run((1, 2, *range(8)), 2, given)
    assert sampling_of(late)["min_tokens"] == 0
    biased = Run((1,), 1, Sampling(logit_bias={7: 2.0}))
    assert sampling_of(biased)["logit_bias"] == {"7": 2.0}
