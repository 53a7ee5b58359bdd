"""Suite "texts": cost of options and loads of text generation, on SmolLM2.

First, deterministic mode is compared with the default in the same precision. Then, in
three stages in bfloat16, these loads are measured: one sequence that nearly fills the
model's context; 256 streams at once, with and without enough memory for them; and a
stream beside another tenant, which either sends a flood of prompts or requests 64
answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.members import Options, Step
from benchmarks.serving.services import running
from benchmarks.serving.streams import drawn, times_of
from multiworld.demo import smollm2
from multiworld.serve.controller.answers import TenantWithKey
from multiworld.serve.controller.client import Service

DEFAULT, EQUAL = MODES = "default", "deterministic"
"""Names of the contenders."""

DTYPES = ("float32", "bfloat16")
STREAMS = (1, 16)
PROMPT, ANSWER, ALONE = 128, 48, 1024
"""Tokens of a prompt, of its answer, and of a prompt that is timed alone."""

LONG, LONG_ANSWER = 8000, 64
"""Tokens of a prompt that nearly fills the model's context, and of its answer."""

MANY, MANY_ANSWER, MEMORIES_MB = 256, 24, (512, 96)
"""Concurrent streams, tokens of an answer, and memory for keys and values in MB."""

CHUNK, FLOOD_PROMPT, AT_ONCE, READ = 256, 1500, 8, 64
"""Tokens of a step, tokens of a prompt of the flood, its concurrent prompts, and tokens
of the stream that is read meanwhile."""

CHOICES, CHOICE_TOKENS = 64, 400
"""Number of answers of one request, and tokens of each."""

QUIET_PROMPTS, FIRST_TOKENS = (32, 128), 5
"""Tokens of the prompts whose first token is timed, and their number in a round."""

ALONE_NAME, LOUD = "alone", ("beside a flood", "beside 64 choices")
"""Names of the contenders: the quiet tenant alone, and beside the loud one."""

FILL_S = 3.0
"""Seconds after which a flood has filled the service."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""

Http = aiohttp.ClientSession


def run(options: Options, on_step: OnStep) -> None:
    """Measure each option and load, one after the other."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    for number, dtype in enumerate(DTYPES):
        on_step(("step", (0.2 * number, f"deterministic mode in {dtype}")))
        _serve(
            {
                name: _model(folder, dtype, deterministic=name == EQUAL)
                for name in MODES
            },
            partial(_modes, dtype, options, on_step),
        )
    on_step(("step", (0.4, "a long text")))
    _serve(
        {"m": _model(folder, "bfloat16")},
        partial(_long, options, on_step),
    )
    for memory_mb in MEMORIES_MB:
        on_step(("step", (0.6, f"{MANY} streams at once, {memory_mb} MB")))
        _serve(
            {
                "m": _model(
                    folder,
                    "bfloat16",
                    kv_cache_memory_mb=memory_mb,
                    max_num_seqs=MANY,
                )
            },
            partial(_many, memory_mb, options, on_step),
        )
    on_step(("step", (0.8, "a flood of prompts")))
    _flooded(folder, options, on_step)


def _model(folder: Path, dtype: str, **more: Any) -> dict[str, Any]:
    own = {"max_num_batched_tokens": CHUNK, "enable_prefix_caching": False}
    return {
        "path": str(folder),
        "generation": {"dtype": dtype, **own, **more},
        "deadline_s": 600.0,
        "stages": [{"name": name} for name in ("front", "middle", "back")],
    }


def _serve(
    models: dict[str, Any], measure: Callable[[Http, str], Coroutine[Any, Any, None]]
) -> None:
    """Serve some models, and measure them."""
    spec = {"app": "bench", "models": models, "gateway": {"port": 0}}
    with tempfile.TemporaryDirectory() as name, running(spec, Path(name)) as url:
        asyncio.run(_with_session(url, measure))


