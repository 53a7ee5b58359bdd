"""Suite "recovery": pause of a stream that loses a stage, on SmolLM2.

A replica of the last stage is killed during a stream, and another one, which already
runs, takes over. Either its KV is rebuilt from the previous stage's activation log, or
all stages compute the sequence again, because no stage has a log. In a third case, the
replica is drained instead of killed, so that the stream is moved in advance.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.members import Options, Step
from benchmarks.serving.services import running
from multiworld.demo import smollm2
from multiworld.serve.controller.answers import ProcessShown, Scaled, StatusAnswer
from multiworld.serve.controller.client import Service

LOG, TOKENS = "from the log", "from the tokens"
MOVED, STEP = "moved ahead", "one token"
"""Names of the contenders."""

STAGES = (2, 3, 6)
CONTEXTS = (64, 512, 2048, 4096)
"""Tokens of the prompts."""

ANSWER, LONG, LOST_AT = 24, 600, 8
"""Tokens of an answer, of an answer that is moved, and before the kill or move."""

TRIES = 20
"""Maximum number of streams to start until one is at the replica to be drained."""

WHOLE_S = 60.0
"""Maximum seconds until a stage has its replicas again."""

OnStep = Callable[[Step], None]
"""Function that gets samples and progress."""


def run(options: Options, on_step: OnStep) -> None:
    """Measure services with several numbers of stages, alternately."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    contexts = CONTEXTS[:1] if options.is_quick else CONTEXTS
    done, total = 0, len(STAGES) * options.rounds * len(contexts) * 3
    for stages in STAGES:
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            found = {}
            for who, memory_mb in ((LOG, 128.0), (TOKENS, 0.0)):
                at = Path(name) / who.replace(" ", "-")
                at.mkdir()
                spec = _spec(folder, stages, memory_mb)
                on_step(("step", (done / total, f"starting {stages} stages, {who}")))
                url = stack.enter_context(running(spec, at))
                found[who] = url, Service(None, at / "state")
            for number in range(options.rounds):
                for context in contexts:
                    kind = f"pause by tokens, {stages} stages"
                    for who, (url, service) in found.items():
                        text = f"{stages} stages, {context} tokens, {who}"
                        on_step(("step", (done / total, text)))
                        draw = random.Random(f"{number} {context}")
                        pause_s = _pause(url, service, stages, context, draw)
                        sample = (kind, context, who, "ms", 1000 * pause_s)
                        on_step(("sample", sample))
                        done += 1
                    text = f"{stages} stages, {context} tokens, {MOVED}"
                    on_step(("step", (done / total, text)))
                    for who, pause_s in _moved(*found[LOG], stages, context):
                        sample = (kind, context, who, "ms", 1000 * pause_s)
                        on_step(("sample", sample))
                    done += 1


def _spec(folder: Path, stages: int, memory_mb: float) -> dict[str, Any]:
    generation = {
        "dtype": "bfloat16",
        "backup_memory_mb": memory_mb,
        "enable_prefix_caching": False,
    }
    named: list[dict[str, Any]] = [{"name": f"s{n}"} for n in range(stages)]
    named[-1]["replicas"] = 2
    model = {
        "path": str(folder),
        "generation": generation,
        "deadline_s": 300.0,
        "stages": named,
    }
    return {"app": "bench", "models": {"m": model}, "gateway": {"port": 0}}


def _pause(
    url: str, service: Service, stages: int, context: int, draw: random.Random
) -> float:
    """Return the longest time between two tokens around a loss, in seconds."""
    body = _request(context, ANSWER, draw)
    times: list[float] = []
    for _ in _tokens(url, body):
        times.append(time.perf_counter())
        if len(times) == LOST_AT:
            _kill_busy(service, stages - 1)
    if len(times) != ANSWER:
        raise RuntimeError(f"the stream was cut after {len(times)} tokens")
    _wait_whole(service, stages + 1)
    later = times[LOST_AT - 1 :]
    return max(b - a for a, b in itertools.pairwise(later))


def _request(context: int, count: int, draw: random.Random) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": [draw.randrange(100, 40_000) for _ in range(context)],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }


def _moved(
    url: str, service: Service, stages: int, context: int
) -> Iterator[tuple[str, float]]:
    """Yield the pause of a moved stream, and its usual time for a token, in seconds."""
    last = stages - 1
    for attempt in range(TRIES):
        body = _request(context, LONG, random.Random(attempt))
        times: list[float] = []
        gone = threading.Event()
        for _ in _tokens(url, body):
            times.append(time.perf_counter())
            if len(times) == LOST_AT:
                if _busy(service, last) != _names(service, last)[-1]:
                    # Scaling down drains the newest replica, which lacks this stream.
                    break
                _scale(service, last, 1)
                watch = (service, stages, gone)
                threading.Thread(target=_wait_until_gone, args=watch).start()
            if gone.is_set():
                break
        if len(times) == LOST_AT:
            continue
        if not gone.is_set():
            raise RuntimeError("the stream was not moved")
        _scale(service, last, 2)
        _wait_whole(service, stages + 1)
        gaps = [b - a for a, b in itertools.pairwise(times[LOST_AT:])]
        yield MOVED, max(gaps)
        yield STEP, statistics.median(gaps)
        return
    raise RuntimeError("no stream was at the newest replica")


def _scale(service: Service, stage: int, replicas: int) -> None:
    what = {"model": "m", "stage": f"s{stage}", "replicas": replicas}
    service.ask("POST", "/scale", Scaled, json=what)


def _wait_until_gone(service: Service, replicas: int, gone: threading.Event) -> None:
    """Wait until the drained replica has exited, because its stream was moved."""
    _wait_whole(service, replicas)
    while sum(bool(p.model) for p in _processes(service)) > replicas:
        time.sleep(0.2)
    gone.set()


def _processes(service: Service) -> Sequence[ProcessShown]:
    return service.ask("GET", "/status", StatusAnswer).processes


def _names(service: Service, stage: int) -> list[str]:
    """Return the replicas of a stage, the oldest first."""
    found = _processes(service)
    names = [p.name for p in found if p.model and p.stage == stage]
    return sorted(names, key=lambda name: int(name.rsplit("/", 1)[1]))


def _busy(service: Service, stage: int) -> str:
    """Return the replica of a stage that has the stream; empty if none has."""
    status = service.ask("GET", "/status", StatusAnswer, params={"reports": True})
    for name in _names(service, stage):
        report = status.worker_report(name)
        if report is not None and report.computing:
            return name
    return ""


def _tokens(url: str, body: dict[str, Any]) -> Iterator[int]:
    """Yield the tokens of a stream as they arrive."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as got:
        for line in got.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    yield from choice["token_ids"]


def _kill_busy(service: Service, stage: int) -> None:
    """Kill the replica of a stage that has the stream."""
    name = _busy(service, stage)
    for process in _processes(service):
        if process.name == name and process.pid:
            os.kill(process.pid, signal.SIGKILL)
            return
    raise RuntimeError("no replica of the last stage has the stream")


def _wait_whole(service: Service, replicas: int) -> None:
    limit = time.monotonic() + WHOLE_S
    while time.monotonic() < limit:
        found = _processes(service)
        ready = sum(p.phase == "ready" and bool(p.model) for p in found)
        if ready == replicas:
            return
        time.sleep(0.1)
    raise RuntimeError(
        f"the service did not reach {replicas} ready replicas in {WHOLE_S:g} s"
    )
