"""An engine's HTTP server: a child of this replica, or one that somebody else runs."""

from __future__ import annotations

import asyncio
import logging
import time
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import aiohttp
import msgspec

from multiworld.serve.deadlines import SILENT_S
from multiworld.serve.engine.external.engine_args import gpu_environment
from multiworld.serve.engine.external.engine_process import EngineProcess, HeldPort
from multiworld.serve.engine.external.host_locks import all_locked
from multiworld.serve.engine.external.whole_engine import (
    BusyError,
    EngineLostError,
    EngineSettings,
    RequestRefusedError,
    RunFailedError,
)
from multiworld.serve.machines.inventory import visible_gpus
from multiworld.serve.wire.origin import ORIGIN

logger = logging.getLogger("multiworld.serve")

HEALTH_S = 0.25  # seconds between health checks
ANSWER_S = 5.0  # seconds for a server to accept a connection or answer a health check
# Number of failed health checks in a row after which a server that this service did not
# start counts as lost.
MAX_FAILED_CHECKS = 4
# Maximum bytes of a line of a stream; vLLM's first line repeats the prompt.
MAX_LINE = 2**22
MAX_ANSWER = 2**24  # maximum bytes of an answer that is not a stream
MAX_ERROR = 500  # maximum characters of a server's error that are reported


