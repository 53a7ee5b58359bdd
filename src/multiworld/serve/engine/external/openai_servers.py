"""Servers with OpenAI's API that somebody else runs, as engines.

Each replica uses one of the given addresses. When the replica starts, it finds out
whether the server takes and returns token ids, as vLLM's completions and llama.cpp's
own route do, or text only.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec

from multiworld.errors import InvalidRequestError, ServeError
from multiworld.serve.engine.external import token_servers
from multiworld.serve.engine.external.address_choice import ServerChoice
from multiworld.serve.engine.external.engine_server import (
    NOT_JSON,
    EngineServer,
    RefusedError,
)
from multiworld.serve.engine.external.token_server_engine import TokenServerEngine
from multiworld.serve.engine.external.whole_engine import (
    EngineLostError,
    EngineSettings,
)
from multiworld.serve.text.tokenizer import Tokenizer

logger = logging.getLogger("multiworld.serve")

PROBE_S = 60.0  # seconds for a server to generate the token of a probe


class _Props(msgspec.Struct):
    total_slots: int = 0


class OpenAiEngine(TokenServerEngine):
    """The server that a replica uses for as long as the replica runs."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._choice = ServerChoice(settings, self._check)

    async def start(self) -> None:
        """Choose a server that answers, and find out what it can do."""
        self.phase = "connecting"
        await self._choice.connect(self._use)

    async def _use(self, server: EngineServer) -> None:
        self._server = server
        model = await self._choice.model_at(server)
        is_shared = self._choice.is_shared
        self._dialect = await self._dialect_of(server, model, is_shared=is_shared)
        exact = "" if self._settings.exact else " (exact: false)"
        logger.info("using %s: %s%s", server.url, self.title, exact)
        await self.warm_up()

    async def _check(self, server: EngineServer) -> None:
        """Raise EngineLostError if a server that no replica uses yet cannot compute."""
        other = TokenServerEngine(self._settings)
        model = await self._choice.model_at(server)
        other._server = server
        other._dialect = await self._dialect_of(server, model, is_shared=False)
        await other.warm_up()

    async def wait_lost(self) -> str:
        """Wait until the server is lost, or an unused server can replace it.

        Return the reason.
        """
        return await self._choice.wait_lost(super().wait_lost())

    async def _dialect_of(
        self, server: EngineServer, model: str, *, is_shared: bool
    ) -> token_servers.Dialect:
        """Return a server's dialect; raise EngineLostError if it cannot be used."""
        adapters = self._settings.adapters
        if await self._has_token_ids(server, model):
            is_exact = self._settings.exact
            piece = token_servers.PIECE if is_exact else None
            return token_servers.Completions(model, adapters, piece=piece)
        if await self._is_llama_cpp(server):
            await self._check_slots(server, is_shared=is_shared)
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
        end = next(iter(self._settings.end_tokens), 0)
        return token_servers.CompletionsOfText(model, tokenizer, end, adapters)

    async def _check_slots(self, server: EngineServer, *, is_shared: bool) -> None:
        """Raise EngineLostError unless each sequence can have its own KV slot."""
        try:
            answer = await server.get("/props")
            count = msgspec.json.decode(answer, type=_Props).total_slots
        except NOT_JSON:
            count = 0
        if count <= self._settings.max_num_seqs:
            raise EngineLostError(
                f"{server.url} has {count} slots; set generation: max_num_seqs to "
                f"{max(1, count - 1)} or less, or start it with --parallel "
                f"{self._settings.max_num_seqs + 1}"
            )
        if is_shared:
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
            choices = token_servers.CHUNK.decode(data).choices
        except (InvalidRequestError, RefusedError, *NOT_JSON):
            return False
        except (ServeError, TimeoutError) as error:  # a busy server may answer later
            raise EngineLostError(
                f"cannot tell whether {server.url} returns token ids: {error}"
            ) from error
        return len(choices) == 1 and len(choices[0].token_ids or ()) == 1

    async def _is_llama_cpp(self, server: EngineServer) -> bool:
        body = {"prompt": [0], "n_predict": 1, "return_tokens": True}
        try:
            async with asyncio.timeout(PROBE_S):
                answer = msgspec.json.decode(await server.post("/completion", body))
        except (ServeError, TimeoutError, *NOT_JSON):
            return False
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        return isinstance(tokens, list) and len(tokens) == 1

    async def close(self) -> None:
        await super().close()
        self._choice.release()

    def kill(self) -> None:
        super().kill()
        self._choice.release()
