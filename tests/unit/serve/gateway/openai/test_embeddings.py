"""The OpenAI-compatible embeddings route: answers, limits and errors."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import struct
import threading
from typing import Any

import pytest
import torch

from multiworld.errors import InvalidRequestError, ModelFailedError, OverloadedError
from multiworld.serve.gateway.http import request_body
from multiworld.serve.gateway.http.answer_record import AnswerRecord
from multiworld.serve.gateway.openai.embeddings import MAX_TEXTS, WINDOW
from multiworld.serve.keeper.connection_record import ConnectionRecord
from multiworld.serve.routing.refusals import OutdatedError
from multiworld.serve.spec.stage import Model, Tensors
from multiworld.serve.tenants.directory import Tenant
from tests.unit.serve.edges import HANG_S, until
from tests.unit.serve.gateway.fakes import (
    MODEL,
    TEXT,
    Disconnecting,
    Fake,
    FakeText,
    Hanging,
    doubled,
    raising,
)


async def embed(fake: Fake, **asked: Any) -> Any:
    async with fake.client() as client:
        return await client.post("/v1/embeddings", json={"model": "t", **asked})


async def test_embeddings_come_in_the_order_of_the_inputs() -> None:
    answer = await embed(Fake(), input=["a", "bc"])
    assert answer.status_code == 200
    said = answer.json()
    assert [(row["index"], row["embedding"]) for row in said["data"]] == [
        (0, [97.0, -97.0]),
        (1, [197.0, -197.0]),
    ]
    assert said["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert (said["object"], said["model"]) == ("list", "t")


async def test_tokens_of_embeddings_are_counted_for_the_tenant() -> None:
    fake = Fake()

    async def answers(model: str, tensors: Tensors) -> Tensors:
        if fake.dispatcher.calls[-1]["version"] != "2":
            fake.serve("2", t=TEXT)
            raise OutdatedError("version 1 is not active")
        return await doubled(model, tensors)

    fake.dispatcher.answers = answers
    assert (await embed(fake, input=["ab", "c"])).status_code == 200
    meter = fake.gateway.authenticator.meter
    assert (
        sum(row.prompt_tokens for _, rows in meter.take_due(0.0) for row in rows) == 3
    )


async def test_tokens_are_counted_where_the_request_is_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = Fake()
    monkeypatch.setattr(
        "multiworld.serve.gateway.http.recorder.unrecorded",
        lambda: AnswerRecord(
            ConnectionRecord(0), lambda *said: None, is_abandoned=lambda: True
        ),
    )
    assert (await embed(fake, input=["ab", "c"])).status_code == 200
    rows = [
        row
        for _, rows in fake.gateway.authenticator.meter.take_due(0.0)
        for row in rows
    ]
    assert [(row.prompt_tokens, row.bytes_in) for row in rows] == [(0, 0)]


@pytest.mark.parametrize("more", [{"encoding_format": None}, {"dimensions": None}])
async def test_null_is_treated_like_a_missing_field(more: dict[str, None]) -> None:
    """Clients send null for what their users did not set."""
    said = (await embed(Fake(), input="a", **more)).json()
    assert said["data"][0]["embedding"] == [97.0, -97.0]


async def test_embeddings_of_one_answer_are_of_one_version() -> None:
    """An update that completes meanwhile restarts them."""
    fake = Fake()
    tripled = dataclasses.replace(TEXT, text=FakeText)

    async def answers(model: str, tensors: Tensors) -> Tensors:
        if fake.dispatcher.calls[-1]["version"] == "2":
            return await doubled(model, {"ids": 3 * tensors["ids"]})
        if len(fake.dispatcher.calls) > 1:
            fake.serve("2", t=tripled)
            raise OutdatedError("version 1 is not active")
        return await doubled(model, tensors)

    fake.dispatcher.answers = answers
    said = (await embed(fake, input=["a", "b"])).json()
    assert [row["embedding"][0] for row in said["data"]] == [3 * 97.0, 3 * 98.0]


async def test_embeddings_in_base64_are_little_endian_floats() -> None:
    """OpenAI's client requests these by default."""
    answer = await embed(Fake(), input="a", encoding_format="base64")
    packed = base64.b64decode(answer.json()["data"][0]["embedding"])
    assert struct.unpack("<2f", packed) == (97.0, -97.0)


