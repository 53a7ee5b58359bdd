"""The computation of one stage: what it keeps, drops and refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from multiworld.serve.engine.compute.kv_cache import MissingTokensError
from multiworld.serve.engine.compute.stage_engine import Chores, StageEngine
from multiworld.serve.spec.stage import Generation
from multiworld.serve.wire.generation_messages import (
    Sampling,
    SequenceStart,
    StepPart,
)
from multiworld.serve.wire.protocol import Key

WORDS = 8
FACTS = Generation(
    tokenizer=lambda: None, end_tokens=(), vocabulary=WORDS, max_tokens=99, kv_bytes=[1]
)


def stage(rows: Any, positions: Any, attention: Any, wanted: Any) -> Any:
    """Return logits that favour the number of tokens seen so far."""
    if int(rows.min()) < 0:
        raise ValueError("no such token")
    ones = torch.ones((1, len(rows), 1))
    seen = attention.attend(0, ones, ones, torch.ones_like(ones))
    assert seen.shape == (len(rows), 1, 1)
    logits = torch.zeros((len(wanted), WORDS))
    logits[torch.arange(len(wanted)), positions[wanted] % WORDS] = 1.0
    return logits


def key(number: int) -> Key:
    return "gateway/1", number, 0


def start(number: int, *tokens: int) -> SequenceStart:
    sampling = Sampling(temperature=0.0, max_tokens=5)
    return SequenceStart(key(number), tokens, len(tokens), ("a",), sampling)


def engine_with(*starts: SequenceStart) -> StageEngine:
    engine = StageEngine(stage, is_last=True, model=FACTS)
    engine.tidy(Chores(open=[(each, None) for each in starts]))
    return engine


def part(number: int, begin: int, count: int, samples: bool = True) -> StepPart:
    return StepPart(key(number), begin, count, samples)


def test_sequence_that_fails_does_not_fail_the_others_of_its_step() -> None:
    """The sequences of a failed step are computed one by one."""
    engine = engine_with(start(1, 1, 1), start(2, 1))
    found = engine.compute([part(1, 0, 2), part(2, 0, 1)], torch.tensor([1, 1, -1]))
    assert [item.token for item in found.tokens] == [1]
    ((failed, error),) = found.failed
    assert failed == key(2)
    assert isinstance(error, ValueError)


def test_logits_of_another_shape_fail_by_name() -> None:
    """The logits of a wrong row would sample a token of another sequence."""
    engine = engine_with(start(1, 1, 1))
    engine.function = lambda rows, *others: torch.zeros(len(rows), 4)
    ((_, error),) = engine.compute([part(1, 0, 2)], torch.tensor([1, 1])).failed
    assert "[wanted, vocabulary]" in str(error)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_fail_their_sequence_alone(bad: float) -> None:
    def broken(rows: Any, positions: Any, attention: Any, wanted: Any) -> Any:
        logits = stage(rows, positions, attention, wanted)
        logits[rows[wanted] == 2, 0] = bad
        return logits

    engine = StageEngine(broken, is_last=True, model=FACTS)
    engine.tidy(Chores(open=[(start(1, 1, 1), None), (start(2, 2), None)]))
    found = engine.compute([part(1, 0, 2), part(2, 0, 1)], torch.tensor([1, 1, 2]))
    assert [item.key for item in found.tokens] == [key(1)]
    ((failed, error),) = found.failed
    assert failed == key(2)
    assert "not finite" in str(error)


def test_tokens_that_were_never_computed_here_are_noticed() -> None:
    """Otherwise attention would read whatever the memory holds."""
    engine = engine_with(start(1, 1, 1, 1))
    engine.compute([part(1, 0, 1, samples=False)], torch.tensor([1]))
    for begin in (2, 1):
        found = engine.compute([part(1, begin, 1)], torch.tensor([1]))
        is_missing = [
            isinstance(error, MissingTokensError) for _, error in found.failed
        ]
        assert is_missing == [True] * (begin == 2)


def test_preempted_sequence_is_computed_again_and_continues() -> None:
    engine = engine_with(start(1, 1, 1))
    (first,) = engine.compute([part(1, 0, 2)], torch.tensor([1, 1])).tokens
    assert (first.index, first.token) == (0, 1)
    engine.tidy(Chores(drop=[key(1)[:2]]))
    assert engine.cache.nbytes == 0
    (again,) = engine.compute([part(1, 0, 3)], torch.tensor([1, 1, 1])).tokens
    assert (again.index, again.token) == (1, 2)
    engine.tidy(Chores(free=[key(1)[:2]]))
    assert engine.cache.nbytes == 0


def test_sequence_that_continues_as_another_attempt_keeps_what_it_has() -> None:
    sampling = Sampling(temperature=0.0, max_tokens=5, prompt_logprobs=0)
    begun = SequenceStart(key(1), (1, 1, 1), 3, ("a",), sampling)
    engine = engine_with(begun)
    engine.compute([part(1, 0, 2, samples=False)], torch.tensor([1, 1]))
    again = SequenceStart(
        ("gateway/1", 1, 1), (1, 1, 1), 3, ("a",), sampling, previous=0
    )
    engine.tidy(Chores(open=[(again, None)]))
    rest = StepPart(again.key, 2, 1, True)
    (first,) = engine.compute([rest], torch.tensor([1])).tokens
    assert (first.key, first.index, first.token) == (again.key, 0, 2)
    assert len(first.prompt) == 2
