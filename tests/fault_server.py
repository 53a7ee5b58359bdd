"""Server with OpenAI's completions that plays a fault on command and logs requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
import subprocess
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import msgspec
from aiohttp import web
from tokenizers import Tokenizer

from tests.fake_token_server import Sampler
from tests.fake_vllm import VOCABULARY
from tests.ports import free_port

ROOT = Path(__file__).parents[1]

STEP_S = 0.005
"""Seconds for a token."""
SILENT_S = 120.0
"""Seconds without a byte, where a fault is silence."""
RETRY_AFTER_S = 3
"""Seconds in the header ``Retry-After``."""
MALFORMED_AT, STALL_AT, FILTER_AT, CUT_AT = 10, 20, 30, 40
"""Output tokens of a sequence before a fault in the middle of its stream."""
START_S = 40.0
"""Seconds that the server may take to start; a hang bound."""

PROBE_TOKENS = 2
"""Maximum number of tokens that replicas and probes request.

Such requests are not logged, and have no fault unless the whole server is overloaded.
"""

PRINTABLE = range(1, 95)
"""Tokens of the tests' tokenizer that are one printable ASCII character each."""


class Fault(StrEnum):
    NONE = "none"
    RATE_LIMIT_AFTER = "429 with Retry-After"
    RATE_LIMIT = "429 without Retry-After"
    BROKEN = "500"
    OVERLOADED = "503"
    DOWN = "503, also for its health"
    RESET = "connection reset before headers"
    SILENT = "no response"
    SLOW = "headers, and no token"
    CUT = "stream cut"
    STALL = "stream stalls"
    MALFORMED = "malformed chunk"
    NO_DONE = "no [DONE]"
    OPEN = "no [DONE], and the connection stays open"
    CONTEXT = "400 context_length_exceeded"
    FILTER = "400 content_policy_violation"
    FILTERED = "finish_reason content_filter in the midst of a stream"
    NO_CONTINUATION = "400 for a prompt that is longer than the first one"


STATUS = {
    Fault.RATE_LIMIT_AFTER: (429, "rate_limit_exceeded"),
    Fault.RATE_LIMIT: (429, "rate_limit_exceeded"),
    Fault.BROKEN: (500, "server_error"),
    Fault.OVERLOADED: (503, "overloaded"),
    Fault.DOWN: (503, "overloaded"),
    Fault.CONTEXT: (400, "context_length_exceeded"),
    Fault.FILTER: (400, "content_policy_violation"),
    Fault.NO_CONTINUATION: (400, "invalid_prefill"),
}
"""Status and error code of the faults that are an answer."""


class Play(msgspec.Struct):
    """Command to play a fault; it also empties the log."""

    fault: Fault
    times: int | None = None  # requests with the fault; None: all
    prompt: int = 0  # number of tokens of the prompt that the client sends


class Entry(msgspec.Struct):
    at: float  # monotonic time
    path: str
    prompt: int  # number of tokens
    fault: Fault = Fault.NONE