async def test_many_letters_are_encoded_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other requests of this gateway are not held up."""
    threads: set[int] = set()

    class Watched(FakeText):
        def encode(self, text: str) -> Tensors:
            threads.add(threading.get_ident())
            return super().encode(text)

    monkeypatch.setattr(request_body, "OFFLOAD_BYTES", 64)
    fake = Fake()
    fake.gateway.text_frontends["t", "1"] = Watched()
    assert (await embed(fake, input="abc")).status_code == 200
    assert threads == {threading.get_ident()}
    assert (await embed(fake, input="abcde")).status_code == 200
    assert len(threads) == 2


@pytest.mark.parametrize("tokens", [[11], [1] * 6, [2**31], [2**63]])
async def test_token_ids_that_the_model_does_not_take_are_refused(
    tokens: list[int],
) -> None:
    class Ids(FakeText):
        def encode_tokens(self, ids: list[int]) -> Tensors:
            return {"ids": torch.tensor([ids])}

    def check(tensors: Tensors) -> None:
        if int(tensors["ids"].max()) > 10 or tensors["ids"].numel() > 5:
            raise InvalidRequestError("too large", param="input")

    fake = Fake()
    fake.serve(t=dataclasses.replace(TEXT, check=check))
    fake.gateway.text_frontends["t", "1"] = Ids()
    for given in (tokens, [[1], tokens]):
        answer = await embed(fake, input=given)
        assert answer.status_code == 400, answer.text
    assert fake.dispatcher.calls == []
    assert (await embed(fake, input=[1, 10])).status_code == 200


CODES = {'no "model"': "missing_required_parameter", "takes no text": None}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"input": ""}, "none of them empty"),
        ({"input": []}, "none of them empty"),
        ({"input": ["x", ""]}, "none of them empty"),
        ({"input": [1, -2]}, "array of token ids"),
        ({"input": [[1], "x"]}, "array of token ids"),
        ({"input": [1, "x"]}, "array of token ids"),
        ({"input": ["x", 1]}, "array of token ids"),
        ({"input": [[]] * 3000}, "2048 arrays"),
        ({"input": [1] * 300_002}, "300000 tokens"),
        ({"input": None}, "must be a string"),
        ({"input": {"a": 1}}, "must be a string"),
        ({}, "must be a string"),
        ({"input": ["x"] * (MAX_TEXTS + 1)}, "more than 2048"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "encoding_format": ["float"]}, "encoding_format"),
        ({"input": "x", "dimensions": "2"}, "must be an integer"),
        ({"input": "x", "dimensions": True}, "must be an integer"),
        ({"input": "x", "dimensions": 3}, "this model returns 2"),
        ({"input": "x", "dimensions": [[]] * 10_000}, "too long"),
        ({"input": "x", "encoding_format": [0] * 20_000}, "too long"),
        ({"input": "x", "model": [[]] * 10_000}, "too long"),
        ({"input": "x", "model": 7}, 'no "model"'),
        ({"input": "x", "model": None}, 'no "model"'),
        ({"input": "x", "model": "m"}, "takes no text"),
    ],
)
async def test_bad_request_is_named_in_openais_form(
    asked: dict[str, Any], words: str
) -> None:
    fake = Fake()
    answer = await embed(fake, **asked)
    assert answer.status_code == 400, answer.text
    code = CODES.get(words, "invalid_value")
    error = answer.json()["error"]
    assert words in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert fake.dispatcher.calls == []


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"model": "t", "input": ["\x80"]}',
        b'{"model": "t", "input": "\x80"}',
    ],
)
async def test_body_that_is_no_request_is_refused(content: bytes) -> None:
    async with Fake().client() as client:
        answer = await client.post("/v1/embeddings", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_unknown_model_has_openais_code() -> None:
    """OpenAI's client raises ``NotFoundError`` for it."""
    async with Fake().client() as client:
        posted = await client.post(
            "/v1/embeddings", json={"model": "none", "input": "x"}
        )
        got = await client.get("/v1/models/none")
    for answer in (posted, got):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


