"""Answers that another gateway has begun: the client gets every event once."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import httpx
import pytest

from multiworld.serve.gateway.http.answer_record import AnswerRecord
from multiworld.serve.gateway.http.http_request import RECORDER
from multiworld.serve.gateway.http.recorder import Unrecorded
from multiworld.serve.gateway.openai.choices import REPLAYED, Choice, generate
from multiworld.serve.keeper.connection_record import ConnectionRecord
from multiworld.serve.keeper.frames import Entry, Kind
from multiworld.serve.spec.identity import Identity
from multiworld.serve.text.growing_text import GrowingText
from multiworld.serve.text.tokenizer import Tokenizer
from multiworld.serve.wire.generation_messages import Sampling, TokenItem
from tests.unit.serve.gateway.openai.test_generated_text import (
    CHAT,
    PROMPT,
    Played,
    tokenizer,
)

__all__ = ["tokenizer"]  # a fixture

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": {}}}},
    }
]


class Recording(Unrecorded):
    """A recorder that keeps every state of its record."""

    def __init__(self, record: ConnectionRecord | None = None) -> None:
        self.record = record or ConnectionRecord(1)
        self.states: list[ConnectionRecord] = []
        self.is_resumed = record is not None
        if record is None:
            self.say(Kind.INPUT, 0, b"request")

    def say(self, kind: Kind, value: int = 0, payload: bytes = b"") -> None:
        self.record.apply(Entry(kind, 1, value, payload))
        self.states.append(copy.deepcopy(self.record))

    def begin_answer(self) -> AnswerRecord:
        return AnswerRecord(
            self.record,
            self.say,
            is_resumed=self.is_resumed,
            is_abandoned=lambda: self.is_abandoned,
        )


async def events_of(
    played: Played, path: str, body: dict[str, Any], recorder: Recording
) -> tuple[httpx.Headers, list[str]]:
    app = played.fake.app

    async def recorded(scope: Any, receive: Any, send: Any) -> None:
        scope[RECORDER] = recorder
        await app(scope, receive, send)

    transport = httpx.ASGITransport(app=recorded)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.post(path, json={"model": "g", "stream": True, **body})
    assert answer.status_code == 200
    return answer.headers, answer.text.split("\n\n")[:-1]


BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, {"messages": PROMPT}, "so far, so good"),
    "tools": (CHAT, {"messages": PROMPT, "tools": TOOLS}, f"calling {CALL} done"),
    "two": ("/v1/completions", {"prompt": "hi", "n": 2, "logprobs": 1}, "abc"),
    "stop": ("/v1/completions", {"prompt": "hi", "stop": ["def"]}, "abc de"),
    "usage": (
        CHAT,
        {"messages": PROMPT, "stream_options": {"include_usage": True}},
        "some text",
    ),
}


@pytest.mark.parametrize("kind", BODIES)
async def test_resumed_answer_has_the_events_that_are_missing(
    tokenizer: Tokenizer, kind: str
) -> None:
    """They are the same wherever the first gateway was lost, ids included."""
    path, body, text = BODIES[kind]
    played = Played(tokenizer)
    played.streams.text = tokenizer.encode(text, has_special=False)
    played.streams.noise = "ours"
    first = Recording()
    head, whole = await events_of(played, path, body, first)
    assert len(whole) > 4
    for state in first.states:
        if not state.request:
            continue
        # Several choices may continue in another order than before.
        several = "n" in body
        for sent in range(1 + (len(state.items) if several else len(whole))):
            record = copy.deepcopy(state)
            record.events, record.has_begun = sent, sent > 0
            again, rest = await events_of(played, path, body, Recording(record))
            missing = whole[sent:]
            assert (sorted(rest) if several else rest) == (
                sorted(missing) if several else missing
            )
            assert again["x-request-id"] == head["x-request-id"]


async def test_resumed_request_is_charged_once_and_never_refused(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    played.streams.text = tokenizer.encode("abcdef", has_special=False)
    played.streams.noise = "ours"
    body, path = {"prompt": "hello"}, "/v1/completions"
    first = Recording()
    await events_of(played, path, body, first)
    state = next(s for s in first.states if len(s.items) == 4)
    state.events, state.has_begun = 4, True
    played.streams.has_room = False
    _, rest = await events_of(played, path, body, Recording(state))
    assert len(rest) == 3
    delivered = played.streams.delivered
    assert [(len(each.tokens), each.noise) for each in delivered] == [
        (0, None),
        (4, "ours"),
    ]
    ((_, rows),) = played.fake.gateway.authenticator.meter.take_due(1e12)
    (row,) = [row for row in rows if row.model == "g"]
    assert (row.prompt_tokens, row.generated_tokens) == (5, 6 + 2)


@pytest.mark.parametrize("is_abandoned", [True, False])
async def test_request_that_another_gateway_continues_is_counted_there(
    tokenizer: Tokenizer, is_abandoned: bool
) -> None:
    played = Played(tokenizer)
    played.streams.text = tokenizer.encode("abcdef", has_special=False)
    recorder = Recording()
    recorder.is_abandoned = is_abandoned
    await events_of(played, "/v1/completions", {"prompt": "hello"}, recorder)
    gateway = played.fake.gateway
    ((_, rows),) = gateway.authenticator.meter.take_due(1e12)
    (row,) = [row for row in rows if row.model == "g"]
    wanted = 0 if is_abandoned else 1
    assert (row.requests, row.answered) == (wanted, wanted)
    assert row.prompt_tokens == 5
    counted = [
        count for kind, _, count in gateway.counts.counted() if kind == "requests"
    ]
    assert sum(counted) == wanted


@pytest.mark.parametrize("is_same", [True, False])
async def test_resumed_answer_whose_version_is_gone(
    tokenizer: Tokenizer, is_same: bool
) -> None:
    """It continues with a version of the same identity, or else ends with an error."""
    played = Played(tokenizer)
    played.streams.text = tokenizer.encode("abcdef", has_special=False)
    gateway = played.fake.gateway
    (model,), old = gateway.models["g"].values(), gateway.specs["g", "1"]
    gateway.specs["g", "1"] = old.model_copy(update={"identity": Identity(name="i")})
    body, path = {"prompt": "hello"}, "/v1/completions"
    first = Recording()
    _, whole = await events_of(played, path, body, first)
    state = next(s for s in first.states if len(s.items) == 4)
    state.events, state.has_begun = 4, True
    other = {"version": "2", "identity": Identity(name="i" if is_same else "j")}
    played.fake.serve("2", g=model)
    gateway.specs["g", "2"] = old.model_copy(update=other)
    del gateway.models["g"]["1"], gateway.specs["g", "1"]
    _, rest = await events_of(played, path, body, Recording(state))
    if is_same:
        assert rest == whole[4:]
        assert played.streams.versions == ["1", "2"]
        return
    error, last = rest
    assert "version '1' of model 'g' is gone" in error
    assert last == "data: [DONE]"


async def test_replay_of_many_tokens_leaves_the_event_loop_to_others(
    tokenizer: Tokenizer,
) -> None:
    count, turns = 4 * REPLAYED, 0
    begun = Recording()
    answer = begun.begin_answer()
    for index in range(count - 1):
        answer.add(0, TokenItem(("g", 1, 0), index, 1))
    answer.add(0, TokenItem(("g", 1, 0), count - 1, 1, finish="length"))
    resumed = Recording(begun.record).begin_answer()
    choice = Choice(0, [1], GrowingText(tokenizer))

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    unused: Any = None
    pieces = generate(unused, [choice], [Sampling()], unused, unused, resumed)
    assert len([piece async for piece in pieces]) == count
    assert turns >= 3
    task.cancel()
