"""Text generation routes, over streams that a test sets."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from multiworld.errors import (
    DeadlineExceededError,
    OverloadedError,
    RequestPoisonedError,
    ServeError,
)
from multiworld.serve.gateway.http import request_body
from multiworld.serve.gateway.http.answer_record import unrecorded
from multiworld.serve.gateway.http.http_responses import event_of
from multiworld.serve.gateway.openai import (
    choices,
    completion_answers,
    completion_requests,
    generated_text,
)
from multiworld.serve.gateway.openai.choices import Choice, generate
from multiworld.serve.gateway.streams.actions import Cut
from multiworld.serve.gateway.streams.streams import (
    Delivered,
    OnItem,
    OpenStream,
    Places,
    Streams,
)
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.spec.schema import GenerationSpec, ModelSpec, StageSpec
from multiworld.serve.spec.stage import Generation, Model, Stage
from multiworld.serve.tenants.directory import Tenant
from multiworld.serve.text.grammar import (
    ANY_OBJECT,
    after_reasoning,
    grammar_of_schema,
)
from multiworld.serve.text.growing_text import GrowingText
from multiworld.serve.text.tokenizer import Tokenizer
from multiworld.serve.wire.generation_messages import Sampling, TokenItem
from multiworld.serve.wire.origin import NOWHERE
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)
from tests.tiny_decoder import save_tokenizer
from tests.unit.serve.gateway.fakes import Fake

CHAT = "/v1/chat/completions"
PROMPT = [{"role": "user", "content": "hi"}]


class PlayedStream(OpenStream):
    """A stream whose items come from an iterator."""

    def __init__(
        self,
        items: AsyncIterator[TokenItem | Cut],
        noise: str | None,
        on_item: OnItem,
    ) -> None:
        self._noise, self._task = noise, asyncio.ensure_future(_play(items, on_item))

    @property
    def noise(self) -> str | None:
        return self._noise

    def close(self, error: BaseException | None = None) -> None:
        self._task.cancel()


async def _play(items: AsyncIterator[TokenItem | Cut], on_item: OnItem) -> None:
    try:
        async for item in items:
            on_item(item)
    except ServeError as error:
        on_item(error)


class PlayedStreams(Streams):
    """Streams that generate the tokens in ``text`` and record each request."""

    def __init__(self) -> None:
        super().__init__("gateway/1")
        self.text: list[int] = []
        self.error: ServeError | None = None
        self.late: ServeError | None = None  # the deadline passes after the text
        self.finish: Any = "length"
        self.wait_s = self.first_s = 0.0
        self.has_room = True
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.sessions: list[str] = []
        self.requests: list[str] = []
        self.versions: list[str] = []
        self.delivered: list[Delivered] = []
        self.noise: str | None = None
        self.quarantined: list[tuple[str, str]] = []

    def check_room(self, model: str, share: Share, count: int = 1) -> None:
        if not self.has_room:
            raise OverloadedError("the queue is full")

    def quarantine(self, tenant: str, model: str) -> None:
        self.quarantined.append((tenant, model))

    def open(
        self,
        model: str,
        tokens: Sequence[int],
        sampling: Sampling,
        delivered: Delivered,
        on_item: OnItem,
        **more: Any,
    ) -> PlayedStream:
        self.prompts.append(list(tokens))
        self.samplings.append(sampling)
        self.sessions.append(more["session"])
        self.requests.append(more.get("origin", NOWHERE).request)
        self.versions.append(more["version"])
        self.delivered.append(delivered)
        found = self._items(sampling, len(delivered.tokens))
        return PlayedStream(found, self.noise, on_item)

    async def _items(
        self, sampling: Sampling, before: int
    ) -> AsyncIterator[TokenItem | Cut]:
        await asyncio.sleep(0.0 if sampling.choice else self.first_s)
        for index, token in list(enumerate(self.text))[before:]:
            await asyncio.sleep(self.wait_s)
            is_open = self.error is not None or self.late is not None
            is_last = index + 1 == len(self.text) and not is_open
            logprob = None if sampling.logprobs is None else -0.5 * index
            top = ((token, -0.5 * index), (5, float("-inf")))[: sampling.logprobs or 0]
            finish: Any = self.finish if is_last else ""
            key = ("gateway/1", 1, 0)
            scores: Any = ()
            if index == 0 and sampling.prompt_logprobs is not None:
                scores = tuple((-1.0 * n, ()) for n in range(1, len(self.prompts[-1])))
            yield TokenItem(key, index, token, finish, logprob, top, scores)
        if self.error is not None:
            raise self.error
        if self.late is not None:
            yield Cut(self.late)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer with one token per byte."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer(folder)


class Played:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *tenants: str,
        defaults: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.fake = Fake(*(Tenant(name=name) for name in tenants))
        self.streams = self.fake.gateway.streams = PlayedStreams()
        facts = Generation(
            tokenizer=lambda: tokenizer,
            end_tokens=(0,),
            vocabulary=300,
            max_tokens=200,
            kv_bytes=[1],
            defaults=defaults,
        )
        stage = Stage(load=lambda context: lambda tensors: tensors)
        self.fake.serve(g=Model(stages=[stage], generation=facts))
        spec = ModelSpec(
            factory="a:b",
            stages=[StageSpec(name="all")],
            generation=GenerationSpec(tool_call_parser="hermes"),
        )
        self.fake.gateway.specs["g", "1"] = spec

    async def post(
        self, path: str, body: dict[str, Any], tenant: str = ""
    ) -> tuple[int, Any]:
        """Return the status of an answer, and its JSON or its events."""
        async with self.fake.client(tenant) as client:
            named = {} if path.startswith("/v2") else {"model": "g"}
            answer = await client.post(path, json={**named, **body})
        if answer.headers["content-type"].startswith("text/event-stream"):
            return answer.status_code, answer.text.split("\n\n")[:-1]
        return answer.status_code, answer.json()

    async def choices(self, path: str, body: dict[str, Any]) -> list[Any]:
        chunks = await self.chunks(path, body)
        return [choice for chunk in chunks for choice in chunk["choices"]]

    async def chunks(self, path: str, body: dict[str, Any]) -> list[Any]:
        status, events = await self.post(path, {**body, "stream": True})
        assert status == 200, events
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_answer_whose_deadline_passes_has_what_was_generated(
    tokenizer: Tokenizer, path: str
) -> None:
    played = Played(tokenizer)
    played.streams.text = tokenizer.encode("so far", has_special=False)
    played.streams.late = DeadlineExceededError("deadline passed after 6 tokens")
    prompt = {"messages": PROMPT} if path == CHAT else {"prompt": "hi"}
    status, answer = await played.post(path, {**prompt, "n": 2})
    assert status == 200
    for choice in answer["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert (text, choice["finish_reason"]) == ("so far", "length")
    assert answer["usage"]["completion_tokens"] == 12
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = await played.chunks(path, {**prompt, **options})
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
    texts = [c["delta"].get("content") if path == CHAT else c["text"] for c in choices]
    assert "".join(filter(None, texts)) == "so far"
    assert last["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("has_tools", [False, True])
async def test_answer_whose_deadline_passes_has_the_start_of_a_stop_string(
    tokenizer: Tokenizer, has_tools: bool
) -> None:
    played = Played(tokenizer)
    played.streams.text = tokenizer.encode("so far. The", has_special=False)
    played.streams.late = DeadlineExceededError("deadline passed")
    asked = {"messages": PROMPT, "stop": [". The end"]}
    asked |= {"tools": TOOLS} if has_tools else {}
    (choice,) = (await played.post(CHAT, asked))[1]["choices"]
    assert choice["message"]["content"] == "so far. The"
    found = await played.choices(CHAT, asked)
    assert "".join(c["delta"].get("content") or "" for c in found) == "so far. The"


async def test_long_call_is_reported_token_by_token_in_several_events(
    tokenizer: Tokenizer,
) -> None:
    """Rendering all of its log probabilities at once would block the event loop."""
    played = Played(tokenizer)
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "so far " * 200
    wanted = [*tokenizer.encode(text, has_special=False), 0]
    played.streams.text, played.streams.finish = wanted, "length"
    asked = {"messages": PROMPT, "tools": TOOLS, "logprobs": True}
    found = await played.choices(CHAT, asked)
    scored = [len(c["logprobs"]["content"]) for c in found if c["logprobs"]]
    assert sum(scored) == len(wanted)
    assert max(scored) <= completion_answers.MAX_HELD
    plain = {name: value for name, value in asked.items() if name != "logprobs"}
    *found, last = await played.choices(CHAT, plain)
    assert last["finish_reason"] == "length"
    assert all(choice["delta"] for choice in found)


async def test_answer_without_a_token_at_its_deadline_is_an_error(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    played.streams.late = DeadlineExceededError("deadline passed after 0 tokens")
    status, answer = await played.post(CHAT, {"messages": PROMPT})
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_unknown_fields_are_ignored_and_named(
    tokenizer: Tokenizer, is_streamed: bool
) -> None:
    played = Played(tokenizer)
    played.streams.text = [7]
    tool = {"type": "function", "function": {"name": "f"}, "cache_control": {"a": 1}}
    body: dict[str, Any] = {"messages": PROMPT, "tools": [tool], "model": "g"}
    body |= {"trace": {"id": 5}, "用户": 1}
    async with played.fake.client("") as client:
        sent = {**body, "stream": is_streamed}
        answer = await client.post(CHAT, json=sent)
        assert answer.status_code == 200, answer.text
        ignored = answer.headers["x-ignored-fields"].split(", ")
        assert sorted(ignored) == [r"\u7528\u6237", "tools[0].cache_control", "trace"]
        played.fake.gateway.is_strict = True
        assert (await client.post(CHAT, json=sent)).status_code == 400


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_token": 5}, "did you mean 'max_tokens'"),
        ({"temprature": 0}, "did you mean 'temperature'"),
        ({"guided_json": {}}, "would change the answer"),
        ({"num_predict": 5}, "would change the answer"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "schema"),
        ({"x\r\ny": 1}, "unknown field"),
        ({f"field{n}": n for n in range(20)}, "unknown field"),
    ],
)
async def test_fields_that_would_change_the_answer_are_refused(
    tokenizer: Tokenizer, more: dict[str, Any], words: str
) -> None:
    played = Played(tokenizer)
    played.streams.text = [7]
    status, answer = await played.post(CHAT, {"messages": PROMPT, **more})
    assert status == 400
    assert words in answer["error"]["message"]


async def test_tenant_with_replicas_of_its_own_has_their_tokenizer_and_limits(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Its replicas may run another version than the shared ones."""
    save_tokenizer(tmp_path, "<own>")
    played = Played(tokenizer, "acme", "beta")
    gateway, dispatcher = played.fake.gateway, played.fake.dispatcher
    shared = gateway.models["g"]["1"]
    assert shared.generation is not None
    own = dataclasses.replace(
        shared.generation, tokenizer=lambda: Tokenizer(tmp_path), max_tokens=50
    )
    gateway.models["g@acme"] = {"2": dataclasses.replace(shared, generation=own)}
    gateway.specs["g@acme", "2"] = gateway.specs["g", "1"]
    routes = {**dispatcher.table.routes, "g@acme": Route("2", {"2": 1})}
    own_replica = Replica("r", "g@acme", "2", 0, ReplicaState.READY)
    replicas = {"r": own_replica}
    dispatcher.table = RoutingTable(1, ("gateway/1",), routes, replicas)
    for tenant, longest, count in (("acme", 50, 1), ("beta", 200, 5)):
        status, answer = await played.post("/tokenize", {"prompt": "<own>"}, tenant)
        assert (status, answer["max_model_len"]) == (200, longest)
        assert answer["count"] == count


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_prompt_that_is_refused_is_not_charged(
    tokenizer: Tokenizer, is_streamed: bool
) -> None:
    played = Played(tokenizer)
    body = {"prompt": "hi", "stream": is_streamed}
    played.streams.has_room = False
    assert (await played.post("/v1/completions", body))[0] == 429
    played.streams.has_room = True
    assert (await played.post("/v1/completions", {**body, "timeout_s": -1}))[0] == 400
    assert not played.streams.prompts
    rows = played.fake.gateway.authenticator.meter.take_due(1e9)
    assert sum(row.prompt_tokens for _, told in rows for row in told) == 0


