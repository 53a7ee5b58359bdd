"""vLLM as an engine: its OpenAI server, which takes and returns token ids.

vLLM is asked for the most likely token, and a logits processor of ours leaves it no
choice: it samples with the function that our own engine samples with. So a token
depends only on the logits, the request and the tokens so far, and a sequence continues
on another replica as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from multiworld.errors import (
    InvalidRequestError,
    ModelFailedError,
    ServeError,
    SpecError,
)
from multiworld.serve.generation.engines import vllm_sampling
from multiworld.serve.generation.engines.engine_process import (
    EngineProcess,
    free_port,
)
from multiworld.serve.generation.engines.whole_engine import (
    EngineLostError,
    EngineSettings,
    EngineToken,
    Run,
    RunFailedError,
)
from multiworld.serve.generation.replica import sampler
from multiworld.serve.transport.generation_messages import Sampling

logger = logging.getLogger("multiworld.serve")

MODULE, SAMPLER = "multiworld_vllm_sampling", "multiworld_sampler"
"""Names of the modules that vLLM imports; see ``_write_modules``."""

RESERVED = {
    "model": "path",
    "host": "",
    "port": "",
    "logits_processors": "",
    "enable_scale_out": "",
    "api_key": "",
    "max_model_len": "generation: max_model_len",
    "max_num_seqs": "generation: max_num_seqs",
    "dtype": "generation: dtype",
    "speculative_config": "",
    "uds": "",
    "tokens_only": "",
}
"""Arguments that the service sets itself, with the field of the spec to use."""

HEALTH_S = 0.25
"""Seconds between looks at a starting server."""

ANSWER_S = 5.0
"""Maximum seconds for vLLM to answer a look."""

MAX_LINE = 2**20
"""Maximum bytes of a line of an answer; the largest have 20 log-probabilities."""

STRUCTURE = "structured output failed"
"""Beginning of reports about a structure that cannot be fulfilled."""

MAX_ERROR = 500
"""Maximum reported characters of vLLM's errors."""


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(_Logprob):
    top_logprobs: list[_Logprob] = []


class _Content(msgspec.Struct):
    content: list[_Logprobs] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Content | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class VllmEngine:
    """One vLLM server of this replica."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self.usage, self.phase = 0.0, "waiting"
        self._process: EngineProcess | None = None
        self._http: aiohttp.ClientSession | None = None
        self._folder: Path | None = None
        self._failures: dict[str, str] = {}
        self._socket: socket.socket | None = None
        self._number = 0
        self._url = ""
        refuse_reserved(settings.args, RESERVED)

    # Its life.

    async def start(self) -> None:
        """Start vLLM, and wait until it answers."""
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._folder = Path(tempfile.mkdtemp(prefix="multiworld-vllm-"))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(self._folder / "failures"))
        write_modules(self._folder, self._settings)
        command = self._command(port)
        logger.info("starting %s", " ".join(command))
        self.phase = "loading"
        self._process = EngineProcess(command, self._environment())
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(
            self._url, timeout=timeout, connector=connector, read_bufsize=MAX_LINE
        )
        exited = asyncio.ensure_future(self._process.wait())
        try:
            while not exited.done() and not await self._answers():
                await asyncio.wait([exited], timeout=HEALTH_S)
            if exited.done():
                raise EngineLostError(
                    f"vLLM exited with code {exited.result()} before it served; its "
                    "output is in the log of this replica"
                )
        except BaseException:
            await self.close()
            raise
        finally:
            exited.cancel()
        self.phase = "warming up"
        warm_up = Run((0,), 1, Sampling(temperature=0.0, max_tokens=2, ignore_eos=True))
        try:
            async for _ in self.generate(warm_up):
                pass
        except ServeError as error:
            await self.close()
            raise EngineLostError(f"vLLM cannot generate: {error}") from error
        self.phase = ""

    def _command(self, port: int) -> list[str]:
        settings = self._settings
        python = settings.python or sys.executable
        own: dict[str, Any] = {
            "model": settings.path,
            "host": "127.0.0.1",
            "port": port,
            "enable_scale_out": True,
            "logits_processors": f"{MODULE}:MultiworldSampling",
            "max_num_seqs": settings.max_num_seqs,
            "max_model_len": settings.max_model_len,
            "dtype": settings.dtype,
        }
        flags = flags_of({**own, **settings.args})
        return [python, "-m", "vllm.entrypoints.openai.api_server", *flags]

    def _environment(self) -> dict[str, str]:
        assert self._folder is not None
        kind, _, index = self._settings.device.partition(":")
        env = {"PYTHONPATH": str(self._folder), "HF_HUB_OFFLINE": "1"}
        if kind == "cuda":
            env["CUDA_VISIBLE_DEVICES"] = index or "0"
        return env

    async def _answers(self) -> bool:
        assert self._http is not None
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with self._http.get("/health", timeout=limit) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def wait_lost(self) -> str:
        """Wait until vLLM's server has exited; return why."""
        assert self._process is not None
        return f"vLLM exited with code {await self._process.wait()}"

    def stopped_s(self) -> float:
        return 0.0 if self._process is None else self._process.stopped_s()

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            await self._process.close()
        self._remove_files()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._remove_files()

    def _remove_files(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # Sequences.

    def check(self, sampling: Sampling) -> None:
        if sampling.prompt_logprobs is not None:
            raise InvalidRequestError(
                "this model's engine, vLLM, returns no log-probabilities of the prompt "
                "here; leave out echo with logprobs",
                param="logprobs",
            )

    async def generate(self, run: Run) -> AsyncGenerator[Sequence[EngineToken]]:
        """Continue a sequence; see ``WholeEngine.generate``."""
        assert self._http is not None
        self._number += 1
        name = f"{self._settings.replica}-{self._number}"
        body = self._body(run, name)
        data = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.post(
                "/inference/v1/generate", data=data, headers=headers
            ) as answer:
                if answer.status != 200:
                    raise refusal_of(answer.status, await answer.content.read(MAX_LINE))
                async for chunk in chunks_of(answer):
                    tokens = tokens_of(chunk, run)
                    self._raise_if_failed(name)
                    if tokens:
                        yield tokens
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            text = f"{type(error).__name__}: {error}"
            raise RunFailedError(f"vLLM's answer broke off: {text}") from error

    def _body(self, run: Run, name: str) -> dict[str, Any]:
        given = run.sampling
        options = {
            **msgspec.to_builtins(given),
            "name": name,
            "prompt": run.prompt,
            "ends": run.ends,
        }
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": run.remaining,
            "ignore_eos": True,
            "stop_token_ids": list(run.ends),
            "detokenize": False,
            "extra_args": {"multiworld": json.dumps(options)},
        }
        if given.logprobs is not None:
            sampling["logprobs"] = given.logprobs
        body = {"request_id": name, "token_ids": list(run.tokens), "stream": True}
        body["sampling_params"] = sampling
        if run.tenant:
            body["cache_salt"] = run.tenant
        return body

    def _raise_if_failed(self, name: str) -> None:
        """Raise what the logits processor reported of a sequence.

        It reports before it returns a token, so the report is here before the token.
        """
        assert self._socket is not None
        with suppress(BlockingIOError):
            while True:
                report = json.loads(self._socket.recv(65536))
                self._failures[report["name"]] = report["error"]
                while len(self._failures) > self._settings.max_num_seqs:
                    del self._failures[next(iter(self._failures))]
        failure = self._failures.pop(name, None)
        if failure is None:
            return
        if failure.startswith(STRUCTURE):
            raise InvalidRequestError(failure)
        raise ModelFailedError(failure)


