"""Suite "generate": tokens per second and time to the first token, on SmolLM2.

One, four and sixteen streams at once, each with a prompt of 128 random tokens and 64
output tokens. Our model runs as one stage with two threads, and as three stages with
one thread each; vLLM and llama.cpp, if they are included, run as their own servers. Our
engine and vLLM compute in float32, in bfloat16, and with weights and activations of 8
bits; llama.cpp has weights that are quantized to 4 and to 8 bits. The servers of one
precision are started together, and measured alternately while the others are idle.
Finally, our three stages compute prompts with a cached prefix, beside new prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.members import Options, Step
from benchmarks.rivals.environment import python_of
from benchmarks.serving import others
from benchmarks.serving.others import LLAMACPP, VLLM
from benchmarks.serving.services import running
from benchmarks.serving.streams import drawn, times_of
from benchmarks.serving.w8a8 import save_quantized
from multiworld.demo import smollm2

ONE, THREE = "one stage", "three stages"
BFLOAT16, INT8, Q8_0 = ", bfloat16", ", int8", ", Q8_0"
"""Names of the contenders, and suffixes of those that do not compute in float32."""

BEHIND = "vLLM behind multiworld"
"""Name of a contender in float32: runner V1, with sampling by our processor."""

STREAMS = (1, 4, 16)
PROMPT, ANSWER = 128, 64
"""Tokens of a prompt and of its answer."""

BEGINNINGS, OWN = (256, 768, 1536), 32
"""Tokens of a shared prefix, and of the rest of a prompt."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server with OpenAI's interface.

    Attributes:
        name: Name of the contender.
        url: Its URL.
        model: Name of the model there.
    """

    name: str
    url: str
    model: str


Cuts = Mapping[str, Sequence[Mapping[str, Any]]]

CUTS: Cuts = {ONE: [{"threads": 2}], THREE: [{}, {}, {}]}

PRECISIONS = ("", BFLOAT16, INT8)
"""Suffixes of the contenders' names, by precision. Contenders of one precision run at
the same time; those of all precisions need more memory than a small machine has."""


def run(options: Options, on_step: OnStep) -> None:
    """Start and measure the servers of each precision, one precision after the other.

    Raises:
        RuntimeError: A server did not start, or did not answer.
    """
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    measure(folder, PRECISIONS, CUTS, options, on_step)


def measure(
    folder: Path,
    precisions: Sequence[str],
    cuts: Cuts,
    options: Options,
    on_step: OnStep,
) -> None:
    """Measure a folder's model; ``cuts``: stages of our contenders, by name."""
    for number, precision in enumerate(precisions):
        share = number / len(precisions)
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            servers = []
            for who, start in _contenders(options, folder, Path(name), precision, cuts):
                on_step(("step", (share, f"starting {who} (may take minutes)")))
                servers.append(stack.enter_context(start()))
            asyncio.run(_measure(servers, options, share, on_step))


Start = Callable[[], contextlib.AbstractContextManager[Server]]
"""Function that starts a contender."""


def _contenders(
    options: Options, folder: Path, scratch: Path, precision: str, cuts: Cuts
) -> list[tuple[str, Start]]:
    """Return the contenders of one precision, which are not started yet."""
    found: list[tuple[str, Start]] = []
    for who, stages in cuts.items():
        name = who + precision
        spec = _spec(folder, stages, name)
        found.append((name, partial(_ours, name, spec, scratch)))
    if VLLM in options.apart:
        python = python_of(VLLM, Path(options.environments))
        if not precision:
            spec = _behind(folder, str(python))
            found.append((BEHIND, partial(_ours, BEHIND, spec, scratch)))
        eight = save_quantized(folder, scratch / "w8a8") if precision == INT8 else None
        dtype = "bfloat16" if precision else "float32"
        given = VLLM + precision, VLLM, python, eight or folder, scratch, dtype
        found.append((given[0], partial(_other, *given)))
    is_small = folder == smollm2.folder()
    if LLAMACPP in options.apart and precision == INT8 and is_small:
        python = python_of(LLAMACPP, Path(options.environments))
        files = {"": folder, Q8_0: others.eight_bits(python, scratch)}
        for ending, weights in files.items():
            given = LLAMACPP + ending, LLAMACPP, python, weights, scratch, ""
            found.append((given[0], partial(_other, *given)))
    return found


@contextlib.contextmanager
def _ours(who: str, spec: dict[str, Any], scratch: Path) -> Iterator[Server]:
    at = scratch / who.replace(", ", "-").replace(" ", "-")
    at.mkdir()
    with running(spec, at) as url:
        yield Server(who, url, "m")