@pytest.mark.parametrize(
    ("path", "asked", "parses"),
    [
        (CHAT, {"messages": PROMPT}, (completion_requests, "decoded_with_ignored")),
        (
            "/v1/completions",
            {"prompt": "hi"},
            (completion_requests, "decoded_with_ignored"),
        ),
        ("/tokenize", {"prompt": "hi"}, (generated_text, "decoded_with_ignored")),
    ],
)
async def test_large_body_is_parsed_in_a_thread(
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    asked: dict[str, Any],
    parses: tuple[Any, str],
) -> None:
    """Streams of this gateway continue meanwhile."""
    threads: list[int] = []
    parse = getattr(*parses)

    def watched(*given: Any, **options: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(*given, **options)

    monkeypatch.setattr(*parses, watched)
    played = Played(tokenizer)
    played.streams.text = [7]
    assert (await played.post(path, asked))[0] == 200
    monkeypatch.setattr(request_body, "OFFLOAD_BYTES", 10)
    assert (await played.post(path, asked))[0] == 200
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False]


# Poison.


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_poison_completion_is_reported_once_and_not_retried(
    tokenizer: Tokenizer, is_streamed: bool
) -> None:
    played = Played(tokenizer, "acme", "beta")
    told: list[Any] = []
    played.fake.gateway.on_poison = lambda *found: told.append(found)
    played.streams.error = RequestPoisonedError("it kills")
    asked = {"messages": PROMPT, "stream": is_streamed, "temperature": 0.5}
    status, first = await played.post(CHAT, asked, "acme")
    assert status == (200 if is_streamed else 500)
    assert "it kills" in str(first)
    played.streams.error, played.streams.text = None, [7, 8]
    status, again = await played.post(CHAT, {**asked, "seed": 7}, "acme")
    assert status == 500
    assert "do not retry it" in again["error"]["message"]
    assert len(played.streams.prompts) == 1
    assert [found[:2] for found in told] == [("acme", ("g", "1"))]
    for tenant, more in (("beta", {}), ("acme", {"temperature": 0.6})):
        status, _ = await played.post(CHAT, {**asked, **more}, tenant)
        assert status == 200


