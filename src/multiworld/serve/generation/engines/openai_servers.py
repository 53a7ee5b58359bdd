"""Servers with OpenAI's API that somebody else runs, as engines.

Each replica uses one of the given addresses. What a server can do is found out when the
replica starts: whether it takes and returns token ids, as vLLM's completions and
llama.cpp's own route do, or text only.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from multiworld.errors import ServeError, SpecError
from multiworld.serve.generation.engines import token_servers
from multiworld.serve.generation.engines.engine_server import EngineServer
from multiworld.serve.generation.engines.token_server_engine import TokenServerEngine
from multiworld.serve.generation.engines.whole_engine import (
    EngineLostError,
    EngineSettings,
)
from multiworld.serve.generation.tokenizer import Tokenizer

logger = logging.getLogger("multiworld.serve")

PROBE_S = 60.0  # for a server to generate its first token for us
LOOK_S = 5.0  # between looks for a server without a replica
MAX_CLAIMS = 64  # replicas on this host that use one server


class _Arguments(msgspec.Struct, forbid_unknown_fields=True):
    """``engine_args``."""

    urls: list[str]
    model: str = ""  # at the servers; empty: the only one they have
    api_key_env: str = ""  # environment variable with the API key
    health: str = "/health"  # answers with 200 while a server serves


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Props(msgspec.Struct):
    total_slots: int = 0


_ANSWER = msgspec.json.Decoder(_Answer)
_PROPS = msgspec.json.Decoder(_Props)
_MODELS = msgspec.json.Decoder(_Models)


class OpenAiEngine(TokenServerEngine):
    """One of the servers, of this replica as long as it runs."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._claim: socket.socket | None = None
        self._number = 0
        self._args = _arguments(settings.args)

    async def start(self) -> None:
        """Choose a server that answers, and find out what it can do."""
        self.phase = "connecting"
        try:
            self._server = await self._choose()
            model = self._args.model or await self._only_model(self._server)
            self._dialect = await self._dialect_of(self._server, model)
        except BaseException:
            await self.close()
            raise
        exact = "" if self._settings.exact else " (exact: false)"
        logger.info("using %s: %s%s", self._server.url, self.title, exact)
        await self.warm_up()

    async def _choose(self) -> EngineServer:
        """Return the server that answers and has the fewest replicas on this host."""
        key = os.environ.get(self._args.api_key_env, "")
        servers = [
            EngineServer(
                "the server",
                url.rstrip("/"),
                key,
                self._args.health,
                silence_s=2 * self._settings.hung_s,
            )
            for url in self._args.urls
        ]
        working = [server for server in servers if await server.answers()]
        for server in servers:
            if server not in working:
                await server.close()
        for number in range(MAX_CLAIMS):
            for server in working:
                if self._claim is None and self._claimed(server.url, number):
                    chosen = server
        for server in working:
            if self._claim is None or server is not chosen:
                await server.close()
        if self._claim is None:
            raise EngineLostError(
                f"none of {', '.join(self._args.urls)} answers {self._args.health}"
            )
        return chosen

    def _claimed(self, url: str, number: int) -> bool:
        """Return whether this replica is the ``number``-th to use a server."""
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(_claim_of(url, number))
        except OSError:
            claim.close()
            return False
        self._claim, self._number = claim, number
        return True

    async def wait_lost(self) -> str:
        """Wait until the server is lost, or another one has no replica; say which."""
        lost = asyncio.ensure_future(super().wait_lost())
        try:
            while not (await asyncio.wait([lost], timeout=LOOK_S))[0]:
                if self._number and (url := await self._deserted()):
                    return f"{url} serves again and has no replica"
            return lost.result()
        finally:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    async def _deserted(self) -> str:
        """Return a server that answers and that no replica uses; empty: none."""
        for url in self._args.urls:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
                try:
                    claim.bind(_claim_of(url.rstrip("/"), 0))
                except OSError:
                    continue
            server = EngineServer("the server", url.rstrip("/"), "", self._args.health)
            try:
                if await server.answers():
                    return url
            finally:
                await server.close()
        return ""

    async def _only_model(self, server: EngineServer) -> str:
        try:
            answer = _MODELS.decode(await server.get("/v1/models"))
        except msgspec.DecodeError:
            answer = _Models()
        names = [one.id for one in answer.data]
        if len(names) != 1:
            raise EngineLostError(
                f"{server.url} serves {', '.join(names[:8]) or 'no model'}; name one "
                "as engine_args: model"
            )
        return names[0]

    async def _dialect_of(
        self, server: EngineServer, model: str
    ) -> token_servers.Dialect:
        """Return the dialect of a server that can be used for the model."""
        adapters = self._settings.adapters
        if await self._has_token_ids(server, model):
            is_exact = self._settings.exact
            piece = token_servers.PIECE if is_exact else None
            return token_servers.Completions(model, adapters, piece=piece)
        if await self._is_llama_cpp(server):
            await self._check_slots(server)
            if adapters:
                raise EngineLostError(
                    f"{server.url} is a llama.cpp server, whose adapters have no "
                    "names; remove `adapters`, or use engine: llama.cpp"
                )
            return token_servers.LlamaCpp()
        if self._settings.exact:
            raise EngineLostError(
                f"{server.url} does not return token ids, so a stream could not "
                "continue exactly; use a server that does (vLLM, llama.cpp), or set "
                "`exact: false`"
            )
        tokenizer = Tokenizer(Path(self._settings.path))
        token_servers.check_text(tokenizer)
        ends = self._settings.end_tokens
        end = ends[0] if ends else 0
        return token_servers.CompletionsOfText(model, tokenizer, end, adapters)

    async def _check_slots(self, server: EngineServer) -> None:
        """Check that each sequence has a slot of its own, with its keys and values."""
        try:
            count = _PROPS.decode(await server.get("/props")).total_slots
        except msgspec.DecodeError:
            count = 0
        if count <= self._settings.max_num_seqs:
            raise EngineLostError(
                f"{server.url} has {count} slots; set generation: max_num_seqs to "
                f"{max(1, count - 1)} or less, or start it with --parallel "
                f"{self._settings.max_num_seqs + 1}"
            )
        if self._number:
            raise EngineLostError(f"another replica uses the slots of {server.url}")

    async def _has_token_ids(self, server: EngineServer, model: str) -> bool:
        body: dict[str, Any] = {
            "model": model,
            "prompt": [0],
            "max_tokens": 1,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        try:
            async with asyncio.timeout(PROBE_S):
                data = await server.post("/v1/completions", body)
            choices: Sequence[_Choice] = _ANSWER.decode(data).choices
        except (ServeError, msgspec.DecodeError, TimeoutError):
            return False
        return len(choices) == 1 and len(choices[0].token_ids or ()) == 1

    async def _is_llama_cpp(self, server: EngineServer) -> bool:
        body = {"prompt": [0], "n_predict": 1, "return_tokens": True}
        try:
            async with asyncio.timeout(PROBE_S):
                answer = msgspec.json.decode(await server.post("/completion", body))
        except (ServeError, msgspec.DecodeError, TimeoutError):
            return False
        return isinstance(answer, dict) and len(answer.get("tokens") or ()) == 1

    async def close(self) -> None:
        await super().close()
        self._release()

    def kill(self) -> None:
        super().kill()
        self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def _claim_of(url: str, number: int) -> str:
    """Return the name that the ``number``-th replica of a server binds."""
    digest = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
    return f"\0multiworld engine {digest} {number}"


def _arguments(given: object) -> _Arguments:
    try:
        found = msgspec.convert(dict(given), _Arguments)  # type: ignore[call-overload]
    except msgspec.ValidationError as error:
        raise SpecError(f"engine_args: {error}") from None
    for url in found.urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise SpecError(f"engine_args: urls: {url!r} is no http or https address")
    if not found.urls:
        raise SpecError("engine_args: urls: give at least one address")
    return found
