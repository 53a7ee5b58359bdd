"""Choice of a replica's server among servers that somebody else runs."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

import msgspec

from multiworld.errors import SpecError
from multiworld.serve.engine.external.engine_server import (
    MAX_LINE,
    NOT_JSON,
    EngineServer,
)
from multiworld.serve.engine.external.whole_engine import (
    EngineLostError,
    EngineSettings,
)

logger = logging.getLogger("multiworld.serve")

# Seconds between checks whether a shared server can be exchanged for an unused one.
LOOK_S = 5.0
FAILED_S = 60.0  # seconds until a server that could not be used is tried again
# Bytes of a token id in a server-sent event, which may repeat the whole prompt.
TOKEN_BYTES = 16
MAX_CLAIMS = 64  # maximum number of replicas on this host that use one server


class ServerArguments(msgspec.Struct, forbid_unknown_fields=True):
    """``engine_args`` of ``engine: openai``."""

    urls: list[str]
    # Name of the model at the servers; empty: the only one that they serve.
    model: str = ""
    api_key_env: str = ""  # environment variable with the API key; empty: none is sent
    health: str = "/health"  # route that answers with status 200 while a server serves


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class ServerChoice:
    """The choice of a replica's server. Raises SpecError for invalid arguments.

    To claim a server, a replica binds a socket to a name without a file. The kernel
    releases the name when the replica's process ends, for whatever reason.
    """

    def __init__(
        self,
        settings: EngineSettings,
        # Raises EngineLostError for a server that answers but cannot be used.
        check: Callable[[EngineServer], Awaitable[object]],
    ) -> None:
        self.args, self._check = _arguments(settings.args), check
        self._silence_s = 2 * settings.hung_s
        self._longest = settings.longest
        # Replicas start with different servers, so that not all use the first one.
        number = settings.replica.rpartition("/")[2]
        first = int(number) % len(self.args.urls) if number.isdecimal() else 0
        self._urls = [*self.args.urls[first:], *self.args.urls[:first]]
        self._failed_at: dict[str, float] = {}
        self._url = ""  # address of the chosen server
        self._claim: socket.socket | None = None
        # Number of this replica's claim among the claims on this host to that server.
        self._number = 0

    @property
    def is_shared(self) -> bool:
        return self._number > 0

    def client_of(self, url: str) -> EngineServer:
        """Return a client of a server, for one event loop."""
        key = os.environ.get(self.args.api_key_env, "").strip()
        return EngineServer(
            *("the server", url.rstrip("/"), key, self.args.health),
            silence_s=self._silence_s,
            max_line=max(MAX_LINE, TOKEN_BYTES * self._longest),
        )

    async def connect(
        self, use: Callable[[EngineServer], Awaitable[None]]
    ) -> EngineServer:
        """Return the first server for which ``use`` raises no EngineLostError."""
        failed: dict[str, str] = {}
        while True:
            server = await self._choose(failed)
            try:
                await use(server)
                return server
            except BaseException as error:
                await server.close()
                self.release()
                if not isinstance(error, EngineLostError):
                    raise
                logger.warning("%s cannot be used: %s", server.url, error)
                failed[server.url] = str(error)

    async def _choose(self, failed: Mapping[str, str]) -> EngineServer:
        """Return the server that answers and has the fewest replicas on this host."""
        left = [url for url in self._urls if url.rstrip("/") not in failed]
        servers = [self.client_of(url) for url in left]
        chosen = None
        try:
            working = [server for server in servers if await server.answers()]
            for number in range(MAX_CLAIMS):
                for server in working:
                    if chosen is None and self._claimed(server.url, number):
                        chosen = server
        finally:
            for server in servers:
                if server is not chosen:
                    await server.close()
        if chosen is None and failed:
            raise EngineLostError("; ".join(failed.values()))
        if chosen is None:
            raise EngineLostError(
                f"none of {', '.join(self.args.urls)} answers {self.args.health}; "
                "start one, or correct urls and health in engine_args"
            )
        return chosen

    def _claimed(self, url: str, number: int) -> bool:
        """Claim a server as its ``number``-th user; return whether that succeeded."""
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
        """Return the name of a server's model; EngineLostError if none is suitable."""
        try:
            given = await server.get("/v1/models")
            answer = msgspec.json.decode(given, type=_Models)
        except NOT_JSON:
            answer = _Models()
        names = [one.id for one in answer.data]
        name = self.args.model or (names[0] if len(names) == 1 else "")
        limits = [one.max_model_len for one in answer.data if one.id == name]
        if limits and limits[0] is not None and limits[0] < self._longest:
            raise EngineLostError(
                f"{server.url} accepts at most {limits[0]} tokens, but this model "
                f"needs up to {self._longest}; set generation: max_model_len: "
                f"{limits[0]}"
            )
        if name:
            return name
        raise EngineLostError(
            f"{server.url} serves {', '.join(names[:8]) or 'no model'}; name one as "
            "engine_args: model"
        )

    async def wait_lost(self, server_lost: Awaitable[str]) -> str:
        """Wait until the server is lost, or an unused server can replace it.

        Return the reason.
        """
        lost = asyncio.ensure_future(server_lost)
        tasks = [lost]
        try:
            while not (await asyncio.wait([lost], timeout=LOOK_S))[0]:
                if not self.is_shared:
                    continue
                looking = asyncio.ensure_future(self._unused_server())
                tasks.append(looking)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if lost.done():
                    break
                if url := looking.result():
                    return f"{url} serves again and has no replica"
                tasks.remove(looking)
            return lost.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _unused_server(self) -> str:
        """Return a server that answers and that no replica uses; empty: none."""
        # If no other replica uses this replica's server any more, keep it.
        if self._claimed(self._url, 0):
            return ""
        for url in self._urls:
            failed_at = self._failed_at.get(url, -math.inf)
            has_failed = asyncio.get_running_loop().time() - failed_at < FAILED_S
            if url.rstrip("/") == self._url or has_failed:
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
                try:
                    claim.bind(_claim_of(url.rstrip("/"), 0))
                except OSError:
                    continue
            server = self.client_of(url)
            try:
                if await server.answers():
                    await self._check(server)
                    return url
            except Exception as error:  # whatever it answers, this server serves on
                logger.info("%s is not used yet: %s", url, error)
                self._failed_at[url] = asyncio.get_running_loop().time()
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
            raise SpecError(f"engine_args: urls: {url!r} is not an http(s) URL")
    if not found.urls:
        raise SpecError("engine_args: urls: give at least one address")
    return found