async def test_several_poison_completions_quarantine_their_tenant(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer, "acme")
    played.streams.error = RequestPoisonedError("it kills")
    for number in range(3):
        asked = {"prompt": [5 + number], "max_tokens": 3}
        status, _ = await played.post("/v1/completions", asked, "acme")
        assert status == 500
    status, answer = await played.post(CHAT, {"messages": PROMPT}, "acme")
    assert status == 429
    assert "quarantined" in answer["error"]["message"]
    status, _ = await played.post("/v2/models/g/generate", {}, "acme")
    assert status == 400, "it is read first"
    async with played.fake.client("acme") as client:
        text = {"text_input": "hi"}
        answer = await client.post("/v2/models/g/generate", json=text)
    assert answer.status_code == 429
    assert ("acme", "g") in played.streams.quarantined


async def test_unknown_model_is_reported_before_invalid_fields(
    tokenizer: Tokenizer,
) -> None:
    """A ``model`` in the body is an unknown field where the path names the model."""
    played = Played(tokenizer, "acme")
    asked = {"model": "nope", "messages": [], "temperature": -1}
    status, answer = await played.post(CHAT, asked, "acme")
    assert status == 404
    assert "unknown model 'nope'" in answer["error"]["message"]
    body = {"text_input": "x", "model": "foo"}
    status, answer = await played.post("/v2/models/g/generate", body, "acme")
    assert status == 400
    assert "model" in answer["error"]
    status, _ = await played.post("/v2/models/nope/generate", body, "acme")
    assert status == 404


# Streamed answers.


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("text", ["well", CALL, "so: " + CALL + " and", "<tool_ca"])
async def test_streamed_calls_report_every_token_once(
    tokenizer: Tokenizer, text: str
) -> None:
    """The text of a call is held back, its tokens are not."""
    played = Played(tokenizer)
    wanted = [*tokenizer.encode(text, has_special=False), 0]
    played.streams.text, played.streams.finish = wanted, "stop"
    found = await played.choices(
        CHAT,
        {
            "messages": PROMPT,
            "tools": TOOLS,
            "logprobs": True,
            "top_logprobs": 2,
            "return_token_ids": True,
        },
    )
    assert [t for choice in found for t in choice["token_ids"]] == wanted
    scored = [e for c in found if c["logprobs"] for e in c["logprobs"]["content"]]
    assert [each["logprob"] for each in scored] == [
        -0.5 * n for n in range(len(wanted))
    ]
    for each in scored:
        assert [top["logprob"] for top in each["top_logprobs"]] == [
            each["logprob"],
            -9999.0,
        ]
    assert [c["prompt_token_ids"] for c in found if "prompt_token_ids" in c] == [
        played.streams.prompts[0]
    ]
    has_call = CALL in text
    assert found[-1]["finish_reason"] == ("tool_calls" if has_call else "stop")
    calls = [c for choice in found for c in choice["delta"].get("tool_calls", ())]
    assert len(calls) == has_call


