"""The contract of engines, run on our own and on adapters of others."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from multiworld.serve.generation.engines.engine_worker import (
    EXIT_LOST,
    EngineWorker,
)
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
from multiworld.serve.replica.hang_guard import EXIT_HUNG
from multiworld.serve.spec.schema import GenerationSpec
from multiworld.serve.spec.stage import StageContext
from tests import fake_vllm
from tests.contract.engines import (
    CHECKS,
    COUNT,
    KINDS,
    NAME,
    PROMPT,
    Bench,
    EngineCheck,
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


ENGINES: dict[str, Callable[[Path], GenerationWorker | EngineWorker]] = {
    "staged": staged,
    "vllm": vllm,
}


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
    await bench.is_at_rest()


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (fake_vllm.REFUSE, "InvalidRequestError"),
        (fake_vllm.BROKEN, None),
        (fake_vllm.GARBAGE, None),
        (fake_vllm.FOREIGN, None),
        (fake_vllm.HUGE, None),
        (fake_vllm.EARLY, None),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_engine_that_misbehaves_costs_one_sequence(
    token: int, kind: str | None, folder: Path
) -> None:
    """It goes to the client, or back to its gateway; others are not affected."""
    worker = vllm(folder)
    await worker.load(StageContext())
    async with Bench(worker) as bench:
        other = bench.begin(KINDS["sampled"])
        bad = bench.begin(KINDS["greedy"], prompt=[token, *PROMPT])
        error = await bench.failed(bad)
        assert (error and error.kind) == kind
        assert len(await bench.whole(other)) == COUNT
        await bench.is_at_rest()


@pytest.mark.asyncio(loop_scope="module")
async def test_engine_that_floods_is_cut_off(folder: Path) -> None:
    """No token comes after the last one that was asked for."""
    worker = vllm(folder)
    await worker.load(StageContext())
    async with Bench(worker) as bench:
        start = bench.begin(KINDS["greedy"], prompt=[fake_vllm.FLOOD, *PROMPT])
        assert len(await bench.whole(start)) == COUNT
        await bench.is_at_rest()


@pytest.mark.parametrize("token", [fake_vllm.DIE, fake_vllm.HANG])
@pytest.mark.asyncio(loop_scope="module")
async def test_engine_that_is_lost_ends_the_replica(token: int, folder: Path) -> None:
    """If it dies, or sends nothing while a sequence runs, its process exits."""
    exits: list[int] = []
    worker = vllm(folder, hung_s=1.0, exits=exits)
    await worker.load(StageContext())
    async with Bench(worker) as bench:
        bench.begin(KINDS["greedy"], prompt=[token, *PROMPT])
        await bench.run_ended()
    assert exits[0] == (EXIT_HUNG if token == fake_vllm.HANG else EXIT_LOST)