def make(settings: EngineSettings) -> VllmEngine:
    """Return the adapter; ``engine: vllm``."""
    return VllmEngine(settings)


def write_modules(folder: Path, settings: EngineSettings) -> None:
    """Write what vLLM's processes import: our sampler, and the logits processor.

    They need torch, and llguidance for structured output, but nothing of this package,
    whose torch could replace vLLM's.
    """
    from multiworld.serve.generation.tokenizer import Tokenizer

    for name, module in ((MODULE, vllm_sampling), (SAMPLER, sampler)):
        assert module.__file__ is not None
        shutil.copyfile(module.__file__, folder / f"{name}.py")
    (folder / "tokenizer.json").write_text(Tokenizer(Path(settings.path)).fast.to_str())
    facts = {"vocabulary": settings.vocabulary, "end_tokens": settings.end_tokens}
    (folder / "model.json").write_text(json.dumps(facts))


def refuse_reserved(args: Mapping[str, Any], reserved: Mapping[str, str]) -> None:
    """Raise SpecError if ``engine_args`` sets what the service sets itself."""
    for name in args:
        if (known := reserved.get(name.replace("-", "_"))) is not None:
            remedy = f"use `{known}` instead" if known else "remove it"
            raise SpecError(f"engine_args: {name} is set by the service; {remedy}")


def flags_of(args: Mapping[str, Any]) -> list[str]:
    """Return arguments as flags: ``{"max_model_len": 5}`` as ``--max-model-len 5``."""
    found: list[str] = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                pass
            case True:
                found.append(f"--{flag}")
            case False:
                found.append(f"--no-{flag}")
            case list():
                found += [f"--{flag}", *map(str, value)]
            case dict():
                found += [f"--{flag}", json.dumps(value)]
            case _:
                found += [f"--{flag}", str(value)]
    return found


def refusal_of(status: int, body: bytes) -> Exception:
    """Return the error for an HTTP status other than 200."""
    text = body.decode(errors="replace")[:MAX_ERROR]
    if 400 <= status < 500 and status not in (408, 429):
        return InvalidRequestError(f"the engine refused the request: {text}")
    return RunFailedError(f"the engine answered {status}: {text}")


async def chunks_of(answer: aiohttp.ClientResponse) -> AsyncIterator[_Chunk]:
    """Yield the events of a stream up to its end.

    Raises:
        RunFailedError: It is no such stream, or reports an error.
    """
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            chunk = _CHUNK.decode(data)
        except msgspec.DecodeError as error:
            raise RunFailedError(f"the engine sent no valid event: {error}") from None
        if chunk.error is not None:
            raise RunFailedError(f"the engine failed: {str(chunk.error)[:MAX_ERROR]}")
        yield chunk


def tokens_of(chunk: _Chunk, run: Run) -> list[EngineToken]:
    """Return the tokens of an event."""
    found: list[EngineToken] = []
    for choice in chunk.choices[:1]:
        scores = (choice.logprobs and choice.logprobs.content) or []
        for place, token in enumerate(choice.token_ids or ()):
            if run.sampling.logprobs is None or place >= len(scores):
                found.append(EngineToken(token))
                continue
            score = scores[place]
            # vLLM lists the sampled token, and then the likeliest ones.
            pairs = [(one.token_id, one.logprob) for one in score.top_logprobs]
            top = sorted(dict(pairs).items(), key=lambda pair: -pair[1])
            count = run.sampling.logprobs
            found.append(EngineToken(token, score.logprob, tuple(top[:count])))
    return found
