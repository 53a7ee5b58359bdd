"""The contract of engines, run on our own and on adapters of others."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from multiworld.serve.generation.engines.engine_worker import EngineWorker
from multiworld.serve.generation.engines.vllm import VllmEngine
from multiworld.serve.generation.engines.whole_engine import EngineSettings
from multiworld.serve.generation.limits import limits_of
from multiworld.serve.generation.models import decoder
from multiworld.serve.generation.replica.engine_thread import EngineThread
from multiworld.serve.generation.replica.generation_worker import (
    GenerationWorker,
    ReplicaSettings,
)
from multiworld.serve.generation.replica.scheduler import Scheduler
from multiworld.serve.spec.schema import GenerationSpec
from multiworld.serve.spec.stage import StageContext
from multiworld.serve.transport.generation_messages import Sampling
from tests import fake_vllm
from tests.contract.engines import (
    CHECKS,
    KINDS,
    NAME,
    PROMPT,
    Bench,
    EngineCheck,
    replace_count,
)
from tests.tiny_decoder import VOCABULARY, save_decoder

MAX_SEQS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small decoder."""
    return save_decoder(tmp_path_factory.mktemp("decoder"))


def staged(folder: Path) -> GenerationWorker:
    """Return a replica with our own engine, in one stage."""
    spec = GenerationSpec(max_num_seqs=MAX_SEQS, deterministic=True)
    model = decoder.model(str(folder), deterministic=True)
    assert model.generation is not None
    engine = EngineThread(
        model.stages[0], True, 1, model.generation, None, True, time.monotonic
    )
    settings = ReplicaSettings(
        name=NAME, stage=0, stage_name="all", is_last=True, log_bytes=0
    )
    limits = limits_of(spec, model.generation, 1)
    return GenerationWorker(settings, engine, Scheduler(limits))


def vllm(
    folder: Path, hung_s: float = 30.0, exits: list[int] | None = None
) -> EngineWorker:
    """Return a replica with the server that stands in for vLLM."""
    settings = EngineSettings(
        replica=NAME,
        path=str(folder),
        vocabulary=VOCABULARY,
        python=str(fake_vllm.interpreter(folder)),
        max_num_seqs=MAX_SEQS,
    )
    codes = [] if exits is None else exits
    return EngineWorker(VllmEngine, settings, hung_s, exit_process=codes.append)


ENGINES = {"staged": staged, "vllm": vllm}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def bench(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Bench]:
    """Return a replica of each kind."""
    worker = ENGINES[request.param](folder)
    await worker.load(StageContext())
    async with Bench(worker) as made:
        yield made
    worker.close()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_engine_keeps_the_contract(check: EngineCheck, bench: Bench) -> None:
    """Our own engine and the adapters of others behave alike."""
    await check(bench)
    assert bench.worker.leaks() == {}
