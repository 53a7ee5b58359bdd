"""Embeddings by an external engine: a stage that calls the engine's server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from multiworld.errors import InvalidRequestError, ModelFailedError
from multiworld.serve.deadlines import SILENT_S
from multiworld.serve.engine.external import llama_cpp, vllm
from multiworld.serve.engine.external.address_choice import ServerChoice
from multiworld.serve.engine.external.engine_args import refuse_reserved
from multiworld.serve.engine.external.engine_server import (
    Answer,
    EngineServer,
    answer_of,
)
from multiworld.serve.engine.external.whole_engine import (
    EXIT_LOST,
    BusyError,
    EngineLostError,
    EngineSettings,
    RunFailedError,
)
from multiworld.serve.engine.models.huggingface import (
    HIDDEN,
    check_ids,
    example,
    max_length_of,
    number_of,
)
from multiworld.serve.spec.schema import LLAMA_CPP, OPENAI, VLLM
from multiworld.serve.spec.stage import Model, Stage, StageContext, Tensors, TensorSpec
from multiworld.serve.text.folder_json import read_json
from multiworld.serve.text.text_inputs import Tokenizer

logger = logging.getLogger("multiworld.serve")

RESERVED = dict.fromkeys(
    ("host", "port", "api_key", "embedding", "embeddings", "lora"), ""
)

ROUTE = "/v1/embeddings"
LLAMA_ROWS = 8192  # maximum number of tokens of a text for llama.cpp
LOOK_S = 0.5  # seconds between checks whether a process of the engine is stopped
# Seconds for the first answer of a server that this service did not start.
PROBE_S = 60.0
PAUSES_S = 0.1, 0.2, 0.4, 0.8, 1.6, 3.2  # seconds between requests to a busy server
BUSY_SHARE = 0.8  # share of ``hung_s`` for which a request waits for a busy server
# Seconds for which a request waits while the engine does not answer. Meanwhile, the
# thread that watches the engine should have ended this replica.
LOST_S = 30.0


def model(
    folder: Path,
    engine: str,
    args: Mapping[str, Any],
    load: Callable[[StageContext], EngineEncoder],
) -> Model:
    """Return the model in a folder with one stage, which an engine's server computes.

    Inputs are ``input_ids`` and ``attention_mask``, [rows, length], int64; the output
    is ``embedding``, [rows, hidden], float32, as the engine pools it.
    """
    config = read_json(folder / "config.json")
    longest = max_length_of(folder, config)
    names = {name.replace("-", "_"): value for name, value in args.items()}
    limits = ["max_model_len"]
    if engine == LLAMA_CPP:
        longest, limits = min(longest, LLAMA_ROWS), ["batch_size", "ubatch_size"]
    for name in limits:
        if type(given := names.get(name)) is int:
            longest = min(longest, given)
    hidden = number_of(config, HIDDEN, folder)
    vocabulary = int(config.get("vocab_size", 2**31))
    padding = {"input_ids": 0.0, "attention_mask": 0.0}
    return Model(
        stages=[Stage(load=lambda c: load(c).started(), name=engine, ragged=padding)],
        inputs=[TensorSpec(name, "INT64", (-1, -1)) for name in padding],
        outputs=[TensorSpec("embedding", "FP32", (-1, hidden))],
        example=partial(example, vocabulary, longest),
        check=partial(_check, vocabulary, longest),
        text=partial(Tokenizer, folder, longest),
    )


def _check(vocabulary: int, longest: int, tensors: Tensors) -> None:
    check_ids(vocabulary, longest, tensors)
    if not (tensors["attention_mask"] != 0).any(1).all():
        raise InvalidRequestError(
            "a row of attention_mask has no token; leave that row out"
        )


class _Item(msgspec.Struct):
    index: int
    embedding: str


class _Embeddings(Answer):
    data: list[_Item] = msgspec.field(default_factory=list)


_EMBEDDINGS = msgspec.json.Decoder(_Embeddings)


class EngineEncoder:
    """The function of an embedding stage, which calls the engine's server."""

    # Tells the executor that inputs and outputs stay on the host; only the server uses
    # the device.
    is_on_host = True

    def __init__(self, engine: str, settings: EngineSettings) -> None:
        self._engine, self._settings = engine, settings
        self._choice: ServerChoice | None = None
        if engine == OPENAI:
            self._choice = ServerChoice(settings, self._check)
        else:
            refuse_reserved(settings.args, RESERVED)
            _command_of(engine, settings, 0)  # raises if the arguments are invalid
        self._loop: asyncio.Runner | None = None
        self._server: EngineServer | None = None
        self._model = settings.path  # name of the model at the server
        folder = Path(settings.path).expanduser()
        self._hidden = number_of(read_json(folder / "config.json"), HIDDEN, folder)

    def started(self) -> EngineEncoder:
        """Start the server, or choose one; wait until it answers."""
        self._loop = asyncio.Runner()  # event loop of this replica's compute thread
        try:
            self._server = self._loop.run(self._found())
        except BaseException:
            self._loop.close()
            raise
        lost = partial(_lost, self._server)
        if self._choice is not None:
            # The thread that watches the server needs a client of its own.
            other = self._choice.client_of(self._server.url)
            lost = partial(_lost_elsewhere, self._choice, other)
        watch = threading.Thread(
            target=self._watch, args=[lost], name="engine watch", daemon=True
        )
        watch.start()
        return self

    async def _found(self) -> EngineServer:
        if self._choice is None:
            return await self._start()
        return await self._choice.connect(self._use)

    async def _use(self, server: EngineServer) -> None:
        assert self._choice is not None
        await self._check(server)
        self._model = await self._choice.model_at(server)

    async def _start(self) -> EngineServer:
        server = EngineServer(self._engine, silence_s=2 * self._settings.hung_s)
        command = _command_of(self._engine, self._settings, server.port)
        await server.start(command, self._settings, vllm.OFFLINE)
        return server

    async def _check(self, server: EngineServer) -> None:
        """Raise EngineLostError if a server returns no embeddings."""
        assert self._choice is not None
        model = await self._choice.model_at(server)
        try:
            async with asyncio.timeout(PROBE_S):
                data = await server.post(ROUTE, {**self._body([[0]]), "model": model})
            self._checked(items_of(data, 1))
        except (
            RunFailedError,
            InvalidRequestError,
            TimeoutError,
            ValueError,
            RuntimeError,
        ) as error:
            raise EngineLostError(
                f"{server.url} cannot embed token ids, which the gateway sends: {error}"
            ) from error

    def _watch(self, lost: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Exit once the server is lost, or one of its processes has been stopped."""
        assert self._server is not None
        try:
            why = asyncio.run(lost())
        except Exception as error:  # for instance, the process has too many open files
            why = f"it cannot be watched: {type(error).__name__}: {error}"
        logger.error("the engine is lost: %s; this replica exits", why)
        self._server.kill()
        os._exit(EXIT_LOST)

    def _body(self, inputs: list[list[int]]) -> dict[str, Any]:
        return {"model": self._model, "input": inputs, "encoding_format": "base64"}

    def __call__(self, tensors: Tensors) -> Tensors:
        """Embed rows; raises ModelFailedError if the engine fails."""
        assert self._loop is not None
        rows = zip(tensors["input_ids"], tensors["attention_mask"] != 0, strict=True)
        inputs: list[list[int]] = [ids[is_token].tolist() for ids, is_token in rows]
        try:
            found = self._loop.run(self._answer(self._body(inputs)))
            return {"embedding": self._checked(found)}
        except (RunFailedError, ValueError, RuntimeError) as error:
            raise ModelFailedError(f"{self._engine} failed: {error}") from error

    def _checked(self, found: Sequence[_Item]) -> Tensor:
        """Return embeddings, [rows, hidden]; raise RunFailedError if one is invalid."""
        embedding = torch.stack([_vector(one.embedding) for one in found])
        if embedding.shape[1] != self._hidden or not embedding.isfinite().all():
            raise RunFailedError(
                f"it returned embeddings of {embedding.shape[1]} numbers; an embedding "
                f"must have {self._hidden} finite numbers"
            )
        return embedding

    async def _answer(self, body: Mapping[str, Any]) -> list[_Item]:
        assert self._server is not None
        try:
            data = await self._server.post(ROUTE, body)
        except RunFailedError:
            await self._wait_lost()
            # The server is not lost: it had closed the idle connection, or was busy.
            try:
                data = await self._later(body)
            except RunFailedError:
                await self._wait_lost()
                raise
        return items_of(data, len(body["input"]))

    async def _wait_lost(self) -> None:
        """Wait until the server answers, or until this replica has had time to exit."""
        assert self._server is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOST_S):
                while True:
                    if await self._server.answers():
                        return
                    await asyncio.sleep(LOOK_S)

    async def _later(self, body: Mapping[str, Any]) -> bytes:
        """Repeat a request, with pauses while the server is busy.

        A pause is longer if the server asks for that (Retry-After).
        """
        assert self._server is not None
        # All pauses together must be shorter than ``hung_s``, after which this replica
        # would count as hung.
        left_s = BUSY_SHARE * self._settings.hung_s
        for pause_s in PAUSES_S:
            try:
                return await self._server.post(ROUTE, body)
            except BusyError:
                wait_s = min(left_s, max(pause_s, self._server.busy_s))
                left_s -= wait_s
                await asyncio.sleep(wait_s)
        return await self._server.post(ROUTE, body)


def items_of(data: bytes, count: int) -> list[_Item]:
    """Return ``count`` embeddings in input order; raises RunFailedError otherwise."""
    found = sorted(answer_of(_EMBEDDINGS, data).data, key=lambda one: one.index)
    if [one.index for one in found] != [*range(count)]:
        raise RunFailedError("it did not return one embedding for each input")
    return found


async def _lost(server: EngineServer) -> str:
    """Wait until the server has exited or is stopped; return the reason."""
    lost = asyncio.ensure_future(server.wait_lost())
    while not (await asyncio.wait([lost], timeout=LOOK_S))[0]:
        if (stopped_s := server.stopped_s()) > SILENT_S:
            return f"its processes have been stopped for {stopped_s:.1f} s"
    return lost.result()


async def _lost_elsewhere(choice: ServerChoice, server: EngineServer) -> str:
    try:
        return await choice.wait_lost(server.wait_lost())
    finally:
        await server.close()


def _vector(text: str) -> Tensor:
    """Return an embedding, [hidden], float32, from little-endian base64."""
    data = bytearray(base64.b64decode(text, validate=True))
    return torch.frombuffer(data, dtype=torch.float32)


def _command_of(engine: str, settings: EngineSettings, port: int) -> list[str]:
    if engine == VLLM:
        # The prefix cache is off, because one tenant could find out the prompts of
        # another.
        own = {"runner": "pooling", "enable_prefix_caching": False}
        return vllm.server_command(settings, port, own)
    # llama.cpp computes a text in one piece, so it must fit into one physical batch.
    folder = Path(settings.path).expanduser()
    config = read_json(folder / "config.json")
    rows = min(LLAMA_ROWS, max_length_of(folder, config))
    own = {"embeddings": True, "batch_size": rows, "ubatch_size": rows}
    return llama_cpp.server_command(settings, port, own)
