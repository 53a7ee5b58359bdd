"""Fuzz tests: malformed bytes from outside affect their sender only."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import msgspec
import pytest
import torch

from multiworld.backends import header
from multiworld.errors import ServeError
from multiworld.liveness.manager_messages import Broken, ManagerHello, control_messages
from multiworld.net import frames
from multiworld.net.handshake import HandshakeError, decode_hello
from multiworld.rendezvous import store_messages
from multiworld.rendezvous.store_service import StoreService
from multiworld.serve.gateway.http.http_responses import openai_error
from multiworld.serve.gateway.openai.completion_requests import (
    chat_of,
    completion_of,
    prompts_of,
)
from multiworld.serve.gateway.openai.embeddings import _embedding_request
from multiworld.serve.gateway.openai.request_fields import GenerateBody, decoded
from multiworld.serve.gateway.openinference.tensor_format import parse
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.wire import frames as edge_frames
from multiworld.serve.wire.frames import Entry
from multiworld.serve.wire.inference_messages import (
    AnswerItem,
    Answers,
    Cancel,
    Work,
    WorkItem,
)
from multiworld.serve.wire.protocol import MessageError
from tests.fuzz.fuzzing import mutated, repeat
from tests.serve.harness import body
from tests.unit.inner_state import waiting_count
from tests.unit.rendezvous.sessions import claim_of, survivor_of
from tests.unit.serve.controller.test_admin import SPEC, Client, FakeController
from tests.unit.serve.gateway.http.test_http_protocol import GET, serving
from tests.unit.serve.gateway.openinference.test_tensor_format import ANY, MODEL

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n0\r\nTrailer: y\r\n\r\n"
)
KEYED = b"GET /early HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\n\r\n"


async def test_http_parser() -> None:
    """Each connection is answered or closed, and the next client is served."""
    loop = asyncio.get_running_loop()
    async with serving(head_s=0.5) as server:

        async def send(content: bytes) -> None:
            client = await server.connect()
            client.send(content)
            await asyncio.sleep(0)
            await client.close()
            other = await server.connect()
            assert (await other.ask(GET))[0] == 200
            await other.close()
            server.clients.clear()

        def check(content: bytes) -> None:
            asyncio.run_coroutine_threadsafe(send(content), loop).result(30)

        samples = mutated(GET, POST, CHUNKED, KEYED, GET + POST + CHUNKED)
        await asyncio.to_thread(repeat, check, samples)


def test_request_bodies() -> None:
    """A body is a request, or is refused with an error text."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [[1.5, 2e3]]}
    samples = [
        json.dumps(body(1.0)).encode(),
        json.dumps({"inputs": [tensor], "id": "7", "parameters": {"a": 1}}).encode(),
        json.dumps({"model": "m", "input": ["a", "b"], "dimensions": 2}).encode(),
        json.dumps({"model": "m", "input": [[1, 2], [3]]}).encode(),
    ]

    def check(content: bytes) -> None:
        for model in (MODEL, ANY):
            for length in (None, str(len(content) // 2)):
                _refused(lambda m=model, n=length: parse(content, n, m))
        _refused(lambda: _embedding_request(content, is_strict=False))

    repeat(check, mutated(*samples))


def test_bodies_of_generation_routes() -> None:
    """Chats, completions, tools and structures are read, or refused with a text."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    samples = [
        {**chat, "temperature": 0.5, "top_p": 0.9, "n": 2, "logit_bias": {"5": 1.5}},
        {**chat, "stream": True, "stream_options": {"include_usage": True}},
        {**chat, "tools": [tool], "tool_choice": "required"},
        {**chat, "response_format": form, "max_completion_tokens": 7},
        {**chat, "structured_outputs": {"regex": "[a-z]+(b|c){2,5}"}},
        {**chat, "structured_outputs": {"grammar": 'start: "a" | /b+/'}},
        {"model": "m", "prompt": ["a", "b"], "logprobs": 2, "echo": True},
        {"model": "m", "prompt": [[1, 2], [3]], "stop": ["x", "yz"], "seed": 7},
        {"text_input": "a", "parameters": {"max_tokens": 5}},
    ]

    def check(content: bytes) -> None:
        _refused(lambda: _read_chat(content))
        _refused(lambda: prompts_of(completion_of(content)[0].prompt))
        _refused(lambda: decoded(content, msgspec.json.Decoder(GenerateBody)))

    repeat(check, mutated(*(json.dumps(sample).encode() for sample in samples)))


def _read_chat(content: bytes) -> None:
    _, wanted = chat_of(content)
    if wanted.structure is not None:
        wanted.structure()


def _refused(call: object) -> None:
    assert callable(call)
    refused: ServeError | None = None
    try:
        call()
    except ServeError as error:
        refused = error
    assert refused is None or refused.status < 500
    assert refused is None or 0 < len(str(openai_error(refused))) < 5000


def test_specs() -> None:
    """A spec is valid, or its mistakes are named."""
    paths = [*(ROOT / "examples").rglob("*.yaml")]
    samples = [p.read_bytes() for p in paths if b"models:" in p.read_bytes()]
    assert len(samples) > 2

    def check(content: bytes) -> None:
        with contextlib.suppress(ServeError):
            parse_spec(content.decode(errors="replace"))

    repeat(check, mutated(*samples))


def test_wire_headers() -> None:
    """A header is read as it was sent, or is refused; none is taken for another."""
    sent = [
        header.Header(1, 0, 2, len(shape), 3, 4, 5, 6, 7, 8, 9, 10, 11)
        for shape in ((), (3,), (2, 3, 4))
    ]
    samples = {
        header.encode(one, shape): (one, shape)
        for one, shape in zip(sent, ((), (3,), (2, 3, 4)), strict=True)
    }

    def check(content: bytes) -> None:
        try:
            found = header.decode(memoryview(content), 0, len(content))
        except header.HeaderError:
            return
        if found is not None:
            size = header.SIZE + 8 * found[0].ndim
            assert samples[content[:size]] == found

    repeat(check, mutated(*samples))


def test_frames_of_edges() -> None:
    """A frame is read as a whole, or is refused as a whole."""
    item = WorkItem(("gateway/1", 4, 1), 2.5)
    content = {"x": torch.arange(3), "y": torch.ones(2, 2)}
    work: Entry = (Work((item, item)), [content, {}])
    answers: Entry = (Answers((AnswerItem((1, 1)),)), [content])
    cancel: Entry = (Cancel(("g", 1, 1)), [])
    samples = [
        bytes(edge_frames.lay_out(entries).pack().tolist())
        for entries in ([work], [answers, cancel], [cancel] * 3, [])
    ]

    def check(content: bytes) -> None:
        packed = torch.frombuffer(bytearray(content or b"0"), dtype=torch.uint8)
        with contextlib.suppress(MessageError):
            for _, contents in edge_frames.unpack(packed):
                for tensors in contents:
                    for tensor in tensors.values():
                        tensor.clone()

    repeat(check, mutated(*samples))


async def test_messages_of_stores_and_links() -> None:
    """A message is one of the declared types; a store takes any in any order."""
    hellos = msgspec.json.Decoder(ManagerHello)
    samples = [
        frames.encode(message)[4:]
        for message in (
            claim_of(1, 0, 2),
            claim_of(2, 1, 2),
            survivor_of(3, 0, 2, lost=frozenset({1})),
            store_messages.Announce("w", 1, 0, "u"),
            store_messages.Leave("w", 1, 0, (1,)),
            store_messages.Withdraw(1),
            store_messages.HoldsAnswer(1, holds=True),
            store_messages.GetValues(4, ("k",), 0.1),
            store_messages.SetValue(5, "k", "v"),
            store_messages.CompareSet(6, "k", "v", "w"),
            store_messages.AddAmount(7, "n", 3),
            Broken(1, 2, "it was lost", "no answer", 1.5),
        )
    ]
    service = StoreService()
    session = 0

    def check(content: bytes) -> None:
        nonlocal session
        for read in (
            lambda: frames.decode_body(content, store_messages.replies),
            lambda: frames.decode_body(content, control_messages),
        ):
            with contextlib.suppress(frames.FrameError):
                read()
        with contextlib.suppress(frames.FrameError, HandshakeError):
            decode_hello(content, hellos)
        try:
            message = frames.decode_body(content, store_messages.requests)
        except frames.FrameError:
            service.close_session(session)
            session = service.open_session(lambda message: None)
            return
        service.receive(session, message)

    loop = asyncio.get_running_loop()

    def on_loop(content: bytes) -> None:
        async def run() -> None:
            check(content)

        asyncio.run_coroutine_threadsafe(run(), loop).result(30)

    await asyncio.to_thread(repeat, on_loop, mutated(*samples))
    service.close_session(session)
    assert waiting_count(service) == 0
    service.close()


async def test_admin_messages(tmp_path: Path) -> None:
    """A request is carried out or refused; it never fails with a 5xx."""
    client = Client(FakeController(tmp_path), asyncio.Event())
    loop = asyncio.get_running_loop()
    routes = {
        "/scale": {"model": "m", "stage": "s", "replicas": 2},
        "/update": {"text": SPEC},
        "/drain": {"name": "m/0/1"},
        "/chaos": {"action": "kill", "model": "m", "stage": "s", "seconds": 1.0},
        "/tenants": {"name": "acme", "weight": 2.0, "models": ["a*"]},
        "/tenants/acme/rotate": {"grace_s": 1.0},
    }
    samples = [
        path.encode() + b" " + json.dumps(b).encode() for path, b in routes.items()
    ]

    async def send(content: bytes) -> None:
        path, _, what = content.partition(b" ")
        for known in routes:
            if path == known.encode():
                json_type = {"content-type": "application/json"}
                answer = await client.http.post(known, content=what, headers=json_type)
                assert answer.status_code < 500, (known, what, answer.text)

    def check(content: bytes) -> None:
        asyncio.run_coroutine_threadsafe(send(content), loop).result(30)

    async with client.http:
        await asyncio.to_thread(repeat, check, mutated(*samples))
    await client.controller.tenanting.close()