async def test_calls_are_found_where_their_marks_are_control_tokens(
    tmp_path: Path,
) -> None:
    """Otherwise control tokens are not part of the text."""
    save_tokenizer(tmp_path, "<tool_call>", "</tool_call>")
    played = Played(Tokenizer(tmp_path))
    marked = Tokenizer(tmp_path).fast.encode(CALL, add_special_tokens=False).ids
    played.streams.text, played.streams.finish = [*marked, 0], "stop"
    asked = {"messages": PROMPT, "tools": TOOLS}
    (choice,) = (await played.post(CHAT, asked))[1]["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert choice["finish_reason"] == "tool_calls"
    found = await played.choices(CHAT, asked)
    assert "".join(c["delta"].get("content") or "" for c in found) == ""
    assert len([c for c in found if "tool_calls" in c["delta"]]) >= 1


TEMPLATE = (
    "{% if tools %}{% endif %}{% for m in messages %}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% if add_generation_prompt %}<think>{% if thinking is false %}</think>{% endif %}"
    "{% endif %}"
)


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
async def test_reasoning_is_answered_apart(
    tmp_path: Path, special: tuple[str, ...]
) -> None:
    save_tokenizer(tmp_path, *special, template=TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    played = Played(tokenizer)
    output = f"\nHm. {CALL}\n</think>\n\nYes:{CALL}"
    played.streams.text = [*tokenizer.encode(output, has_special=False), 0]
    played.streams.finish = "stop"
    thought = f"Hm. {CALL}"
    count = len(tokenizer.encode(output.partition("\n\n")[0], has_special=False))
    asked = {"messages": PROMPT, "tools": TOOLS, "return_token_ids": True}
    answer = (await played.post(CHAT, asked))[1]
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning"]) == ("Yes:", thought)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert choice["finish_reason"] == "tool_calls"
    details = {"reasoning_tokens": count}
    assert answer["usage"]["completion_tokens_details"] == details
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await played.chunks(CHAT, {**asked, "stream_options": options})
    assert chunks[-1]["usage"] == answer["usage"]
    deltas = [c["choices"][0] for c in chunks if c["choices"]]
    assert [t for d in deltas for t in d["token_ids"]] == played.streams.text
    for name, text in (("reasoning", thought), ("content", "Yes:")):
        shown = [d["delta"][name] for d in deltas if name in d["delta"]]
        assert "".join(shown) == text
    hidden = {**asked, "include_reasoning": False, "logprobs": True}
    (choice,) = (await played.post(CHAT, hidden))[1]["choices"]
    assert "reasoning" not in choice["message"]
    shown = played.streams.text[count:]
    assert choice["token_ids"] == shown
    assert len(choice["logprobs"]["content"]) == len(shown)
    found = await played.choices(CHAT, hidden)
    assert not [c for c in found if "reasoning" in c["delta"]]
    assert [t for c in found for t in c["token_ids"]] == shown
    # If the prompt has ended the reasoning, all output is the answer.
    played.streams.text = [*tokenizer.encode("Yes </think>", has_special=False), 0]
    plain = {"messages": PROMPT, "chat_template_kwargs": {"thinking": False}}
    (choice,) = (await played.post(CHAT, plain))[1]["choices"]
    assert "reasoning" not in choice["message"]
    assert choice["message"]["content"].startswith("Yes")


@pytest.mark.parametrize("special", [(), ("<think>", "</think>", "<other>")])
async def test_structure_of_an_answer_begins_after_its_reasoning(
    tmp_path: Path, special: tuple[str, ...]
) -> None:
    """There is no reasoning if the prompt has already ended it."""
    save_tokenizer(tmp_path, *special, template=TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    played = Played(tokenizer)
    played.streams.text = [5]
    begin, end = (tokenizer.added.get(m, m) for m in ("<think>", "</think>"))
    inner = grammar_of_schema(ANY_OBJECT, "response_format")
    begun, open_ = (
        after_reasoning(inner, (begin, end), [0], is_begun=is_begun)
        for is_begun in (True, False)
    )
    asked = {"messages": PROMPT, "response_format": {"type": "json_object"}}
    options = {"chat_template_kwargs": {"thinking": False}}
    unprompted = {"add_generation_prompt": False}
    for more, grammar in (({}, begun), (unprompted, open_), (options, inner)):
        assert (await played.post(CHAT, {**asked, **more}))[0] == 200
        assert played.streams.samplings[-1].grammar == grammar
    # Refused at once, not when the reasoning is over.
    nothing = {"structured_outputs": {"regex": "[a&&b]"}}
    assert (await played.post(CHAT, {"messages": PROMPT, **nothing}))[0] == 400


async def test_marks_of_the_spec_come_before_those_of_the_template(
    tmp_path: Path,
) -> None:
    """An empty list leaves the reasoning in the answer."""
    save_tokenizer(tmp_path, "<a>", "<b>", "<other>", template=TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    played = Played(tokenizer)
    text = "<a>Hm</think><b><other>Yes<b>"
    played.streams.text = tokenizer.encode(text, has_special=False)
    gateway = played.fake.gateway
    for marks, thought, content in (
        (["<a>", "<b>"], "Hm</think>", "Yes<b>"),
        ([], None, "Hm</think>Yes"),
    ):
        generation = GenerationSpec(reasoning_marks=marks)
        spec = gateway.specs["g", "1"].model_copy(update={"generation": generation})
        gateway.specs["g", "1"] = spec
        (choice,) = (await played.post(CHAT, {"messages": PROMPT}))[1]["choices"]
        message = choice["message"]
        assert (message.get("reasoning"), message["content"]) == (thought, content)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_reasoning_of_former_answers_reaches_the_template(
    tmp_path: Path, name: str
) -> None:
    save_tokenizer(tmp_path, template=TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    played = Played(tokenizer)
    played.streams.text = [5]
    answer = {"role": "assistant", "content": "Yes", name: "Hm"}
    asked = {"messages": [*PROMPT, answer, *PROMPT]}
    assert (await played.post(CHAT, asked))[0] == 200
    assert tokenizer.decode(played.streams.prompts[-1]) == "hi(Hm)Yeshi<think>"
    answer["reasoning"], answer["reasoning_content"] = "", "Hm"
    assert (await played.post(CHAT, asked))[0] == 200
    assert "(Hm)" in tokenizer.decode(played.streams.prompts[-1])
    del answer["reasoning"]
    answer["reasoning_content"] = 5  # type: ignore[assignment]
    assert (await played.post(CHAT, asked))[0] == 400
    user = {**PROMPT[0], "reasoning": ""}
    assert (await played.post(CHAT, {"messages": [user]}))[0] == 200


async def test_completion_returns_the_token_ids_of_its_prompt_once(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode("yes", has_special=False))
    asked = {"prompt": [9, 8, 7], "return_token_ids": True}
    found = await played.choices("/v1/completions", asked)
    assert [choice.get("prompt_token_ids") for choice in found] == [
        [9, 8, 7],
        *[None] * 3,
    ]
    assert [t for choice in found for t in choice["token_ids"]] == list(
        tokenizer.encode("yes", has_special=False)
    )
    assert "".join(choice["text"] for choice in found) == "yes"


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": []}</tool_call>',
        '<tool_call>{"name": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    ],
)
async def test_output_that_is_almost_a_call_is_returned(
    tokenizer: Tokenizer, text: str
) -> None:
    """A model may write anything."""
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode(text, has_special=False))
    asked = {"messages": PROMPT, "tools": TOOLS}
    status, answer = await played.post(CHAT, asked)
    assert status == 200, answer
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    found = await played.choices(CHAT, asked)
    assert "".join(c["delta"].get("content", "") for c in found) == text


@pytest.mark.parametrize("is_parallel", [True, False])
async def test_parallel_tool_calls_false_allows_one_call(
    tokenizer: Tokenizer, is_parallel: bool
) -> None:
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode(CALL + CALL, has_special=False))
    asked = {"messages": PROMPT, "tools": TOOLS, "parallel_tool_calls": is_parallel}
    _, answer = await played.post(CHAT, asked)
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1 + is_parallel
    found = await played.choices(CHAT, asked)
    calls = [c for choice in found for c in choice["delta"].get("tool_calls", ())]
    assert len(calls) == 1 + is_parallel
    await played.post(CHAT, {**asked, "tool_choice": "required"})
    grammar = played.streams.samplings[-1].grammar
    assert ("call)*" in grammar) is is_parallel


REQUIRED = '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parame'


async def test_calls_before_a_cut_are_returned_without_the_rest(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode(REQUIRED, has_special=False))
    asked = {"messages": PROMPT, "tools": TOOLS, "tool_choice": "required"}
    _, answer = await played.post(CHAT, asked)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    found = await played.choices(CHAT, asked)
    assert not any(c["delta"].get("content") for c in found)
    calls = [c for choice in found for c in choice["delta"].get("tool_calls", ())]
    assert [c["function"]["arguments"] for c in calls] == ['{"a": 1}']
    assert found[-1]["finish_reason"] == "length"
    played.streams.text = list(tokenizer.encode("[{", has_special=False))
    _, answer = await played.post(CHAT, asked)
    assert answer["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v2/models/g/generate"])
async def test_defaults_of_the_model_are_those_of_requests(
    tokenizer: Tokenizer, path: str
) -> None:
    own = {"temperature": 0.25, "top_k": 20, "min_p": 0.125}
    played = Played(tokenizer, defaults=own)
    played.streams.text = [7]
    body: dict[str, Any] = {"prompt": "hi"}
    if path == CHAT:
        body = {"messages": PROMPT}
    elif path.endswith("generate"):
        body = {"text_input": "hi", "parameters": {}}
    assert (await played.post(path, body))[0] == 200
    sampling = played.streams.samplings[-1]
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.25, 20, 0.125)
    named: dict[str, Any] = {"temperature": 0.5, "top_k": None, "min_p": 0.0}
    if path.endswith("generate"):
        body["parameters"] = {k: v for k, v in named.items() if v is not None}
    else:
        body |= named
    assert (await played.post(path, body))[0] == 200
    sampling = played.streams.samplings[-1]
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 20, 0.0)