class Server:
    """Routes: ``/ids`` takes and returns token ids, like vLLM; ``/text`` only text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._play = tokenizer, Play(Fault.NONE)
        self._log: list[Entry] = []

    async def play(self, request: web.Request) -> web.Response:
        self._play = msgspec.json.decode(await request.read(), type=Play)
        self._log = []
        return web.Response()

    async def log(self, request: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._log))

    async def health(self, request: web.Request) -> web.Response:
        is_down = self._play.fault is Fault.DOWN
        return web.Response(status=503 if is_down else 200)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def other(self, request: web.Request) -> web.Response:
        """Log a request for another route, and refuse it."""
        if request.method == "POST" and not request.path.endswith("/completion"):
            self._log.append(Entry(time.monotonic(), request.path, 0))
        return web.json_response({"error": {"message": "no such route"}}, status=404)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt, has_ids = body["prompt"], request.path.startswith("/ids/")
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        elif not has_ids:
            return _error(400, "no_token_ids")
        given = body.get("logit_bias") or {}
        hidden = [t for t in range(VOCABULARY) if t not in PRINTABLE]
        body["logit_bias"] = dict.fromkeys(hidden, False) | given
        sampler = Sampler(body, prompt)
        fault = Fault.NONE
        entry = Entry(time.monotonic(), request.path, len(prompt))
        if body["max_tokens"] > PROBE_TOKENS:
            self._log.append(entry)
            fault = entry.fault = self._next_fault(len(prompt))
        elif self._play.fault in (Fault.DOWN, Fault.OVERLOADED):
            fault = self._play.fault
        if fault in STATUS:
            return _error(*STATUS[fault], is_after=fault is Fault.RATE_LIMIT_AFTER)
        if fault is Fault.RESET:
            return _reset(request)
        if fault is Fault.SILENT:
            await asyncio.sleep(SILENT_S)
        if not body.get("stream"):
            token, _ = sampler.next()
            choice = {"index": 0, "token_ids": [token]}
            return web.json_response({"choices": [choice]})
        return await self._stream(request, body, sampler, entry)

    def _next_fault(self, prompt: int) -> Fault:
        play = self._play
        if play.times == 0:
            return Fault.NONE
        if play.fault is Fault.NO_CONTINUATION and prompt <= play.prompt:
            return Fault.NONE
        if play.times is not None:
            play.times -= 1
        return play.fault

    async def _stream(
        self, request: web.Request, body: dict[str, Any], sampler: Sampler, entry: Entry
    ) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        if entry.fault is Fault.SLOW:
            await asyncio.sleep(SILENT_S)
        for number in range(1, body["max_tokens"] + 1):
            made = entry.prompt - self._play.prompt + number - 1  # of the sequence
            if entry.fault is Fault.MALFORMED and made == MALFORMED_AT:
                await answer.write(b'data: {"choices": [{"text": \n\n')
            if entry.fault is Fault.STALL and made == STALL_AT:
                await asyncio.sleep(SILENT_S)
            if entry.fault is Fault.CUT and made == CUT_AT:
                assert request.transport is not None
                request.transport.close()
                return answer
            if entry.fault is Fault.FILTERED and made >= FILTER_AT:
                await _send(answer, {"text": "", "finish_reason": "content_filter"})
                break
            await asyncio.sleep(STEP_S)
            token, _ = sampler.next()
            choice: dict[str, Any] = {"text": self._tokenizer.decode([token])}
            if entry.path.startswith("/ids/"):
                choice["token_ids"] = [token]
            is_last = number == body["max_tokens"]
            choice["finish_reason"] = "length" if is_last else None
            await _send(answer, choice)
        if entry.fault is Fault.OPEN:
            await asyncio.sleep(SILENT_S)
        if entry.fault is not Fault.NO_DONE:
            await answer.write(b"data: [DONE]\n\n")
        return answer


async def _send(answer: web.StreamResponse, choice: dict[str, Any]) -> None:
    data = json.dumps({"choices": [{"index": 0, **choice}]})
    await answer.write(f"data: {data}\n\n".encode())


def _error(status: int, code: str, *, is_after: bool = False) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if is_after else {}
    body = {"error": {"message": f"the server says {code}", "code": code}}
    return web.json_response(body, status=status, headers=headers)


def _reset(request: web.Request) -> web.Response:
    """Reset the connection, without a byte of an answer."""
    assert request.transport is not None
    connection = request.transport.get_extra_info("socket")
    linger = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    request.transport.abort()
    return web.Response()


class FaultServer:
    """A server process, commanded over HTTP."""

    def __init__(self, tokenizer: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = ["--port", str(port), "--tokenizer", str(tokenizer)]
        command = [sys.executable, "-m", "tests.fault_server", *words]
        self._process = subprocess.Popen(command, cwd=ROOT)
        limit = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < limit, "the server does not start"
            time.sleep(0.05)  # a server that starts has no event

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def play(self, fault: Fault, times: int | None = None, prompt: int = 0) -> None:
        """Play a fault from now on, and empty the log."""
        body = msgspec.json.encode(Play(fault, times, prompt))
        httpx.post(f"{self.url}/play", content=body).raise_for_status()

    def log(self) -> list[Entry]:
        answer = httpx.get(f"{self.url}/log").raise_for_status()
        return msgspec.json.decode(answer.content, type=list[Entry])

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def main(arguments: list[str]) -> None:
    given = dict(itertools.pairwise(arguments))
    server = Server(Tokenizer.from_file(given["--tokenizer"]))
    app = web.Application()
    routes = [web.post("/play", server.play), web.get("/log", server.log)]
    for kind in ("", "/ids", "/text"):
        routes.append(web.get(f"{kind}/health", server.health))
        routes.append(web.get(f"{kind}/v1/models", server.models))
        routes.append(web.post(f"{kind}/v1/completions", server.completions))
    app.add_routes([*routes, web.route("*", "/{path:.*}", server.other)])
    port = int(given["--port"])
    # Cancels silent responses when their clients disconnect.
    web.run_app(app, host="127.0.0.1", port=port, print=None, handler_cancellation=True)


if __name__ == "__main__":
    main(sys.argv[1:])
