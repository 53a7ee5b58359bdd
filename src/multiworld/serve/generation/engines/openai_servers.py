"""Servers with OpenAI's API that somebody else runs, as engines.

Each replica uses one of the given addresses. What a server can do is found out when the
replica starts: whether it takes and returns token ids, as vLLM's completions and
llama.cpp's own route do, or text only.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from multiworld.errors import ServeError, SpecError
from multiworld.serve.generation.engines.engine_server import EngineServer
from multiworld.serve.generation.engines.token_server_engine import TokenServerEngine
from multiworld.serve.generation.engines.token_servers import (
    Completions,
    CompletionsOfText,
    Dialect,
    LlamaCpp,
    check_text,
)
from multiworld.serve.generation.engines.whole_engine import (
    EngineLostError,
    EngineSettings,
)
from multiworld.serve.generation.tokenizer import Tokenizer

logger = logging.getLogger("multiworld.serve")

MAX_CLAIMS = 64
"""Maximum number of replicas on this host that use one server."""


class _Arguments(msgspec.Struct, forbid_unknown_fields=True):
    """``engine_args``.

    Attributes:
        urls: Addresses, such as ``http://10.0.0.5:8000``.
        model: Name of the model at the servers; empty: the only one they have.
        api_key_env: Environment variable with the API key; empty: none is sent.
        health: Route that answers with 200 while a server serves.
    """

    urls: list[str]
    model: str = ""
    api_key_env: str = ""
    health: str = "/health"


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


_ANSWER = msgspec.json.Decoder(_Answer)
_MODELS = msgspec.json.Decoder(_Models)


class OpenAiEngine(TokenServerEngine):
    """One of the servers, of this replica as long as it runs."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings.max_num_seqs)
        self._settings = settings
        self._claim: socket.socket | None = None
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
            EngineServer("the server", url.rstrip("/"), key, self._args.health)
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
        """Return whether this replica is the ``number``-th to use a server.

        A bound name without a file belongs to this process, however it ends.
        """
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0multiworld {url[:80]} {number}")
        except OSError:
            claim.close()
            return False
        self._claim = claim
        return True

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

    async def _dialect_of(self, server: EngineServer, model: str) -> Dialect:
        """Return the dialect of a server.

        Raises:
            EngineLostError: It takes or returns no token ids, and the model is exact.
        """
        if await self._has_token_ids(server, model):
            is_exact = self._settings.exact
            return Completions(model) if is_exact else Completions(model, piece=None)
        if await self._is_llama_cpp(server):
            return LlamaCpp()
        if self._settings.exact:
            raise EngineLostError(
                f"{server.url} does not return token ids, so a stream could not "
                "continue exactly; use a server that does (vLLM, llama.cpp), or set "
                "`exact: false`"
            )
        tokenizer = Tokenizer(Path(self._settings.path))
        check_text(tokenizer)
        return CompletionsOfText(model, tokenizer)

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
            data = await server.post("/v1/completions", body)
            choices: Sequence[_Choice] = _ANSWER.decode(data).choices
        except (ServeError, msgspec.DecodeError):
            return False
        return len(choices) == 1 and len(choices[0].token_ids or ()) == 1

    async def _is_llama_cpp(self, server: EngineServer) -> bool:
        body = {"prompt": [0], "n_predict": 1, "return_tokens": True}
        try:
            answer = msgspec.json.decode(await server.post("/completion", body))
        except (ServeError, msgspec.DecodeError):
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


def _arguments(given: object) -> _Arguments:
    """Return the arguments.

    Raises:
        SpecError: They are not valid.
    """
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