async def test_strict_tools_are_enforced_where_that_is_possible(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """This needs marks of calls that are tokens of the model."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    asked = {"messages": PROMPT, "tools": [{"type": "function", "function": function}]}
    plain = Played(tokenizer)
    plain.streams.text = [7]
    assert (await plain.post(CHAT, asked))[0] == 200
    assert not plain.streams.samplings[-1].grammar
    save_tokenizer(tmp_path, "<tool_call>", "</tool_call>")
    played = Played(Tokenizer(tmp_path))
    played.streams.text = [7]
    assert (await played.post(CHAT, asked))[0] == 200
    assert "call: <[" in played.streams.samplings[-1].grammar


async def test_tools_can_be_called_beside_an_answer_in_json(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    played.streams.text = [7]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    asked = {"messages": PROMPT, "tools": TOOLS}
    assert (await played.post(CHAT, {**asked, "response_format": form}))[0] == 200
    assert "start: answer | call" in played.streams.samplings[-1].grammar
    more = {"structured_outputs": {"regex": "a+"}}
    status, answer = await played.post(CHAT, {**asked, **more})
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert (await played.post(CHAT, {**asked, **more, "tool_choice": "none"}))[0] == 200


async def test_chat_returns_the_token_ids_of_its_prompt_where_vllm_does(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    played.streams.text = [7]
    asked = {"messages": PROMPT, "return_token_ids": True}
    _, answer = await played.post(CHAT, asked)
    assert answer["prompt_token_ids"] == played.streams.prompts[0]


async def test_every_chunk_may_report_the_usage_so_far(tokenizer: Tokenizer) -> None:
    """vLLM has the same option."""
    played = Played(tokenizer)
    played.streams.text = [7, 8, 9]
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": [1, 2], "stream_options": options}
    chunks = await played.chunks("/v1/completions", asked)
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert made == sorted(made)
    assert (made[0] > 0, made[-1], len(made)) == (True, 3, 4)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}


async def test_tokens_beyond_the_model_are_not_decoded(tokenizer: Tokenizer) -> None:
    """Decoding that many would hold up all other requests."""
    played = Played(tokenizer)
    status, answer = await played.post("/detokenize", {"tokens": [7] * 201})
    assert (status, answer["error"]["param"]) == (400, "tokens")
    assert (await played.post("/detokenize", {"tokens": [7] * 200}))[0] == 200


async def test_request_id_is_accepted_returned_and_passed_to_the_streams(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played(tokenizer)
    played.streams.text = [7]
    gateway = played.fake.gateway
    gateway.logs_access = True
    caplog.set_level("INFO", "multiworld.access")
    async with played.fake.client("") as client:
        for given, body, status in (
            ("my-id", {"messages": PROMPT}, 200),
            ("my-id", {"messages": PROMPT, "stream": True}, 200),
            ("my-id", {"messages": 1}, 400),
            ("bad id", {"messages": PROMPT}, 200),
        ):
            answer = await client.post(
                CHAT, json={"model": "g", **body}, headers={"X-Request-Id": given}
            )
            assert answer.status_code == status
            found = answer.headers["x-request-id"]
            assert (found == given) is (given == "my-id")
            assert f"{found} - POST {CHAT} {status} " in caplog.text
    assert played.streams.requests[:2] == ["my-id", "my-id"]
    counted = [(labels, n) for _, labels, n in gateway.counts.counted()]
    assert (("g", "400"), 1) in counted, "of the model that it names"


async def test_call_that_was_cut_says_so(tokenizer: Tokenizer) -> None:
    """Otherwise clients would parse the incomplete arguments."""
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode('{"a', has_special=False))
    named = {"type": "function", "function": {"name": "f"}}
    asked = {"messages": PROMPT, "tools": TOOLS, "tool_choice": named}
    _, answer = await played.post(CHAT, asked)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a'
    found = await played.choices(CHAT, asked)
    assert found[-1]["finish_reason"] == "length"


async def test_stream_that_fails_of_a_bug_says_so_in_the_stream(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(tokenizer)
    played.streams.text = [7, 8]

    calls = itertools.count()

    def broken(chunk: Any) -> bytes:
        if next(calls):
            raise TypeError("of a bug")
        return event_of(chunk)

    monkeypatch.setattr(completion_answers, "event_of", broken)
    _, events = await played.post(CHAT, {"messages": PROMPT, "stream": True})
    assert "internal error" in events[-2]
    assert "of a bug" not in events[-2]
    assert events[-1] == "data: [DONE]"


async def test_probabilities_of_prompts_are_bounded_in_all(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    played.streams.text = [7]
    asked = {"prompt": [[5] * 180] * 3, "max_tokens": 1, "echo": True, "logprobs": 20}
    status, answer = await played.post("/v1/completions", {**asked, "n": 21})
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    status, _ = await played.post("/v1/completions", {**asked, "n": 2})
    assert status == 200


async def test_list_of_models_reports_the_maximum_length(tokenizer: Tokenizer) -> None:
    async with Played(tokenizer).fake.client() as client:
        listed = (await client.get("/v1/models")).json()["data"]
        one = (await client.get("/v1/models/g")).json()
    assert {m["id"]: m.get("max_model_len") for m in listed}["g"] == 200
    assert one in listed
    assert one["max_model_len"] == 200


@pytest.mark.parametrize("finish", ["length", "stop"])
async def test_answer_may_be_the_prompt_only(tokenizer: Tokenizer, finish: str) -> None:
    """Programs that score prompts request no tokens."""
    played = Played(tokenizer)
    played.streams.text, played.streams.finish = [9], finish
    given = list(tokenizer.encode("abc", has_special=False))
    asked = {"prompt": given, "max_tokens": 0, "echo": True, "return_token_ids": True}
    path = "/v1/completions"
    status, answer = await played.post(path, {**asked, "logprobs": 0})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["text"] == "abc"
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == []
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
    }
    ((_, (used,)),) = played.fake.gateway.authenticator.meter.take_due(0.0)
    assert (used.prompt_tokens, used.generated_tokens) == (3, 0)
    chunks = await played.choices(path, asked)
    assert "".join(chunk["text"] for chunk in chunks) == "abc"
    assert [c["finish_reason"] for c in chunks] == [None, "length"]
    assert [c["token_ids"] for c in chunks if "token_ids" in c] == [[], []]
    status, answer = await played.post(path, {**asked, "echo": False})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("path", [CHAT, "/v2/models/g/generate_stream"])
async def test_slow_stream_is_kept_alive_by_comments(
    tokenizer: Tokenizer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies close connections on which nothing arrives."""
    monkeypatch.setattr(choices, "KEEP_ALIVE_S", 0.02)
    played = Played(tokenizer)
    played.streams.text, played.streams.wait_s = (
        list(tokenizer.encode("ab", has_special=False)),
        0.2,
    )
    body: dict[str, Any] = {"model": "g", "messages": PROMPT, "stream": True}
    if path != CHAT:
        body = {"text_input": "hi"}
    async with played.fake.client() as client:
        answer = await client.post(path, json=body)
    events = answer.text.split("\n\n")
    comments = [number for number, event in enumerate(events) if event[:1] == ":"]
    assert len(comments) >= 2
    assert comments[0] == 0, "before the first token"
    assert all(event.startswith("data: ") for event in events[:-1] if event[:1] != ":")


async def test_stream_is_kept_alive_while_a_call_is_held_back(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its tokens can be shown before the call is complete."""
    monkeypatch.setattr(completion_answers, "KEEP_ALIVE_S", 0.02)
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode(CALL, has_special=False))
    played.streams.wait_s = 0.005
    body = {"messages": PROMPT, "tools": TOOLS, "stream": True}
    _, events = await played.post(CHAT, body)
    shown = [event[:1] == ":" for event in events]
    assert sum(shown) >= 3
    assert not shown[-1]


async def test_tokens_are_charged_that_the_client_does_not_read(
    tokenizer: Tokenizer,
) -> None:
    """They were computed all the same."""
    streams, count = PlayedStreams(), 0
    streams.text = [7] * 20

    def charge() -> None:
        nonlocal count
        count += 1

    choice = Choice(0, [5, 6], GrowingText(tokenizer))
    places = Places(streams.router.without_token["g"], DEFAULT_SHARE, 1)
    stream = functools.partial(streams.open, "g", session="", version="1")
    sampling, record = Sampling(max_tokens=20), unrecorded()
    pieces = generate(stream, [choice], [sampling], places, charge, record)
    await anext(pieces)
    async with asyncio.timeout(20.0):
        while count < 20:  # noqa: ASYNC110 - it is the loop's turns that count
            await asyncio.sleep(0)
    await pieces.aclose()


async def test_stream_that_the_client_does_not_read_ends(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its unread pieces would fill the gateway's memory."""
    monkeypatch.setattr(choices, "MAX_UNREAD", 40)
    streams = PlayedStreams()
    streams.text = [7] * 50
    choice = Choice(0, [5, 6], GrowingText(tokenizer))
    places = Places(streams.router.without_token["g"], DEFAULT_SHARE, 1)
    stream = functools.partial(streams.open, "g", session="", version="1")
    pieces = generate(
        stream, [choice], [Sampling(max_tokens=50)], places, lambda: None, unrecorded()
    )
    await anext(pieces)
    for _ in range(200):
        await asyncio.sleep(0)
    with pytest.raises(choices.SlowClientError, match="read faster"):
        await anext(pieces)
    await pieces.aclose()


@pytest.mark.parametrize(
    "field",
    [
        {"bad_words": ["text"]},
        {"truncate_prompt_tokens": 0},
        {"bad_words": "auto"},
        {"use_beam_search": "default"},
    ],
)
async def test_neutral_value_of_another_field_is_refused(
    tokenizer: Tokenizer, field: dict[str, Any]
) -> None:
    """A neutral value of one field is not neutral for another."""
    played = Played(tokenizer)
    status, answer = await played.post("/v1/completions", {"prompt": "hi", **field})
    assert (status, answer["error"]["param"]) == (400, next(iter(field)))


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_call_that_a_stop_string_cuts_says_so(
    tokenizer: Tokenizer, is_streamed: bool
) -> None:
    """Clients parse the arguments of complete calls, and these are not valid JSON."""
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode('{"a": "stop', has_special=False))
    body = {
        "messages": PROMPT,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "stop": "stop",
    }
    if is_streamed:
        *_, last = await played.choices(CHAT, body)
    else:
        _, answer = await played.post(CHAT, body)
        (last,) = answer["choices"]
    assert last["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}]
)
async def test_forced_call_has_its_own_structure(
    tokenizer: Tokenizer, choice: Any
) -> None:
    """Agents send the format of their last answer along; other structures conflict."""
    played = Played(tokenizer)
    played.streams.text = [5]
    asked = {"messages": PROMPT, "tools": TOOLS, "tool_choice": choice}
    assert (await played.post(CHAT, asked))[0] == 200
    form = {"response_format": {"type": "json_object"}}
    assert (await played.post(CHAT, {**asked, **form}))[0] == 200
    alone, both = (sampling.grammar for sampling in played.streams.samplings)
    assert alone == both
    for more in ({"structured_outputs": {"regex": "a"}}, {"ignore_eos": True}):
        status, answer = await played.post(CHAT, {**asked, **more})
        assert (status, answer["error"]["param"]) == (400, "tool_choice")


async def test_arguments_of_a_call_are_shown_as_the_model_wrote_them(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    call = '<tool_call>{"name": "f", "arguments": {"city": "Köln 한"}}</tool_call>'
    played.streams.text = list(tokenizer.encode(call, has_special=False))
    _, answer = await played.post(CHAT, {"messages": PROMPT, "tools": TOOLS})
    (found,) = answer["choices"][0]["message"]["tool_calls"]
    assert found["function"]["arguments"] == '{"city": "Köln 한"}'


async def test_text_offsets_count_what_a_stop_string_holds_back(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode("a cat", has_special=False))
    body = {"prompt": "hi", "logprobs": 0, "stop": ["cats"]}
    _, answer = await played.post("/v1/completions", body)
    (choice,) = answer["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    found = await played.choices("/v1/completions", body)
    logprobs = [c["logprobs"]["text_offset"] for c in found if c["logprobs"]]
    assert [at for places in logprobs for at in places] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "body",
    [
        '{"model": "g", "trace": 1, "prompt": "hi \\ud83d"}',
        '{"model": "g", "trace": 1, "prompt": "hi"',
        '{"model": "g", "prompt": "hi", "trace": 1e400}',
        '{"model": "g", "prompt": "hi", "trace": %s}' % ("[" * 2000 + "]" * 2000),
        '{"model": "g", "stream_options": {"x": 1}, "stream_options": null}',
        '{"model": "g", "prompt": "hi", "a`b": 1}',
        '{"model": "g", "prompt": "hi", "x` - at `$.nothing[0]": 1}',
    ],
)
async def test_unknown_field_before_what_is_wrong_is_no_error_of_the_gateway(
    tokenizer: Tokenizer, body: str
) -> None:
    async with Played(tokenizer).fake.client() as http:
        answer = await http.post("/v1/completions", content=body.encode())
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"guided_json": None, "return_tokens_as_token_ids": False}),
        ("/v1/completions", {"tools": None, "top_logprobs": None, "tool_choice": None}),
    ],
)
async def test_fields_that_request_nothing_are_ignored(
    tokenizer: Tokenizer, path: str, more: dict[str, Any]
) -> None:
    """Clients write all fields of their type, most of them null."""
    played = Played(tokenizer)
    played.streams.text = [7]
    asked = {"messages": PROMPT} if path == CHAT else {"prompt": "hi"}
    assert (await played.post(path, {**asked, **more}))[0] == 200


