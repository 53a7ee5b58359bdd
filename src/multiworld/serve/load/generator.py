"""Open-loop load generator, which sends HTTP requests when they are due."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from multiworld.serve.load.breakdown import phases_of
from multiworld.serve.load.summary import Sample
from multiworld.serve.machines.open_files import raise_limit

# A request fails after this long without a connection, or without any new data.
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=60.0, sock_read=60.0)

# Function that gets the number of a request and its answer (parsed JSON), and returns
# whether the answer is correct.
Check = Callable[[int, Any], bool]


@dataclass(frozen=True, slots=True)
class Target:
    """URL and requests of a load; the generator sends the bodies in rotation."""

    url: str
    bodies: list[bytes]
    headers: dict[str, str]
    tls: ssl.SSLContext | bool = True  # certificates to trust; True for the system's
    is_stream: bool = False  # answers are server-sent events, like OpenAI's


def embeddings(base: str, model: str, texts: list[str]) -> Target:
    """Return a target that posts to ``/v1/embeddings``, one text per request."""
    bodies = [orjson.dumps({"model": model, "input": text}) for text in texts]
    url = f"{base.rstrip('/')}/v1/embeddings"
    return Target(url, bodies, {"Content-Type": "application/json"})


def chats(base: str, model: str, prompts: list[str], max_tokens: int) -> Target:
    """Return a target that streams chats, one prompt per request."""
    bodies = [
        orjson.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
            }
        )
        for prompt in prompts
    ]
    url = f"{base.rstrip('/')}/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    return Target(url, bodies, headers, is_stream=True)


def inference(base: str, model: str, bodies: list[bytes]) -> Target:
    url = f"{base.rstrip('/')}/v2/models/{model}/infer"
    return Target(url, bodies, {"Content-Type": "application/json"})


class Load:
    """One run of requests, evenly spaced or at the times ``due`` (seconds)."""

    def __init__(
        self,
        target: Target,
        rate_per_s: float,
        check: Check | None = None,
        due: Sequence[float] | None = None,
    ) -> None:
        self._target, self._rate_per_s, self._check = target, rate_per_s, check
        self._due = due
        self.samples: list[Sample] = []
        self.sent = self.answered = 0
        self.began_at = 0.0  # on the loop's clock
        self.offset_s = 0.0  # added to due times, so that loads share one clock
        self._is_ending = False

    def end(self) -> None:
        """Stop sending requests; ``run`` still waits for the answers."""
        self._is_ending = True

    async def run(self, seconds: float | None = None) -> list[Sample]:
        """Send requests until ``end`` or for ``seconds``; return samples."""
        loop = asyncio.get_running_loop()
        raise_limit()  # raises the limit of open files: each request has a connection
        connector = aiohttp.TCPConnector(limit=0, ssl=self._target.tls)
        tasks: set[asyncio.Task[None]] = set()
        async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as http:
            self.began_at = loop.time()
            try:
                for number, due_s in self._schedule(seconds):
                    wait_s = self.began_at + due_s - loop.time()
                    if wait_s > 0:
                        await asyncio.sleep(wait_s)
                    if self._is_ending:
                        break
                    task = loop.create_task(self._one(http, number, due_s))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    self.sent += 1
                await asyncio.gather(*tasks)
            finally:
                for task in list(tasks):
                    task.cancel()
        return self.samples

    def _schedule(self, seconds: float | None) -> Iterator[tuple[int, float]]:
        steady = (number / self._rate_per_s for number in itertools.count())
        for number, due_s in enumerate(steady if self._due is None else self._due):
            if seconds is not None and due_s >= seconds:
                return
            yield number, due_s

    async def _one(
        self, http: aiohttp.ClientSession, number: int, due_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        target = self._target
        body = target.bodies[number % len(target.bodies)]
        status, is_right, error = 0, None, ""
        phases: dict[str, float] | None = None
        times: list[float] = []
        is_cut = False
        try:
            async with http.post(
                target.url, data=body, headers=target.headers
            ) as response:
                status = response.status
                is_cut = status == 200  # until it has been read
                if target.is_stream and status == 200:
                    error = await _streamed(response, times, loop.time)
                    is_cut, content = bool(error), b""
                else:
                    content = await response.read()
                    is_cut = False
                phases = phases_of(response.headers.get("Server-Timing"))
            if status != 200:
                error = content[:200].decode(errors="replace")
            elif self._check is not None and not target.is_stream:
                is_right, error = _checked(self._check, number, content)
        except (aiohttp.ClientError, TimeoutError, ValueError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        latency_s = loop.time() - self.began_at - due_s
        since = self.began_at + due_s
        parts = tuple(time - since for time in times)
        sample = Sample(
            due_s + self.offset_s,
            latency_s,
            status,
            is_right,
            error,
            phases,
            parts,
            is_cut,
        )
        self.samples.append(sample)
        self.answered += sample.is_answered


async def _streamed(
    response: aiohttp.ClientResponse, times: list[float], clock: Callable[[], float]
) -> str:
    """Add each part's time to ``times``; return why the stream failed, or ""."""
    is_finished = False
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line[len(b"data: ") :])
        if "error" in event:
            return str(event["error"].get("message", event["error"]))
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if any(map(delta.get, ("content", "reasoning", "tool_calls"))):
                times.append(clock())
            is_finished |= choice.get("finish_reason") is not None
    return "" if is_finished else "the stream ended prematurely"


def _checked(check: Check, number: int, content: bytes) -> tuple[bool, str]:
    try:
        return check(number, orjson.loads(content)), ""
    except Exception as problem:  # the check did not expect such an answer
        return False, f"{type(problem).__name__}: {problem}"
