"""The stage that asks an engine for embeddings."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pydantic import ValidationError

from multiworld.errors import InvalidRequestError, ModelFailedError, SpecError
from multiworld.serve.engine.external import address_choice, engine_encoder
from multiworld.serve.engine.external.engine_process import EngineProcess, free_port
from multiworld.serve.engine.external.whole_engine import EngineLostError
from multiworld.serve.engine.models.factory import build_model
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.spec.stage import Stage, StageContext, StageFunction
from tests import fake_vllm
from tests.tiny_decoder import save_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder"))


def spec_of(folder: Path, **more: Any) -> ModelSpec:
    data = {"path": str(folder), "engine": "vllm", "embeddings": True}
    return ModelSpec.model_validate({**data, **more})


KEPT: list[object] = []
"""Stages and servers, which live as long as this process."""


class Elsewhere:
    """A server that the service does not run."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._program = str(fake_vllm.interpreter(folder))
        self._process: EngineProcess | None = None

    def start(self) -> Elsewhere:
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        self._process = EngineProcess([self._program, "-m", "x", *address], {})
        KEPT.append(self._process)
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                threading.Event().wait(0.1)
            else:
                return self
        raise TimeoutError("the server does not answer")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


@pytest.fixture(scope="module")
def server(folder: Path) -> Elsewhere:
    """Return a server that outlives the tests, as its users would exit without it."""
    return Elsewhere(folder).start()


def at(*servers: Elsewhere) -> dict[str, Any]:
    args = {"urls": [server.url for server in servers], "model": "there"}
    return {"engine": "openai", "engine_args": args}


def loaded(spec: ModelSpec) -> StageFunction:
    (made,) = build_model(spec).stages
    assert isinstance(made, Stage)
    KEPT.append(found := made.load(StageContext()))
    return found


@pytest.fixture(scope="module", params=["vllm", "openai"])
def stage(
    folder: Path, server: Elsewhere, request: pytest.FixtureRequest
) -> StageFunction:
    if request.param == "openai":
        return loaded(spec_of(folder, **at(server)))
    python = str(fake_vllm.interpreter(folder))
    return loaded(spec_of(folder, engine_python=python))


def test_servers_without_embeddings_of_token_ids_are_named(
    folder: Path,
    stage: StageFunction,
    server: Elsewhere,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_encoder, "ROUTE", "/v1/nothing")
    with pytest.raises(EngineLostError, match="cannot embed token ids"):
        loaded(spec_of(folder, **at(server)))
    with pytest.raises(EngineLostError, match="answers /health"):
        loaded(spec_of(folder, **at(Elsewhere(folder))))