async def test_field_of_another_route_is_named(tokenizer: Tokenizer) -> None:
    asked = {"prompt": "hi", "max_completion_tokens": 5}
    status, answer = await Played(tokenizer).post("/v1/completions", asked)
    assert status == 400
    assert "not a field of this route" in answer["error"]["message"]
    asked = {"messages": PROMPT, "max_completion_tokens": 0}
    _, answer = await Played(tokenizer).post(CHAT, asked)
    assert answer["error"]["param"] == "max_completion_tokens"


async def test_echo_is_the_prompt_with_its_control_tokens(tokenizer: Tokenizer) -> None:
    """Clients remove the prompt by its length."""
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode("yo", has_special=False))
    mark = tokenizer.piece(min(tokenizer.special))
    asked = {"prompt": f"{mark}hi", "echo": True, "logprobs": 0}
    _, answer = await played.post("/v1/completions", asked)
    (choice,) = answer["choices"]
    assert choice["text"] == f"{mark}hiyo"
    at = len(mark)
    assert choice["logprobs"]["text_offset"][-4:] == [at, at + 1, at + 2, at + 3]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_unknown_fields_of_tokenize_are_ignored_unless_strict(
    tokenizer: Tokenizer, path: str
) -> None:
    played = Played(tokenizer)
    asked = {"model": "g", "prompt": "hi", "trace": 1}
    if path == "/detokenize":
        asked = {"model": "g", "tokens": [7], "trace": 1}
    async with played.fake.client() as http:
        answer = await http.post(path, json=asked)
        assert (answer.status_code, answer.headers["x-ignored-fields"]) == (
            200,
            "trace",
        )
        played.fake.gateway.is_strict = True
        assert (await http.post(path, json=asked)).status_code == 400


