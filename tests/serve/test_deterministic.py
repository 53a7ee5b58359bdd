"""Deterministic streams: bit-identical to an undisturbed run, whatever is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.harness import Served, served
from tests.serve.texts import (
    STAGES,
    asked,
    client,
    is_whole,
    post,
    spec_of,
)
from tests.tiny_decoder import save_decoder

pytestmark = pytest.mark.timeout(240)

COUNT = 24
CHOSEN: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 11,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "n": 2,
    "logprobs": 5,
}
"""Sampling that depends on every bit, and on all previous tokens."""

Text = list[tuple[str, float]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
        # test_widths_of_real_models_give_the_same_bits_in_any_chunks proves the bits of
        # int8; what a loss does to a stream is the same in all types.
        pytest.param({"quantization": "int8"}, id="int8", marks=pytest.mark.heavy),
    ],
)
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder: Path = save_decoder(tmp_path_factory.mktemp("decoder"), "mistral")
    # By default, its end token is a quotation mark.
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    spec = spec_of(folder)
    spec["models"]["m"]["generation"] |= {"deterministic": True, **request.param}
    with served(tmp_path_factory.mktemp("deterministic"), spec) as made:
        yield made


class Streamed:
    """Two choices of one prompt, with the log-probability of every token."""

    def __init__(self, api: Any, **more: Any) -> None:
        self.texts: list[Text] = [[], []]
        self._grown = asyncio.Event()
        self._task = asyncio.ensure_future(self._read(api, more))

    async def _read(self, api: Any, more: dict[str, Any]) -> None:
        wanted = {**asked(COUNT), **CHOSEN, **more}
        stream: Any = await api.completions.create(**wanted, stream=True)
        async for chunk in stream:
            (choice,) = chunk.choices
            found = choice.logprobs
            self.texts[choice.index] += list(
                zip(found.tokens, found.token_logprobs, strict=True)
            )
            self._grown.set()

    async def has(self, count: int) -> None:
        while sum(map(len, self.texts)) < count and not self._task.done():
            self._grown.clear()
            await self._grown.wait()

    async def end(self) -> list[Text]:
        await self._task
        return self.texts


@pytest.fixture(scope="module")
def undisturbed(service: Served) -> list[Text]:
    async def run() -> list[Text]:
        async with client(service) as api:
            return await Streamed(api).end()

    return asyncio.run(run())


async def killed_at(service: Served, stage: str, index: int, **more: Any) -> list[Text]:
    """Kill a stage at this token of a stream that runs beside others."""
    async with client(service) as api:
        others = [Streamed(api, seed=index * 10 + n, n=2) for n in range(2)]
        stream = Streamed(api, **more)
        await stream.has(index)
        await asyncio.to_thread(service.break_replica, "kill", stage)
        found = await stream.end()
        for other in others:
            await other.end()
    await is_whole(service)
    return found


async def test_concurrent_streams_are_bit_identical_to_one_alone(
    service: Served, undisturbed: list[Text]
) -> None:
    assert [len(text) for text in undisturbed] == [COUNT, COUNT]
    assert undisturbed[0] != undisturbed[1]
    async with client(service) as api:
        streams = [Streamed(api) for _ in range(4)]
        for stream in streams:
            assert await stream.end() == undisturbed


@pytest.mark.parametrize("stage", STAGES)
async def test_stream_that_lost_a_stage_is_bit_identical(
    service: Served, undisturbed: list[Text], stage: str
) -> None:
    for index in (1, COUNT):
        assert await killed_at(service, stage, index) == undisturbed


@pytest.mark.heavy
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", STAGES)
async def test_stream_is_bit_identical_wherever_a_stage_is_lost(
    service: Served, undisturbed: list[Text], stage: str
) -> None:
    for index in range(2 * COUNT):
        assert await killed_at(service, stage, index) == undisturbed, index


STRUCTURE = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {
            "name": "thing",
            "schema": {
                "type": "object",
                "properties": {
                    "color": {"enum": ["red", "green", "blue"]},
                    "count": {"type": "integer", "minimum": 0, "maximum": 99999},
                },
                "required": ["color", "count"],
                "additionalProperties": False,
            },
        },
    },
    "skip_special_tokens": False,
}


async def test_structure_survives_the_loss_of_every_stage(service: Served) -> None:
    more: dict[str, Any] = {"extra_body": STRUCTURE, "max_tokens": 100}
    async with client(service) as api:
        wanted = await Streamed(api, **more).end()
    for text in wanted:
        found = json.loads("".join(token for token, _ in text[:-1]))
        assert found["color"] in ("red", "green", "blue")
        assert 0 <= found["count"] <= 99999
    for index, stage in ((3, "back"), (20, "middle"), (30, "front"), (35, "back")):
        assert await killed_at(service, stage, index, **more) == wanted, stage


def test_invalid_structure_is_refused_with_its_position(service: Served) -> None:
    body = {"model": "m", "prompt": "a", "max_tokens": 4}
    bad = {"type": "object", "properties": {"a": {"type": "objct"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}
    for changes, text in (
        ({"response_format": form}, "properties.a"),
        ({"structured_outputs": {"regex": "a(b"}}, "unclosed group"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "exactly one"),
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        ({"response_format": {"type": "xml"}}, "xml"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ):
        answer = post(service, "/v1/completions", {**body, **changes})
        assert answer.status_code == 400, answer.text
        assert text in answer.json()["error"]["message"]


def test_prompt_longer_than_a_step_is_bit_identical_each_time(
    service: Served,
) -> None:
    """Steps without a token need no logits; 64 tokens go into one step."""
    prompt = [3 + n * n % 290 for n in range(200)]
    body = {"model": "m", "max_tokens": 3, "logprobs": 2, "temperature": 0}
    body |= {"ignore_eos": True}
    first = post(service, "/v1/completions", {**body, "prompt": prompt}).json()
    again = post(service, "/v1/completions", {**body, "prompt": prompt}).json()
    assert len(first["choices"][0]["logprobs"]["tokens"]) == 3
    assert first["choices"] == again["choices"]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("up", "down")
]


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "down"}}],
    ids=["required", "named"],
)
async def test_tools_are_called_the_same_whole_and_streamed(
    service: Served, choice: Any
) -> None:
    wanted: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "tool_choice": choice,
        "max_tokens": 150,
        "seed": 3,
    }
    async with client(service) as api:
        whole: Any = await api.chat.completions.create(**wanted)
        (answer,) = whole.choices
        assert answer.finish_reason == "tool_calls"
        calls = [
            (c.function.name, c.function.arguments) for c in answer.message.tool_calls
        ]
        assert all(0 <= json.loads(given)["n"] <= 99 for _, given in calls)
        assert {name for name, _ in calls} <= {"up", "down"}
        streamed: dict[int, list[str]] = {}
        finish = []
        stream: Any = await api.chat.completions.create(**wanted, stream=True)
        number = 0
        async for chunk in stream:
            number += 1
            if number == 2:
                await asyncio.to_thread(service.break_replica, "kill", "back")
            (made,) = chunk.choices
            finish.append(made.finish_reason)
            for call in made.delta.tool_calls or ():
                found = streamed.setdefault(call.index, ["", ""])
                found[0] += call.function.name or ""
                found[1] += call.function.arguments or ""
        assert finish[-1] == "tool_calls"
        assert finish[:-1] == [None] * (len(finish) - 1)
        assert [tuple(call) for call in streamed.values()] == calls
    await is_whole(service)


async def test_replicas_report_their_hardware_fingerprint(service: Served) -> None:
    """All are on one machine, so no event says that they differ."""
    assert not service.events("fingerprint")
