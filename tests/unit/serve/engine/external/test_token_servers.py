"""Dialects of servers that sample themselves, and the slots of a server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from multiworld.errors import InvalidRequestError
from multiworld.serve.engine.external.pieces import next_piece
from multiworld.serve.engine.external.token_server_engine import Slots
from multiworld.serve.engine.external.token_servers import (
    MAX_BIASES,
    Completions,
    CompletionsOfText,
)
from multiworld.serve.engine.external.whole_engine import EngineToken, Run
from multiworld.serve.text.tokenizer import Tokenizer
from multiworld.serve.wire.generation_messages import Sampling
from tests.tiny_decoder import save_tokenizer


@pytest.fixture
def texts(tmp_path: Path) -> CompletionsOfText:
    save_tokenizer(tmp_path)
    return CompletionsOfText("m", Tokenizer(tmp_path), end=0)


def run_of(tokens: list[int], tenant: str = "") -> Run:
    return Run(tokens, len(tokens), Sampling(max_tokens=5), (), tenant)


def test_text_of_a_control_token_is_no_control_token(texts: CompletionsOfText) -> None:
    """A server would read a control token where a user has written its name."""
    for text, is_refused in (("a < b", False), ("see <end> here", True)):
        letters = [
            token
            for letter in text
            for token in texts.tokenizer.encode(letter, has_special=False)
        ]
        run = run_of(letters)
        piece = next_piece(run.tokens, run.prompt, run.sampling, None)
        if is_refused:
            with pytest.raises(InvalidRequestError, match="control token"):
                texts.body(run, piece, 0, True)
        else:
            assert texts.body(run, piece, 0, True)["prompt"] == text


def test_end_of_a_server_is_a_token(texts: CompletionsOfText) -> None:
    """Without end tokens, as with ``ignore_eos``, the sequence continues after it."""
    event = {"choices": [{"text": "", "finish_reason": "stop"}]}
    data = json.dumps(event).encode()
    assert texts.tokens(data, run_of([5])) == [EngineToken(0)]
    ending = Run([5], 1, Sampling(), (7, 0))
    assert texts.tokens(data, ending) == [EngineToken(7)]


def test_model_may_write_about_control_tokens(texts: CompletionsOfText) -> None:
    """The text of one neither ends its answer nor vanishes, nor is it refused later."""
    event = {"choices": [{"text": "Use <end> to end."}]}
    run = run_of([5])
    made = [found.token for found in texts.tokens(json.dumps(event).encode(), run)]
    assert texts.tokenizer.decode(made) == "Use <end> to end."
    assert not {*made} & texts.tokenizer.special
    run = replace(run, tokens=[5, *made])
    piece = next_piece(run.tokens, run.prompt, run.sampling, None)
    assert texts.body(run, piece, 0, True)["prompt"].endswith("Use <end> to end.")


@pytest.mark.parametrize(
    ("ids", "wanted"), [([], [7]), ([40], [40, 7]), ([40, 0], [40, 0])]
)
def test_end_token_that_a_server_leaves_out_is_added(
    ids: list[int], wanted: list[int]
) -> None:
    event = {"choices": [{"token_ids": ids, "finish_reason": "stop"}]}
    run = Run([5], 1, Sampling(max_tokens=5), (7, 0))
    found = Completions("m").tokens(json.dumps(event).encode(), run)
    assert [one.token for one in found] == wanted


def test_biases_that_a_server_does_not_take_are_the_weakest() -> None:
    """A server limits the biases; those of the request are always sent."""
    output = [*range(2000), 7, 7, 9]
    asked = {5000: 0.1, 7: 50.0}
    sampling = Sampling(max_tokens=9999, frequency_penalty=0.5, logit_bias=asked)
    run = Run([1, *output], 1, sampling)
    piece = next_piece(run.tokens, run.prompt, run.sampling, 1)
    found = Completions("m").body(run, piece, 0, True)["logit_bias"]
    assert len(found) == MAX_BIASES
    assert found["5000"] == 0.1
    assert found["7"] == 50.0 - 1.5
    assert found["9"] == -1.0
    assert [*map(int, found)][3:] == list(range(1999, 1999 - MAX_BIASES + 3, -1))


def test_neutral_values_are_sent_all_the_same() -> None:
    """Otherwise a server would use its own defaults."""
    sampling = Sampling(max_tokens=5, top_p=1.0, repetition_penalty=1.0)
    run = Run([1, 2], 2, sampling)
    piece = next_piece(run.tokens, run.prompt, run.sampling, 32)
    body = Completions("m").body(run, piece, 0, True)
    neutral = {
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
    }
    assert {name: body[name] for name in neutral} == neutral


def test_more_stop_tokens_than_end_a_server_are_refused() -> None:
    """With ``min_tokens``, 128 stop tokens crash vLLM's GPU runner."""
    dialect = Completions("m")
    stops = tuple(range(200))
    dialect.check(Sampling(stop_token_ids=stops))
    dialect.check(Sampling(stop_token_ids=stops[:90], min_tokens=1))
    with pytest.raises(InvalidRequestError, match="min_tokens with more than"):
        dialect.check(Sampling(stop_token_ids=stops, min_tokens=1))


async def test_slot_without_an_answer_has_no_cached_prefix() -> None:
    """It may still hold the tokens of the previous tenant."""
    slots, tokens = Slots(1), [1, 2, 3]
    assert await slots.take(run_of(tokens, "a")) == (0, False)
    slots.free(0, ("a", ""), tokens)
    assert await slots.take(run_of(tokens, "a")) == (0, True)
    slots.free(0, ("a", ""), tokens)
    slots.free(0, ("a", ""), tokens)
    adapted = replace(run_of(tokens, "a"), adapter="x")
    assert await slots.take(adapted) == (0, False)
    slots.free(0, ("a", ""), tokens)
    assert await slots.take(run_of(tokens, "b")) == (0, False)
    slots.free(0, None, tokens)
    assert await slots.take(run_of(tokens, "b")) == (0, False)


async def test_sequences_wait_for_a_slot() -> None:
    slots = Slots(2)
    first, _ = await slots.take(run_of([1, 2, 3]))
    second, _ = await slots.take(run_of([7, 8, 9]))
    waiting = asyncio.ensure_future(slots.take(run_of([7, 8, 5])))
    gone = asyncio.ensure_future(slots.take(run_of([4])))
    await asyncio.sleep(0)
    gone.cancel()
    slots.free(first, ("", ""), [1, 2, 3])
    assert (await waiting)[0] == first
    slots.free(second, ("", ""), [7, 8, 9])
    slots.free(first, ("", ""), [7, 8, 5])
    assert (await slots.take(run_of([7, 8, 9, 1])))[0] == second