@pytest.mark.parametrize("skips_special", [True, False])
async def test_text_offsets_of_an_echo_include_the_prompt(
    tokenizer: Tokenizer, skips_special: bool
) -> None:
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode("yo", has_special=False))
    (end,) = sorted(tokenizer.special)[:1]
    prompt = [end, *tokenizer.encode("é😀i", has_special=False)]
    body = {"prompt": prompt, "echo": True, "logprobs": 0}
    _, answer = await played.post(
        "/v1/completions", {**body, "skip_special_tokens": skips_special}
    )
    (choice,) = answer["choices"]
    shown = tokenizer.piece(end)
    assert choice["text"] == f"{shown}é😀iyo"
    at = len(shown)
    places = [0, at, at, *[at + 1] * 4, at + 2, at + 3, at + 4]
    assert choice["logprobs"]["text_offset"] == places


async def test_request_is_prepared_again_if_an_update_is_completed_meanwhile(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new version may have another tokenizer and other limits."""
    save_tokenizer(tmp_path, "<own>")
    new, played = Tokenizer(tmp_path), Played(tokenizer)
    gateway, dispatcher = played.fake.gateway, played.fake.dispatcher
    model = gateway.models["g"]["1"]
    assert model.generation is not None
    own = dataclasses.replace(model.generation, tokenizer=lambda: new)
    encode = Tokenizer.encode

    def update(self: Tokenizer, text: str, **more: Any) -> list[int]:
        gateway.models["g"]["2"] = dataclasses.replace(model, generation=own)
        gateway.specs["g", "2"] = gateway.specs["g", "1"]
        dispatcher.table = RoutingTable(2, ("gateway/1",), {"g": Route("2", {"2": 1})})
        return encode(self, text, **more)

    monkeypatch.setattr(Tokenizer, "encode", update)
    played.streams.text = [5]
    status, answer = await played.post("/v1/completions", {"prompt": "<own>"})
    assert status == 200
    assert played.streams.prompts == [encode(new, "<own>")]
    assert played.streams.versions == ["2"]
    assert answer["usage"]["prompt_tokens"] == len(encode(new, "<own>"))


async def test_text_offsets_are_those_of_the_shown_characters(
    tokenizer: Tokenizer,
) -> None:
    """A character of several tokens belongs to the last of them."""
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode("aé€b", has_special=False))
    body = {"prompt": "hi", "logprobs": 0}
    _, answer = await played.post("/v1/completions", body)
    (choice,) = answer["choices"]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == [0, 1, 1, 2, 2, 2, 3]
    assert choice["text"][offsets[-1]] == "b"
    found = await played.choices("/v1/completions", body)
    streamed = [
        at for c in found if c["logprobs"] for at in c["logprobs"]["text_offset"]
    ]
    assert streamed == offsets


async def test_probabilities_of_a_whole_answer_are_bounded(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway keeps them until the answer is complete; a stream has no limit."""
    monkeypatch.setattr(completion_answers, "MAX_LOGPROBS", 100)
    played = Played(tokenizer)
    played.streams.text = [7] * 6
    asked = {"messages": PROMPT, "logprobs": True, "top_logprobs": 9, "n": 2}
    status, answer = await played.post(CHAT, asked)
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    assert (await played.post(CHAT, {**asked, "stream": True}))[0] == 200
    played.streams.text = [7] * 5
    assert (await played.post(CHAT, asked))[0] == 200


# Requests.


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages"),
        ({"messages": PROMPT, "n": 65}, "n"),
        ({"messages": PROMPT, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": PROMPT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": PROMPT, "max_completion_tokens": 500}, "messages"),
        ({"messages": PROMPT, "stop_token_ids": [300]}, "stop_token_ids"),
        ({"messages": PROMPT, "temperature": -1}, "temperature"),
        ({"messages": PROMPT, "store": True}, "store"),
        (
            {
                "messages": PROMPT,
                "stream": True,
                "stream_options": {"include_obfuscation": True},
            },
            "stream_options",
        ),
        ({"messages": PROMPT, "stop_token_ids": [*range(1025)]}, "stop_token_ids"),
        ({"messages": PROMPT, "service_tier": "flex"}, "service_tier"),
        ({"messages": PROMPT, "metadata": {"a": 1}}, "metadata"),
        ({"messages": PROMPT, "metadata": {"a" * 65: "b"}}, "metadata"),
        ({"messages": PROMPT, "reasoning_effort": "huge"}, "reasoning_effort"),
        ({"messages": PROMPT, "verbosity": "low"}, "verbosity"),
        ({"messages": PROMPT, "best_of": 2}, "best_of"),
        ({"messages": PROMPT, "use_beam_search": True}, "use_beam_search"),
        ({"messages": PROMPT, "length_penalty": 0}, "length_penalty"),
        ({"messages": PROMPT, "echo": True}, "echo"),
        ({"messages": PROMPT, "add_special_tokens": True}, "add_special_tokens"),
        (
            {"messages": PROMPT, "spaces_between_special_tokens": False},
            "spaces_between_special_tokens",
        ),
        ({"messages": PROMPT, "prompt_cache_key": "x" * 257}, "prompt_cache_key"),
    ],
)
async def test_chat_that_cannot_be_met_names_the_field(
    tokenizer: Tokenizer, body: dict[str, Any], param: str
) -> None:
    played = Played(tokenizer)
    status, answer = await played.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert played.streams.prompts == []


def templated(folder: Path, template: str) -> Tokenizer:
    save_tokenizer(folder, template=template)
    return Tokenizer(folder)


async def test_tool_call_is_accepted_in_the_next_turn(
    tmp_path: Path,
) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
        "{% endfor %};{% endfor %}"
    )
    tokenizer = templated(tmp_path, template)
    played = Played(tokenizer)
    played.streams.text = [7]
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "call_1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "7"}
    status, _ = await played.post(CHAT, {"messages": [*PROMPT, answer, result]})
    assert status == 200
    shown = tokenizer.decode(played.streams.prompts[0])
    assert shown == 'user:hi;assistant:{"a": 1};tool:7;'


async def test_variables_of_the_template_can_be_set(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ '!' if enable_thinking else '.' }}"
    tokenizer = templated(tmp_path, template)
    played = Played(tokenizer)
    played.streams.text = [7]
    for is_on, shown in ((True, "hi!"), (False, "hi.")):
        asked = {"messages": PROMPT, "chat_template_kwargs": {"enable_thinking": is_on}}
        status, _ = await played.post(CHAT, asked)
        assert status == 200
        assert tokenizer.decode(played.streams.prompts.pop()) == shown
        _, answer = await played.post("/tokenize", asked)
        assert tokenizer.decode(answer["tokens"]) == shown
    for name in ("thinking", "messages", "chat_template", "tokenize", "tools", ""):
        asked = {"messages": PROMPT, "chat_template_kwargs": {name: "x"}}
        for path in (CHAT, "/tokenize"):
            status, answer = await played.post(path, asked)
            assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")
    assert played.streams.prompts == []