async def test_one_request_has_only_a_window_of_inputs_in_flight() -> None:
    """The window leaves room in the queue for other requests."""
    fake = Fake()
    in_flight, highest = 0, 0
    gate = asyncio.Event()

    async def answer(model: str, tensors: Tensors) -> Tensors:
        nonlocal in_flight, highest
        in_flight += 1
        highest = max(highest, in_flight)
        await gate.wait()
        in_flight -= 1
        return await doubled(model, tensors)

    fake.dispatcher.answers = answer
    asking = asyncio.ensure_future(embed(fake, input=["x"] * (2 * WINDOW)))
    await until(lambda: in_flight == WINDOW)
    gate.set()
    assert len((await asyncio.wait_for(asking, HANG_S)).json()["data"]) == 2 * WINDOW
    assert highest == WINDOW


async def test_input_that_fails_cancels_the_others_of_its_request() -> None:
    fake = Fake()
    hanging = Hanging()

    async def answer(model: str, tensors: Tensors) -> Tensors:
        if tensors["ids"].numel() == 1:
            await hanging.is_asked.wait()
            raise ModelFailedError("this one broke")
        return await hanging(model, tensors)

    fake.dispatcher.answers = answer
    found = await asyncio.wait_for(embed(fake, input=["long", "x"]), HANG_S)
    assert found.status_code == 500
    assert found.json()["error"]["message"] == "this one broke"
    assert found.json()["error"]["type"] == "server_error"
    assert hanging.is_cancelled.is_set()


async def test_client_that_hangs_up_cancels_all_its_inputs() -> None:
    fake = Fake()
    hanging = fake.dispatcher.answers = Hanging()
    asked = b'{"model": "t", "input": ["a", "b"]}'
    client = Disconnecting(fake.app, "/v1/embeddings", asked)
    running = asyncio.ensure_future(client.run())
    await asyncio.wait_for(hanging.is_asked.wait(), HANG_S)
    client.hang_up()
    await asyncio.wait_for(running, HANG_S)
    assert hanging.is_cancelled.is_set()
    assert fake.requests() == {("t", "499"): 1.0}


async def test_all_inputs_share_one_deadline() -> None:
    fake = Fake()
    async with fake.client(**{"x-timeout-s": "5"}) as client:
        asked = {"model": "t", "input": ["a", "b"]}
        await client.post("/v1/embeddings", json=asked)
    await embed(fake, input="c")
    left = [call["deadline_s"] for call in fake.dispatcher.calls]
    assert all(4.0 < seconds <= 5.0 for seconds in left[:2])
    assert 29.0 < left[2] <= 30.0


async def test_deadline_counts_from_the_first_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AnswerRecord, "spent_s", 20.0)
    fake = Fake()
    await embed(fake, input="a")
    assert 9.0 < fake.dispatcher.calls[0]["deadline_s"] <= 10.0


async def test_tokenizer_that_refuses_an_input_is_the_clients_error() -> None:
    """If it fails otherwise, the service is at fault."""
    fake = Fake()

    class Broken:
        def encode(self, text: str) -> Tensors:
            if text == "bad":
                raise InvalidRequestError("no such letters")
            raise KeyError(text)

    fake.gateway.text_frontends["t", "1"] = Broken()
    assert (await embed(fake, input="bad")).status_code == 400
    assert (await embed(fake, input="worse")).status_code == 500


async def test_model_without_its_embedding_is_an_error_of_the_service() -> None:
    fake = Fake()
    fake.dispatcher.answers = _other
    answer = await embed(fake, input="x")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


async def _other(model: str, tensors: Tensors) -> Tensors:
    return {"other": torch.ones(1, 2)}


async def test_errors_of_one_kind_have_openais_names() -> None:
    fake = Fake()
    fake.dispatcher.answers = raising(ModelFailedError("no"))
    assert (await embed(fake, input="x")).json()["error"]["type"] == "server_error"
    async with fake.client() as client:
        listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["m", "t"]
    assert all(model["created"] > 1_700_000_000 for model in listed["data"])


