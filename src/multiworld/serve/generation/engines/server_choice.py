"""Servers that somebody else runs, of which each replica uses one."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import Awaitable
from urllib.parse import urlsplit

import msgspec

from multiworld.errors import SpecError
from multiworld.serve.generation.engines.engine_server import EngineServer
from multiworld.serve.generation.engines.whole_engine import (
    EngineLostError,
    EngineSettings,
)

LOOK_S = 5.0  # between looks for a server without a replica
MAX_CLAIMS = 64  # replicas on this host that use one server, at most


class ServerArguments(msgspec.Struct, forbid_unknown_fields=True):
    """``engine_args``."""

    urls: list[str]
    model: str = ""  # its name at the servers; empty: the only one they have
    api_key_env: str = ""  # environment variable with the API key; empty: none is sent
    health: str = "/health"  # answers with 200 while a server serves


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class ServerChoice:
    """The server of one replica. Raises ``SpecError`` if the arguments are not valid.

    A replica claims a server by a bound name without a file, which belongs to its
    process, however that ends.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.args = _arguments(settings.args)
        self._silence_s = 2 * settings.hung_s
        self._url = ""  # of its server
        self._claim: socket.socket | None = None
        self._number = 0  # among the replicas on this host that use the server

    @property
    def is_shared(self) -> bool:
        return self._number > 0

    def client_of(self, url: str) -> EngineServer:
        """Return a client; one serves one event loop."""
        key = os.environ.get(self.args.api_key_env, "")
        return EngineServer(
            *("the server", url.rstrip("/"), key, self.args.health),
            silence_s=self._silence_s,
        )

    async def choose(self) -> EngineServer:
        """Return the server that answers and has the fewest replicas on this host.

        Raises EngineLostError if none answers.
        """
        servers = [self.client_of(url) for url in self.args.urls]
        working = [server for server in servers if await server.answers()]
        chosen = None
        for number in range(MAX_CLAIMS):
            for server in working:
                if chosen is None and self._claimed(server.url, number):
                    chosen = server
        for server in servers:
            if server is not chosen:
                await server.close()
        if chosen is None:
            raise EngineLostError(
                f"none of {', '.join(self.args.urls)} answers {self.args.health}; "
                "start one, or correct urls and health in engine_args"
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
        self.release()
        self._url, self._claim, self._number = url, claim, number
        return True

    async def model_at(self, server: EngineServer) -> str:
        """Return the name of the model at a server.

        Raises EngineLostError if it has several, and the arguments name none.
        """
        if self.args.model:
            return self.args.model
        try:
            given = await server.get("/v1/models")
            answer = msgspec.json.decode(given, type=_Models)
        except msgspec.DecodeError:
            answer = _Models()
        names = [one.id for one in answer.data]
        if len(names) != 1:
            raise EngineLostError(
                f"{server.url} serves {', '.join(names[:8]) or 'no model'}; name one "
                "as engine_args: model"
            )
        return names[0]

    async def wait_lost(self, server_lost: Awaitable[str]) -> str:
        """Wait until the server is lost, or another one has no replica; say which."""
        lost = asyncio.ensure_future(server_lost)
        try:
            while not (await asyncio.wait([lost], timeout=LOOK_S))[0]:
                if self.is_shared and (url := await self._deserted()):
                    return f"{url} serves again and has no replica"
            return lost.result()
        finally:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)

    async def _deserted(self) -> str:
        """Return a server that answers and that no replica uses; empty: none.

        If the others have left its own server, the replica has that for itself.
        """
        if self._claimed(self._url, 0):
            return ""
        for url in self.args.urls:
            if url.rstrip("/") == self._url:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
                try:
                    claim.bind(_claim_of(url.rstrip("/"), 0))
                except OSError:
                    continue
            server = self.client_of(url)
            try:
                if await server.answers():
                    return url
            finally:
                await server.close()
        return ""

    def release(self) -> None:
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def _claim_of(url: str, number: int) -> str:
    """Return the name that the ``number``-th replica of a server binds."""
    digest = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
    return f"\0multiworld engine {digest} {number}"


def _arguments(given: object) -> ServerArguments:
    try:
        found = msgspec.convert(dict(given), ServerArguments)  # type: ignore[call-overload]
    except msgspec.ValidationError as error:
        raise SpecError(f"engine_args: {error}") from None
    for url in found.urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise SpecError(f"engine_args: urls: {url!r} is no http or https address")
    if not found.urls:
        raise SpecError("engine_args: urls: give at least one address")
    return found