async def _with_session(
    url: str, measure: Callable[[Http, str], Coroutine[Any, Any, None]]
) -> None:
    timeout = aiohttp.ClientTimeout(total=600.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with Http(timeout=timeout, connector=connector) as http:
        await measure(http, url)


async def _modes(
    dtype: str, options: Options, on_step: OnStep, http: Http, url: str
) -> None:
    """Measure deterministic mode and the default, alternately."""
    draw = random.Random(0)
    answer = 8 if options.is_quick else ANSWER
    for name in MODES:
        await times_of(http, url, drawn(draw, PROMPT), 8, model=name)
    for number in range(options.rounds):
        for streams in STREAMS:
            for name in MODES if number % 2 else MODES[::-1]:
                found = await asyncio.gather(
                    *(
                        times_of(http, url, drawn(draw, PROMPT), answer, model=name)
                        for _ in range(streams)
                    )
                )
                # Use only the second half of each stream: all prompts are computed by
                # then.
                late = [gap for times in found for gap in gaps(times[answer // 2 :])]
                step_ms = 1000 * sum(late) / len(late)
                kind = f"{dtype}, a token of each by streams"
                on_step(("sample", (kind, streams, name, "ms", step_ms)))
        for name in MODES if number % 2 else MODES[::-1]:
            (first_s,) = await times_of(http, url, drawn(draw, ALONE), 1, model=name)
            kind = f"{dtype}, first token by tokens of the prompt"
            on_step(("sample", (kind, ALONE, name, "ms", 1000 * first_s)))


def gaps(times: list[float]) -> list[float]:
    """Return the differences of consecutive times."""
    return [after - before for before, after in itertools.pairwise(times)]


async def _long(options: Options, on_step: OnStep, http: Http, url: str) -> None:
    """Measure a sequence that nearly fills the context."""
    prompt = ALONE if options.is_quick else LONG
    for number in range(options.rounds):
        tokens = drawn(random.Random(number), prompt)
        times = await times_of(http, url, tokens, LONG_ANSWER)
        for who, took_s in (("first token", times[0]), ("whole", times[-1])):
            on_step(("sample", ("a long text by tokens", prompt, who, "s", took_s)))


async def _many(
    memory_mb: int, options: Options, on_step: OnStep, http: Http, url: str
) -> None:
    """Measure many streams at once, and count the preempted ones."""
    count = 16 if options.is_quick else MANY
    kind = f"{count} streams at once by MB for keys and values"
    before = 0.0
    for number in range(options.rounds):
        draw = random.Random(number)
        prompts = [drawn(draw, draw.randrange(16, 96)) for _ in range(count)]
        found = await asyncio.gather(
            *(times_of(http, url, prompt, MANY_ANSWER) for prompt in prompts)
        )
        took_s = max(times[-1] for times in found)
        on_step(("sample", (kind, memory_mb, "all whole after", "s", took_s)))
        # Wait for the reports, which replicas send once a second.
        await asyncio.sleep(1.5)
        after = await _preempted(http, url)
        lost = f"preempted of {count} by MB for keys and values"
        sample = lost, memory_mb, "preempted", "texts", after - before
        on_step(("sample", sample))
        before = after


async def _preempted(http: Http, url: str) -> float:
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    rows = (line for line in text.splitlines() if not line.startswith("#"))
    name = "multiworld_stage_preemptions_total"
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows if row.startswith(name))


def _flooded(folder: Path, options: Options, on_step: OnStep) -> None:
    """Measure a stream alone, and beside another tenant's prompts."""
    spec = {
        "app": "bench",
        "models": {"m": _model(folder, "bfloat16")},
        "gateway": {"port": 0, "authentication": "keys"},
    }
    with tempfile.TemporaryDirectory() as name, running(spec, Path(name)) as url:
        service = Service(None, Path(name) / "state")
        quiet, loud = (
            service.ask("POST", "/tenants", TenantWithKey, json={"name": who}).key
            for who in ("quiet", "loud")
        )

        async def measure(http: Http, url: str) -> None:
            draw = random.Random(0)

            async def look(who: str) -> None:
                for prompt in QUIET_PROMPTS:
                    for _ in range(FIRST_TOKENS):
                        tokens = drawn(draw, prompt)
                        (first_s,) = await times_of(http, url, tokens, 1, key=quiet)
                        kind = "first token of a quiet tenant by tokens of its prompt"
                        sample = kind, prompt, who, "ms", 1000 * first_s
                        on_step(("sample", sample))
                tokens = drawn(draw, QUIET_PROMPTS[0])
                times = await times_of(http, url, tokens, READ, key=quiet)
                for gap_s in gaps(times):
                    kind = "between two tokens of a quiet tenant"
                    on_step(("sample", (kind, READ, who, "ms", 1000 * gap_s)))

            for _ in range(options.rounds):
                await look(ALONE_NAME)
                async with _flood(http, url, loud):
                    await look(LOUD[0])
                async with _choices(http, url, loud):
                    await look(LOUD[1])

        asyncio.run(_with_session(url, measure))


@contextlib.asynccontextmanager
async def _flood(http: Http, url: str, key: str) -> AsyncIterator[None]:
    """Send long prompts, several at a time, until the end of the block."""
    draw = random.Random(1)

    async def send() -> None:
        while True:
            await times_of(http, url, drawn(draw, FLOOD_PROMPT), 1, key=key)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send()) for _ in range(AT_ONCE)]
        await asyncio.sleep(FILL_S)
        yield
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _choices(http: Http, url: str, key: str) -> AsyncIterator[None]:
    """Request many answers at once, repeatedly, until the end of the block."""
    body = {
        "model": "m",
        "prompt": drawn(random.Random(2), 32),
        "n": CHOICES,
        "max_tokens": CHOICE_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {key}"}

    async def send() -> None:
        while True:
            where = f"{url}/v1/completions"
            async with http.post(where, json=body, headers=headers) as answer:
                answer.raise_for_status()
                async for _ in answer.content:
                    pass

    # If a request is refused, there is no load, so the task group ends the measurement.
    async with asyncio.TaskGroup() as group:
        task = group.create_task(send())
        await asyncio.sleep(FILL_S)
        yield
        task.cancel()