async def test_web_search_is_refused(tokenizer: Tokenizer) -> None:
    asked: dict[str, Any] = {"messages": PROMPT, "web_search_options": {}}
    status, answer = await Played(tokenizer).post(CHAT, asked)
    assert (status, answer["error"]["param"]) == (400, "web_search_options")


async def test_tools_that_cannot_fit_are_refused_before_they_are_read(
    tmp_path: Path,
) -> None:
    """Rendering the template takes no time; tokenizing does."""
    tokenizer = templated(tmp_path, "{{ tools | tojson }}")
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 9000}}
    asked = {"messages": PROMPT, "tools": [tool], "tool_choice": "required"}
    status, answer = await Played(tokenizer).post(CHAT, asked)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert " bytes" in answer["error"]["message"]


async def test_prompts_times_choices_are_bounded(tokenizer: Tokenizer) -> None:
    played = Played(tokenizer)
    played.streams.text = [7]
    asked = {"prompt": ["a", "b"], "n": 33}
    status, answer = await played.post("/v1/completions", asked)
    assert (status, answer["error"]["param"]) == (400, "n")
    status, answer = await played.post("/v1/completions", {**asked, "n": 3})
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert played.streams.prompts == [[65]] * 3 + [[66]] * 3
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] == 6


async def test_streamed_chat_begins_with_its_choices_in_order(
    tokenizer: Tokenizer,
) -> None:
    """The ``openai`` package relies on it, whichever choice has the first token."""
    played = Played(tokenizer)
    played.streams.text, played.streams.first_s = [7, 8], 0.1
    choices = await played.choices(CHAT, {"messages": PROMPT, "n": 2})
    assert [choice["index"] for choice in choices[:3]] == [0, 1, 1]
    roles = [choice["delta"].get("role") for choice in choices[:3]]
    assert roles == ["assistant", "assistant", None]


async def test_max_completion_tokens_overrides_max_tokens(
    tokenizer: Tokenizer,
) -> None:
    """``max_completion_tokens`` replaces ``max_tokens`` in OpenAI's API."""
    played = Played(tokenizer)
    played.streams.text = [7]
    for fields, most in (
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 6}, 6),
        ({"max_tokens": 6, "max_completion_tokens": 5}, 5),
    ):
        assert (await played.post(CHAT, {"messages": PROMPT, **fields}))[0] == 200
        assert played.streams.samplings[-1].max_tokens == most


@pytest.mark.parametrize(
    "body",
    [
        {"messages": PROMPT, "x" * 5000: 1},
        {"messages": PROMPT, "structured_outputs": {"regex": "(" * 5000}},
        {"messages": PROMPT, "model": "x" * 5000},
        {
            "messages": PROMPT,
            "tools": TOOLS,
            "tool_choice": {"function": {"name": "x" * 5000}},
        },
    ],
)
async def test_error_quotes_little_of_what_was_sent(
    tokenizer: Tokenizer, body: dict[str, Any]
) -> None:
    status, answer = await Played(tokenizer).post(CHAT, body)
    assert status in (400, 404)
    assert len(json.dumps(answer)) < 2500


async def test_neutral_values_of_unsupported_fields_are_accepted(
    tokenizer: Tokenizer,
) -> None:
    """Clients send such defaults."""
    played = Played(tokenizer)
    played.streams.text = [7]
    nothing = {
        "store": False,
        "metadata": {"a": "b"},
        "verbosity": None,
        "best_of": 1,
        "reasoning_effort": "low",
        "length_penalty": 1.0,
        "service_tier": "auto",
        "modalities": ["text"],
        "user": "u",
        "prompt_cache_key": "chat 7",
        "logit_bias": {},
    }
    assert (await played.post(CHAT, {"messages": PROMPT, **nothing}))[0] == 200
    assert played.streams.sessions == ["chat 7"]


async def test_stop_string_that_the_last_token_completes_is_the_reason(
    tokenizer: Tokenizer,
) -> None:
    """The last allowed token ends within a character, which completes the string."""
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode("aé", has_special=False))[:-1]
    asked = {"messages": PROMPT, "stop": ["\ufffd"]}
    _, answer = await played.post(CHAT, asked)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "stop")


async def test_output_ends_before_its_stop_string(tokenizer: Tokenizer) -> None:
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode("one,END,two", has_special=False))
    asked = {"messages": PROMPT, "stop": ["END"]}
    status, answer = await played.post(CHAT, asked)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one,", "stop")
    found = await played.choices(CHAT, asked)
    assert "".join(c["delta"].get("content", "") for c in found) == "one,"
    assert found[-1]["finish_reason"] == "stop"
    assert status == 200


async def test_output_that_ends_within_a_character_shows_whole_characters(
    tokenizer: Tokenizer,
) -> None:
    """An incomplete character is replaced at the end, never before."""
    played = Played(tokenizer)
    letters = tokenizer.encode("aé€", has_special=False)
    assert len(letters) == 6
    for count, wanted in ((6, "aé€"), (5, "aé�"), (2, "a�")):
        played.streams.text = list(letters[:count])
        found = await played.choices(CHAT, {"messages": PROMPT})
        shown = [choice["delta"].get("content", "") for choice in found]
        assert "".join(shown) == wanted
        assert not any("�" in piece for piece in shown[:-1])


async def test_text_is_tokenized_and_detokenized(
    tokenizer: Tokenizer,
) -> None:
    played = Played(tokenizer)
    status, plain = await played.post("/tokenize", {"prompt": "hi!"})
    assert status == 200
    assert plain["count"] == 3
    assert plain["max_model_len"] == 200
    body = {"messages": PROMPT, "return_token_strs": True}
    _, chat = await played.post("/tokenize", body)
    assert "".join(chat["token_strs"]).replace("Ġ", " ").startswith("user:")
    _, text = await played.post("/detokenize", {"tokens": plain["tokens"]})
    assert text == {"prompt": "hi!"}
    for path, wrong in (
        ("/tokenize", {}),
        ("/tokenize", {"messages": [{"role": "robot"}]}),
        ("/detokenize", {"tokens": [300]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {}),
    ):
        status, _ = await played.post(path, wrong)
        assert status == 400


async def test_chat_shows_the_asked_alternatives_of_each_token(
    tokenizer: Tokenizer,
) -> None:
    """JSON cannot write the logarithm of zero."""
    played = Played(tokenizer)
    played.streams.text = list(tokenizer.encode("ab", has_special=False))
    asked = {"messages": PROMPT, "logprobs": True, "top_logprobs": 2}
    _, answer = await played.post(CHAT, asked)
    first, second = answer["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["logprob"], second["logprob"]) == ("a", 0.0, -0.5)
    assert [top["logprob"] for top in second["top_logprobs"]] == [-0.5, -9999.0]
    assert first["bytes"] == [97]
    asked = {"prompt": "x", "logprobs": 2}
    _, answer = await played.post("/v1/completions", asked)
    found = answer["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [0.0, -0.5]
    assert sorted(found["top_logprobs"][1].values()) == [-9999.0, -0.5]