def test_replica_exits_for_a_server_that_serves_again(
    folder: Path, server: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also exits once its own server is lost, so that another takes its work."""
    exited = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: exited.set())
    monkeypatch.setattr(address_choice, "LOOK_S", 0.1)
    late = Elsewhere(folder)
    stays = loaded(spec_of(folder, **at(server)))
    loaded(spec_of(folder, **at(server, late)))
    late.start()
    assert exited.wait(30.0)
    assert len(stays(asked([1, 2]))["embedding"]) == 1
    late.kill()
    exited.clear()
    alone = Elsewhere(folder).start()
    loaded(spec_of(folder, **at(alone)))
    assert not exited.is_set()
    alone.kill()
    assert exited.wait(30.0)


def asked(*texts: list[int]) -> dict[str, torch.Tensor]:
    longest = max(map(len, texts))
    rows = [[*ids, *[0] * (longest - len(ids))] for ids in texts]
    masks = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


def test_padding_may_stand_anywhere(stage: StageFunction) -> None:
    """Some tokenizers pad before the text."""
    tensors = {
        "input_ids": torch.tensor([[7, 8, 9, 10], [0, 0, 5, 6], [5, 0, 0, 6]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1]]),
    }
    found = stage(tensors)["embedding"]
    for row, ids in zip(found, ([7, 8, 9, 10], [5, 6], [5, 6]), strict=True):
        assert row.numpy().tobytes() == fake_vllm.vector_of(ids)


def test_row_without_a_token_is_refused(folder: Path) -> None:
    model = build_model(spec_of(folder))
    assert model.check is not None
    ids = torch.tensor([[1, 2], [1, 2]])
    model.check({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    mask = torch.tensor([[1, 1], [0, 0]])
    with pytest.raises(InvalidRequestError, match="has no token"):
        model.check({"input_ids": ids, "attention_mask": mask})


@pytest.mark.parametrize(
    ("more", "longest"),
    [
        ({"engine_args": {"max_model_len": 100}}, 100),
        ({"engine_args": {"max-model-len": 100}}, 100),
        ({}, 256),
        ({"engine": "llama.cpp", "engine_args": {"ubatch_size": 64}}, 64),
        ({"engine": "llama.cpp"}, 256),
    ],
)
def test_ids_may_be_as_many_as_the_engine_takes(
    folder: Path, tmp_path: Path, more: dict[str, Any], longest: int
) -> None:
    if more.get("engine") == "llama.cpp":
        (tmp_path / "weights.gguf").touch()
        weights = {"model": str(tmp_path / "weights.gguf")}
        more = {**more, "engine_args": {**more.get("engine_args", {}), **weights}}
    model = build_model(spec_of(folder, **more))
    assert model.check is not None
    ids = torch.ones(1, longest + 1, dtype=torch.int64)
    model.check({"input_ids": ids[:, 1:], "attention_mask": ids[:, 1:]})
    with pytest.raises(InvalidRequestError, match=f"at most {longest}"):
        model.check({"input_ids": ids, "attention_mask": ids})


def test_each_row_gets_the_embedding_of_its_text(stage: StageFunction) -> None:
    texts = [[5, 6, 7], [5], [9, 0]]
    found = stage(asked(*texts))["embedding"]
    assert found.dtype == torch.float32
    for row, ids in zip(found, texts, strict=True):
        assert row.numpy().tobytes() == fake_vllm.vector_of(ids)


@pytest.mark.parametrize(
    ("token", "error"),
    [
        (fake_vllm.REFUSE, InvalidRequestError),
        (fake_vllm.BROKEN, ModelFailedError),
        (fake_vllm.GARBAGE, ModelFailedError),
        (fake_vllm.EARLY, ModelFailedError),
        (fake_vllm.SHORT, ModelFailedError),
        (fake_vllm.TWICE, ModelFailedError),
    ],
)
def test_engine_that_misbehaves_costs_one_request(
    token: int, error: type[Exception], stage: StageFunction
) -> None:
    with pytest.raises(error):
        stage(asked([token, 1], [2]))
    assert len(stage(asked([1, 2]))["embedding"]) == 1


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"engine": "openai", "exact": False}, "no effect on embeddings"),
        ({"generation": {}}, "generates no text"),
        ({"adapters": {"a": "b"}}, "generates no text"),
    ],
)
def test_fields_without_an_effect_are_refused(
    more: dict[str, Any], text: str, folder: Path
) -> None:
    with pytest.raises(ValidationError, match=text):
        spec_of(folder, **more)


def test_arguments_that_the_service_sets_are_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match="runner"):
        build_model(spec_of(folder, engine_args={"runner": "generate"}))
    with pytest.raises(SpecError, match="GGUF file"):
        build_model(spec_of(folder, engine="llama.cpp"))
    with pytest.raises(SpecError, match="not an http"):
        build_model(spec_of(folder, engine="openai", engine_args={"urls": ["x"]}))


def test_texts_are_truncated_to_what_the_engine_accepts(folder: Path) -> None:
    """As everywhere, text is truncated, while too many token IDs are refused."""
    model = build_model(spec_of(folder, engine_args={"max_model_len": 8}))
    assert model.text is not None
    assert model.text().encode("a" * 100)["input_ids"].shape == (1, 8)
    assert model.check is not None
    with pytest.raises(InvalidRequestError, match="at most 8"):
        model.check(asked(list(range(1, 10))))


class Busy(BaseHTTPRequestHandler):
    """Embeds the first text, then asks to retry in a second, and embeds again."""

    statuses: ClassVar[list[int]] = []

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "there"}]})

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        count = len(json.loads(self.rfile.read(size))["input"])
        if self.statuses and self.statuses.pop() == 503:
            self._answer(503, {})
            return
        vector = base64.b64encode(struct.pack("<64f", *range(64))).decode()
        data = [{"index": n, "embedding": vector} for n in range(count)]
        self._answer(200, {"data": data})

    def _answer(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        if status == 503:
            self.send_header("Retry-After", "1")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def test_busy_server_is_asked_again_when_it_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_encoder, "PAUSES_S", (0.01,) * 3)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    KEPT.append(server)
    args = {"urls": [f"http://127.0.0.1:{server.server_port}"], "model": "there"}
    stage = loaded(spec_of(folder, engine="openai", engine_args=args))
    Busy.statuses = [503]
    assert stage(asked([1, 2]))["embedding"].tolist() == [[*map(float, range(64))]]
    assert Busy.statuses == []