class EngineServer:
    """An engine's server, which a replica starts, watches and calls.

    If ``url`` is empty, ``start`` starts the server. A request that is not a stream
    fails after ``silence_s`` seconds without any byte. Cancelling a request closes its
    connection, and the server then aborts it.
    """

    def __init__(
        self,
        title: str,
        url: str = "",
        api_key: str = "",
        health: str = "/health",
        silence_s: float | None = None,
        max_line: int = MAX_LINE,
    ) -> None:
        self.title, self.url, self._health = title, url, health
        self._silence_s, self._max_line = silence_s, max_line
        # Time of the event loop until which the server asked to wait (Retry-After).
        self._busy_until = 0.0
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._process: EngineProcess | None = None
        self._http: aiohttp.ClientSession | None = None
        self._port = None if url else HeldPort()
        if self._port is not None:
            self.url = f"http://127.0.0.1:{self._port.number}"

    @property
    def port(self) -> int:
        """Port on this host if the server is a child, otherwise 0."""
        return 0 if self._port is None else self._port.number

    # Lifecycle.

    async def start(
        self,
        command: Sequence[str],
        settings: EngineSettings,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the server as a child, and wait until it answers health checks."""
        env = {**(env or {}), **gpu_environment(settings, visible_gpus())}
        # Engines that share a GPU start one after the other: a starting vLLM would
        # count the memory that another engine allocates as its own.
        is_shared = settings.gpu_memory_share is not None
        gpus = env["CUDA_VISIBLE_DEVICES"].split(",") if is_shared else ()
        try:
            async with all_locked("gpus", gpus):
                await self._start(command, env, int(settings.cpus or 0))
        except BaseException:
            await self.close()
            raise

    async def _start(
        self, command: Sequence[str], env: Mapping[str, str], cores: int
    ) -> None:
        logger.info("starting %s", " ".join(command))
        self._process = EngineProcess(command, env, cores)
        exited = asyncio.ensure_future(self._process.wait())
        try:
            while not exited.done() and not await self.answers():
                await asyncio.wait([exited], timeout=HEALTH_S)
                if self._process.stopped_s() > SILENT_S:
                    self._process.kill()  # a stopped process cannot exit by itself
                    raise EngineLostError(f"{self.title} was stopped while it started")
            if exited.done():
                raise EngineLostError(
                    f"{self.title} exited with code {exited.result()} before it "
                    "served; its output is in the log of this replica"
                )
        finally:
            exited.cancel()

    async def answers(self) -> bool:
        return await self._get(self._health) is not None

    async def wait_lost(self) -> str:
        if self._process is not None:
            return f"{self.title} exited with code {await self._process.wait()}"
        failures = 0
        while failures < MAX_FAILED_CHECKS:
            await asyncio.sleep(HEALTH_S)
            failures = 0 if await self.answers() else failures + 1
        return f"{self.title} at {self.url} does not answer {self._health}"

    def stopped_s(self) -> float:
        return 0.0 if self._process is None else self._process.stopped_s()

    async def close(self) -> None:
        """Close the connections, and let a child exit."""
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            await self._process.close()
        self._release()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._release()

    def _release(self) -> None:
        if self._port is not None:
            self._port.release()

    # Requests.

    async def get(self, path: str) -> bytes:
        """Return the body of a route's answer; empty unless its status is 200."""
        return await self._get(path) or b""

    async def _get(self, path: str) -> bytes | None:
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with self._client().get(
                self.url + path,
                headers=self._headers,
                timeout=limit,
                allow_redirects=False,
            ) as answer:
                return await _body(answer) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, RunFailedError):
            return None
        except ValueError as error:  # a key or an address that cannot be sent
            logger.warning("%s cannot be asked: %s", self.url, error)
            return None

    @property
    def busy_s(self) -> float:
        """Seconds until the server's Retry-After is over."""
        return max(0.0, self._busy_until - asyncio.get_running_loop().time())

    def _check_wait(self) -> None:
        """Raise BusyError while the server's Retry-After lasts."""
        if self.busy_s > 0.0:
            raise BusyError(f"{self.title} asked to retry in {self.busy_s:.1f} s")

    def _refusal(self, answer: aiohttp.ClientResponse, body: bytes) -> Exception:
        if answer.status in BUSY:
            wait_s = wait_of(answer.headers.get("Retry-After", ""), time.time())
            now = asyncio.get_running_loop().time()
            self._busy_until = max(self._busy_until, now + wait_s)
        return refusal_of(answer.status, body)

    async def post(
        self, path: str, body: Mapping[str, Any], *, is_timed: bool = True
    ) -> bytes:
        """Return an answer; unless ``is_timed``, silence of any length is allowed."""
        more = {} if is_timed else {"timeout": _timeout(None)}
        async with self._answered(path, body, **more) as answer:
            return await _body(answer)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
        """Yield the data of each server-sent event of an answer, up to its end."""
        # No timeout, because the replica's worker watches for silence.
        async with self._answered(path, body, timeout=_timeout(None)) as answer:
            is_first = True
            async for line in answer.content:
                if is_first:  # a byte order mark is ignored, as the standard says
                    line, is_first = line.removeprefix(BOM_UTF8), False
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                yield data

    @asynccontextmanager
    async def _answered(
        self, path: str, body: Mapping[str, Any], **more: Any
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request; raise RunFailedError if its answer is interrupted."""
        self._check_wait()
        try:
            async with self._client().post(
                self.url + path,
                data=msgspec.json.encode(body),
                headers=self._headers | ORIGIN.get().headers,
                allow_redirects=False,
                **more,
            ) as answer:
                if answer.status != 200:
                    raise self._refusal(answer, await _body(answer))
                yield answer
        except (
            aiohttp.ClientError,
            aiohttp.http.HttpProcessingError,  # raised e.g. if a line is too long
            TimeoutError,
            OSError,
            ValueError,
        ) as error:
            text = f"{type(error).__name__}: {error}"
            raise RunFailedError(
                f"the response of {self.title} was interrupted: {text}"
            ) from error

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=_timeout(self._silence_s),
                connector=aiohttp.TCPConnector(limit=0),
                read_bufsize=self._max_line // 2,  # a line may have twice this size
            )
        return self._http


def _timeout(silence_s: float | None) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=silence_s)


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    found = bytearray()
    async for part in answer.content.iter_any():
        found += part
        if len(found) > MAX_ANSWER:
            raise RunFailedError(f"the engine's answer exceeds {MAX_ANSWER} bytes")
    return bytes(found)


class Answer(msgspec.Struct):
    """An answer of a server, or an event of a stream; ``error``: why it failed."""

    error: Any = None


A = TypeVar("A", bound=Answer)

# Errors for answers that are no JSON, or JSON of the wrong type.
NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def answer_of(decoder: msgspec.json.Decoder[A], data: bytes) -> A:
    """Return a decoded answer; raise ``RunFailedError`` if it reports an error."""
    try:
        found = decoder.decode(data)
    except NOT_JSON as error:
        raise RunFailedError(f"the engine sent an invalid response: {error}") from None
    if found.error is not None:
        raise RunFailedError(f"the engine failed: {str(found.error)[:MAX_ERROR]}")
    return found


class RefusedError(RunFailedError):
    """The server cannot answer such requests, as opposed to being busy."""


BUSY = 429, 503
MAX_WAIT_S = 60.0  # maximum seconds that a server may ask for with Retry-After
# Statuses after which another attempt may succeed; for instance, API keys may change.
LATER = 401, 403, 408


def wait_of(retry_after: str, now: float) -> float:
    """Convert a ``Retry-After``, in seconds or as a date, to seconds; 0 if invalid."""
    if retry_after.isdecimal() and retry_after.isascii():
        return min(MAX_WAIT_S, float(retry_after[:9]))
    try:
        at = parsedate_to_datetime(retry_after).timestamp()
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return min(MAX_WAIT_S, max(0.0, at - now))


def refusal_of(status: int, body: bytes) -> Exception:
    """Return the error for an HTTP status other than 200."""
    text = body.decode(errors="replace")[:MAX_ERROR]
    if 400 <= status < 500 and status not in (401, 403, 404, 408, 429):
        return RequestRefusedError(f"the engine refused the request: {text}")
    kind = RunFailedError if status in LATER else RefusedError
    kind = BusyError if status in BUSY else kind
    return kind(f"the engine answered {status}: {text}")