async def test_tokenizer_is_loaded_once_however_many_ask_for_it() -> None:
    """Loading may take seconds and much memory."""
    loads = 0
    gate = threading.Event()

    def load() -> FakeText:
        nonlocal loads
        loads += 1
        gate.wait(HANG_S)
        return FakeText()

    fake = Fake()
    fake.serve(m=MODEL, t=Model(stages=TEXT.stages, outputs=TEXT.outputs, text=load))
    asking = [asyncio.ensure_future(embed(fake, input="x")) for _ in range(2)]
    await until(lambda: loads)
    for _ in range(200):  # the second one waits as well
        await asyncio.sleep(0)
    gate.set()
    answers = await asyncio.wait_for(asyncio.gather(*asking), HANG_S)
    assert [answer.status_code for answer in answers] == [200, 200]
    assert loads == 1


@pytest.mark.parametrize(
    ("more", "status", "ignored"),
    [
        ({"trace": {"a": [1]}}, 200, "trace"),
        ({"user": "me"}, 200, None),
        ({"dimension": 2}, 400, None),
        ({"truncate_prompt_tokens": 5}, 400, None),
        ({"truncate_prompt_tokens": None}, 200, "truncate_prompt_tokens"),
        ({f"f{n}": {} for n in range(2000)}, 400, None),
    ],
)
async def test_unknown_fields_are_ignored_unless_they_change_the_vectors(
    more: dict[str, Any], status: int, ignored: str | None
) -> None:
    answer = await embed(Fake(), input=["a"], **more)
    assert answer.status_code == status, answer.text
    assert answer.headers.get("x-ignored-fields") == ignored


async def test_strict_gateway_refuses_unknown_fields() -> None:
    fake = Fake()
    fake.gateway.is_strict = True
    assert (await embed(fake, input=["a"], trace=1)).status_code == 400
    assert (await embed(fake, input=["a"], user="me")).status_code == 200


async def test_burst_does_not_exceed_a_budget() -> None:
    """All are admitted before the first one has been computed."""
    fake = Fake(Tenant(name="acme", tokens_per_day=1000))
    counted: list[int] = []

    async def answers(model: str, tensors: Tensors) -> Tensors:
        counted.append(tensors["ids"].numel())
        await asyncio.sleep(0.01)
        return await doubled(model, tensors)

    fake.dispatcher.answers = answers
    async with fake.client("acme") as client:
        asked = {"model": "t", "input": "x" * 600}
        sent = [client.post("/v1/embeddings", json=asked) for _ in range(8)]
        found = [answer.status_code for answer in await asyncio.gather(*sent)]
    assert sorted(found) == [200] * 2 + [429] * 6
    assert counted == [600, 600]


async def test_tokens_that_are_not_computed_are_not_charged() -> None:
    fake = Fake(Tenant(name="acme", tokens_per_day=1000, tpm_limit=1000))
    fake.dispatcher.answers = raising(OverloadedError("the queue is full"))
    asked = {"model": "t", "input": "x" * 600}
    async with fake.client("acme") as client:
        for _ in range(3):
            answer = await client.post("/v1/embeddings", json=asked)
            assert "queue is full" in answer.text
        fake.dispatcher.answers = doubled
        assert (await client.post("/v1/embeddings", json=asked)).status_code == 200


@pytest.mark.parametrize(
    "field",
    ['"a\\r\\nSet-Cookie: x": 1', f'"{"a" * 100}": 1', '"foo": 1e999', '"foo": "\xff"'],
)
async def test_odd_unknown_fields_are_refused(field: str) -> None:
    """Their names are written to a header of the answer."""
    body = f'{{"model": "t", "input": "a", {field}}}'.encode("latin-1")
    async with Fake().client() as client:
        answer = await client.post("/v1/embeddings", content=body)
    assert answer.status_code == 400, answer.text


async def test_embedding_for_each_token_is_valid_json() -> None:
    fake = Fake()

    async def answers(model: str, tensors: Tensors) -> Tensors:
        return {"embedding": torch.ones(1, 3000, 4)}

    fake.dispatcher.answers = answers
    answer = await embed(fake, input="a")
    assert len(answer.json()["data"][0]["embedding"]) == 3000