@contextlib.contextmanager
def _other(
    who: str, kind: str, python: Path, model: Path, scratch: Path, dtype: str
) -> Iterator[Server]:
    at = scratch / who.replace(", ", "-")
    at.mkdir()
    with others.running(kind, python, model, at, dtype) as (url, _):
        yield Server(who, url, str(model))


def _spec(
    folder: Path, stages: Sequence[Mapping[str, Any]], who: str
) -> dict[str, Any]:
    named = [{"name": f"s{number}", **stage} for number, stage in enumerate(stages)]
    dtype = "bfloat16" if who.endswith(BFLOAT16) else "float32"
    generation: dict[str, Any] = {"dtype": dtype, "max_num_batched_tokens": 512}
    if who.endswith(INT8):
        generation["quantization"] = "int8"
    model = {
        "path": str(folder),
        "generation": generation,
        "deadline_s": 600.0,
        "stages": named,
    }
    return {"app": "bench", "models": {"m": model}, "gateway": {"port": 0}}


def _behind(folder: Path, python: str) -> dict[str, Any]:
    """Return a service whose only replica is vLLM, with sampling by our processor."""
    model = {
        "path": str(folder),
        "engine": "vllm",
        "engine_python": python,
        "engine_args": {"kv_cache_memory_bytes": 2**30},
        "generation": {"dtype": "float32", "max_model_len": 2048},
        "deadline_s": 600.0,
    }
    return {"app": "bench", "models": {"m": model}, "gateway": {"port": 0}}


async def _measure(
    servers: list[Server], options: Options, before: float, on_step: OnStep
) -> None:
    """Measure contenders in turns; ``before``: share of the suite that is done."""
    timeout = aiohttp.ClientTimeout(total=600.0)
    # Use a new connection for each request: servers close connections that are idle
    # while others are measured.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        for server in servers:
            on_step(("step", (before, f"warming up {server.name}")))
            await _first(http, server, drawn(random.Random(0), PROMPT), 8)
        total, done = options.rounds * len(STREAMS) * len(servers), 0
        answer = 8 if options.is_quick else ANSWER
        for number in range(options.rounds):
            for streams in STREAMS:
                for server in servers if number % 2 else servers[::-1]:
                    text = f"{streams} streams, {server.name}"
                    on_step(("step", (before + done / total / 3, text)))
                    await _round(http, server, streams, answer, number, on_step)
                    done += 1
        three = [server for server in servers if server.name == THREE]
        if not three:
            return
        for beginning in BEGINNINGS[: 1 if options.is_quick else None]:
            await _beginnings(http, three[0], beginning, options.rounds, on_step)


async def _beginnings(
    http: aiohttp.ClientSession,
    server: Server,
    beginning: int,
    rounds: int,
    on_step: OnStep,
) -> None:
    """Measure prompts with a cached prefix and new prompts, alternately."""
    draw = random.Random(beginning)
    shared = drawn(draw, beginning)
    await _first(http, server, shared, 2)
    kind = "time to the first token by tokens of the beginning"
    for _ in range(rounds):
        for who, begins in (("known", shared), ("new", drawn(draw, beginning))):
            prompt = [*begins, *drawn(draw, OWN)]
            first_ms = 1000 * await _first(http, server, prompt, 2)
            name = f"{server.name}, {who}"
            on_step(("sample", (kind, beginning, name, "ms", first_ms)))


async def _round(
    http: aiohttp.ClientSession,
    server: Server,
    streams: int,
    answer: int,
    number: int,
    on_step: OnStep,
) -> None:
    """Run concurrent streams, whose prompts occur in no other round."""
    began = time.perf_counter()
    firsts = await asyncio.gather(
        *(
            _first(
                http,
                server,
                drawn(random.Random(f"{number} {streams} {k}"), PROMPT),
                answer,
            )
            for k in range(streams)
        )
    )
    took_s = time.perf_counter() - began
    rate, first_ms = streams * answer / took_s, 1000 * statistics.median(firsts)
    on_step(("sample", ("rate by streams", streams, server.name, "tokens/s", rate)))
    kind = "time to the first token by streams"
    on_step(("sample", (kind, streams, server.name, "ms", first_ms)))


async def _first(
    http: aiohttp.ClientSession, server: Server, prompt: list[int], answer: int
) -> float:
    """Run one stream; return the seconds to its first token."""
    times = await times_of(http, server.url, prompt, answer, model=server.model)
    return times[0]
