"""The contract of engines, run on our own and on the adapters of others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from multiworld.serve.engine.external import address_choice
from multiworld.serve.engine.external.engine_process import EngineProcess, free_port
from multiworld.serve.engine.external.llama_cpp import LlamaCppEngine
from multiworld.serve.engine.external.openai_servers import OpenAiEngine
from multiworld.serve.engine.external.vllm import VllmEngine
from multiworld.serve.engine.external.whole_engine import (
    EXIT_LOST,
    EngineLostError,
    EngineSettings,
    EngineToken,
    Run,
)
from multiworld.serve.engine.models import decoder
from multiworld.serve.machines.usage import family_of
from multiworld.serve.replica.hang_guard import EXIT_HUNG
from multiworld.serve.replica.scheduling.scheduler import Scheduler
from multiworld.serve.replica.sequences.engine import Engine
from multiworld.serve.replica.sequences.generation_worker import GenerationWorker
from multiworld.serve.replica.sequences.recovery import ReplicaSettings
from multiworld.serve.replica.whole_engines.engine_worker import (
    EngineWorker,
    MakeEngine,
)
from multiworld.serve.spec.schema import GenerationSpec
from multiworld.serve.spec.stage import StageContext
from multiworld.serve.text.limits import limits_of
from multiworld.serve.wire.generation_messages import Sampling
from tests import fake_token_server, fake_vllm
from tests.contract.engines import (
    CHECKS,
    COUNT,
    KINDS,
    NAME,
    PROMPT,
    WAIT_S,
    Bench,
    EngineCheck,
    replace_sampling,
)
from tests.tiny_decoder import VOCABULARY, save_decoder

MAX_SEQS = 8
START_S = 40.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_decoder(tmp_path_factory.mktemp("decoder"))


def staged(folder: Path) -> GenerationWorker:
    spec = GenerationSpec(max_num_seqs=MAX_SEQS, deterministic=True)
    model = decoder.model(str(folder), deterministic=True)
    assert model.generation is not None
    engine = Engine(
        model.stages[0], True, 1, model.generation, None, True, time.monotonic
    )
    settings = ReplicaSettings(
        name=NAME, stage=0, stage_name="all", is_last=True, log_bytes=0
    )
    limits = limits_of(spec, model.generation, 1)
    return GenerationWorker(settings, engine, Scheduler(limits))


def whole(
    make: MakeEngine,
    folder: Path,
    hung_s: float = 30.0,
    exits: list[int] | None = None,
    **more: Any,
) -> EngineWorker:
    """Return a replica with the engine of an adapter."""
    settings = EngineSettings(
        replica=NAME,
        path=str(folder),
        vocabulary=VOCABULARY,
        max_num_seqs=MAX_SEQS,
        hung_s=hung_s,
        **more,
    )
    codes = [] if exits is None else exits
    return EngineWorker(make, settings, exit_process=codes.append)


ADAPTERS = ("terse", "rhymed")


def vllm(folder: Path, **more: Any) -> EngineWorker:
    """Return a replica with the server that stands in for vLLM."""
    python = str(fake_vllm.interpreter(folder))
    adapters = {name: str(fake_vllm.adapter(folder / name)) for name in ADAPTERS}
    return whole(VllmEngine, folder, python=python, adapters=adapters, **more)


def llama_cpp(folder: Path, **more: Any) -> EngineWorker:
    (folder / "weights.gguf").touch()
    python = str(fake_token_server.interpreter(folder, "--llama"))
    adapters = {name: str(folder / f"{name}.lora") for name in ADAPTERS}
    for path in adapters.values():
        Path(path).touch()
    return whole(LlamaCppEngine, folder, python=python, adapters=adapters, **more)


def openai_servers(folder: Path, **more: Any) -> EngineWorker:
    """Return a replica that uses an external server."""
    args = {"urls": [server_of_somebody_else(folder)]}
    adapters = {name: f"{name}-there" for name in ADAPTERS}
    return whole(OpenAiEngine, folder, args=args, adapters=adapters, **more)


OTHERS: list[EngineProcess] = []
"""External servers, killed after this module's tests."""


def server_of_somebody_else(folder: Path, *flags: str) -> str:
    port = free_port()
    program = str(fake_token_server.interpreter(folder, *flags))
    OTHERS.append(EngineProcess([program, "", "", "--port", str(port)], {}))
    return f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module", autouse=True)
def _no_server_stays() -> Iterator[None]:
    yield
    while OTHERS:
        OTHERS.pop().kill()


ENGINES: dict[str, Callable[[Path], GenerationWorker | EngineWorker]] = {
    "staged": staged,
    "vllm": vllm,
    "llama.cpp": llama_cpp,
    "openai": openai_servers,
}
WITHOUT = {"llama.cpp": ["structured"], "openai": ["structured"]}
"""Kinds of requests that an engine refuses."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def bench(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Bench]:
    worker = ENGINES[request.param](folder)
    await load(worker)
    adapters = () if request.param == "staged" else ADAPTERS
    async with Bench(worker, WITHOUT.get(request.param, ()), adapters) as made:
        yield made
    worker.close()


async def load(worker: GenerationWorker | EngineWorker) -> None:
    """Load the worker; retry while an external server does not answer yet."""
    async with asyncio.timeout(START_S):
        while True:
            try:
                return await worker.load(StageContext())
            except EngineLostError:
                await asyncio.sleep(0.1)  # it does not answer yet


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_engine_keeps_the_contract(check: EngineCheck, bench: Bench) -> None:
    await check(bench)
    await bench.is_at_rest()


MISBEHAVING = {"vllm": vllm, "llama.cpp": llama_cpp, "openai": openai_servers}


@pytest.mark.parametrize("bench", MISBEHAVING, indirect=True)
@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (fake_vllm.REFUSE, "InvalidRequestError"),
        (fake_vllm.BROKEN, None),
        (fake_vllm.GARBAGE, None),
        (fake_vllm.FOREIGN, None),
        (fake_vllm.HUGE, None),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_engine_that_misbehaves_costs_one_sequence(
    token: int, kind: str | None, bench: Bench
) -> None:
    """The error goes to the client or, if it is None, the sequence to its gateway."""
    other = bench.begin(KINDS["sampled"])
    bad = bench.begin(KINDS["greedy"], prompt=[token, *PROMPT])
    error = await bench.failed(bad)
    assert (error and error.kind) == kind
    assert len(await bench.whole(other)) == COUNT
    await bench.is_at_rest()


class Adapter:
    """An adapter that misbehaves with some prompts."""

    usage, phase = 0.0, ""

    def __init__(self, settings: EngineSettings) -> None:
        del settings

    async def start(self) -> None:
        pass

    async def wait_lost(self) -> str:
        return await asyncio.Future[str]()

    def stopped_s(self) -> float:
        return 0.0

    def check(self, sampling: Sampling) -> None:
        if sampling.top_k == BAD_TOP_K:
            raise RuntimeError("a mistake")

    async def generate(self, run: Run) -> AsyncGenerator[Sequence[EngineToken]]:
        for index in range(COUNT):
            await asyncio.sleep(0.01)
            match run.tokens[0] if index == 3 else None:
                case fake_vllm.GARBAGE:
                    yield [EngineToken(torch.tensor(5))]  # type: ignore[arg-type]
                case fake_vllm.BROKEN:
                    yield [EngineToken(5, torch.tensor(0.5))]  # type: ignore[arg-type]
                case fake_vllm.DIE:
                    raise asyncio.CancelledError
                case fake_vllm.HANG:
                    time.sleep(4.0)  # noqa: ASYNC251 - what must not be done
            yield [EngineToken(5 + index)]

    def kill(self) -> None:
        pass

    async def close(self) -> None:
        pass


BAD_TOP_K = 13


@pytest.mark.parametrize("token", [fake_vllm.GARBAGE, fake_vllm.BROKEN, fake_vllm.DIE])
async def test_adapter_that_misbehaves_costs_one_sequence(
    token: int, folder: Path
) -> None:
    """Whatever an adapter returns or raises, edges to gateways stay open."""
    worker = whole(Adapter, folder)
    await load(worker)
    async with Bench(worker) as bench:
        other = bench.begin(KINDS["greedy"])
        bad = bench.begin(KINDS["greedy"], prompt=[token, *PROMPT])
        assert await bench.failed(bad) is None
        refused = bench.begin(replace_sampling(KINDS["greedy"], top_k=BAD_TOP_K))
        error = await bench.failed(refused)
        assert error is not None
        assert error.kind == "ModelFailedError"
        assert len(await bench.whole(other)) == COUNT
        await bench.is_at_rest()
    worker.close()


async def test_adapter_that_blocks_the_loop_ends_the_replica(folder: Path) -> None:
    """A thread finds it: the blocked loop cannot."""
    exits: list[int] = []
    worker = whole(Adapter, folder, hung_s=1.0, exits=exits)
    await load(worker)
    async with Bench(worker) as bench:
        bench.begin(KINDS["greedy"], prompt=[fake_vllm.HANG, *PROMPT])
        async with asyncio.timeout(WAIT_S):
            while not exits:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    worker.close()
    assert exits[0] == EXIT_HUNG


class Unkillable(Adapter):
    """An adapter whose ``kill`` raises, as asyncio's does for a process that ended."""

    def kill(self) -> None:
        raise ProcessLookupError


class Ended(Unkillable):
    async def wait_lost(self) -> str:
        return "it ended"


@pytest.mark.parametrize("is_lost", [False, True])
async def test_replica_exits_even_if_its_engine_cannot_be_killed(
    is_lost: bool, folder: Path
) -> None:
    exits: list[int] = []
    make = Ended if is_lost else Unkillable
    worker = whole(make, folder, hung_s=1.0, exits=exits)
    await load(worker)
    if is_lost:
        await worker.run()
    else:
        async with Bench(worker) as bench:
            bench.begin(KINDS["greedy"], prompt=[fake_vllm.HANG, *PROMPT])
            async with asyncio.timeout(WAIT_S):
                while not exits:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    worker.close()
    assert exits[0] == (EXIT_LOST if is_lost else EXIT_HUNG)


class Sluggish(Adapter):
    """An adapter that aborts slowly, and counts its concurrent runs."""

    abort_s = 0.2
    running = most = 0

    async def generate(self, run: Run) -> AsyncGenerator[Sequence[EngineToken]]:
        Sluggish.running += 1
        Sluggish.most = max(Sluggish.most, Sluggish.running)
        try:
            for index in range(COUNT):
                await asyncio.sleep(0.02)
                yield [EngineToken(5 + index)]
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(self.abort_s)
            Sluggish.running -= 1


async def test_engine_that_is_slow_to_abort_never_runs_more_than_allowed(
    folder: Path,
) -> None:
    """An aborted run keeps its slot until the engine has released it."""
    worker = whole(Sluggish, folder)
    await load(worker)
    async with Bench(worker) as bench:
        for _ in range(3 * MAX_SEQS):
            start = bench.begin(KINDS["greedy"])
            await bench.has(start, 1)
            bench.end(start)
        assert len(await bench.whole(bench.begin(KINDS["greedy"]))) == COUNT
        await bench.is_at_rest()
    worker.close()
    assert Sluggish.most == MAX_SEQS


async def test_run_that_cannot_be_cancelled_ends_the_replica(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its slot would be lost for good."""
    monkeypatch.setattr(Sluggish, "abort_s", 3600.0)
    exits: list[int] = []
    worker = whole(Sluggish, folder, hung_s=0.2, exits=exits)
    await load(worker)
    async with Bench(worker) as bench:
        start = bench.begin(KINDS["greedy"])
        await bench.has(start, 1)
        bench.end(start)
        async with asyncio.timeout(WAIT_S):
            while not exits:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # the second time, it obeys
    worker.close()
    assert exits[0] == EXIT_HUNG


@pytest.mark.parametrize("bench", ["vllm", "llama.cpp"], indirect=True)
@pytest.mark.asyncio(loop_scope="module")
async def test_sequence_that_ends_early_is_returned(bench: Bench) -> None:
    """It goes back to its gateway, which retries it."""
    early = bench.begin(KINDS["greedy"], prompt=[fake_vllm.EARLY, *PROMPT])
    assert await bench.failed(early) is None
    await bench.is_at_rest()


@pytest.mark.parametrize("bench", ["openai"], indirect=True)
@pytest.mark.asyncio(loop_scope="module")
async def test_sequence_that_ends_early_is_requested_again(bench: Bench) -> None:
    early = bench.begin(KINDS["greedy"], prompt=[fake_vllm.EARLY, *PROMPT])
    assert len(await bench.whole(early)) == COUNT
    await bench.is_at_rest()


@pytest.mark.parametrize("bench", ["vllm", "openai"], indirect=True)
@pytest.mark.asyncio(loop_scope="module")
async def test_engine_that_floods_is_cut_off(bench: Bench) -> None:
    start = bench.begin(KINDS["greedy"], prompt=[fake_vllm.FLOOD, *PROMPT])
    assert len(await bench.whole(start)) == COUNT
    await bench.is_at_rest()


@pytest.mark.parametrize("engine", MISBEHAVING)
@pytest.mark.parametrize("token", [fake_vllm.DIE, fake_vllm.HANG])
@pytest.mark.asyncio(loop_scope="module")
async def test_engine_that_is_lost_ends_the_replica(
    token: int, engine: str, folder: Path
) -> None:
    """Lost: it died, or sent nothing while a sequence ran."""
    exits: list[int] = []
    worker = MISBEHAVING[engine](folder, hung_s=1.0, exits=exits)
    await load(worker)
    async with Bench(worker) as bench:
        bench.begin(KINDS["greedy"], prompt=[token, *PROMPT])
        async with asyncio.timeout(WAIT_S):
            while not exits:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        if token == fake_vllm.DIE or engine != "openai":  # an external server hangs on
            await bench.run_ended()
    assert exits[0] == (EXIT_HUNG if token == fake_vllm.HANG else EXIT_LOST)


@pytest.mark.parametrize("bench", ["vllm"], indirect=True)
@pytest.mark.asyncio(loop_scope="module")
async def test_used_memory_of_the_engine_is_reported(bench: Bench) -> None:
    """Autoscaling uses it, as it does that of our own engine."""
    async with asyncio.timeout(WAIT_S):
        while bench.worker.report().kv_usage != 0.25:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("bench", MISBEHAVING, indirect=True)
@pytest.mark.asyncio(loop_scope="module")
async def test_steps_of_an_engine_are_counted(bench: Bench) -> None:
    """Autoscaling learns the step time from them; a step is one token of each run."""
    before = bench.worker.report()
    starts = [bench.begin(KINDS["greedy"]) for _ in range(4)]
    for start in starts:
        await bench.whole(start)
    now = bench.worker.report()
    steps = now.counts["steps"] - before.counts.get("steps", 0)
    rows = now.counts["rows"] - before.counts.get("rows", 0)
    assert COUNT <= steps + 1 <= 4 * COUNT + 1
    assert rows == 4 * (len(PROMPT) + COUNT)
    assert now.computed_s > before.computed_s


@pytest.mark.parametrize("flags", [(), ("--llama",)])
@pytest.mark.asyncio(loop_scope="module")
async def test_server_that_continues_differently_costs_no_stream(
    flags: tuple[str, ...], folder: Path
) -> None:
    """A stream that cannot be continued exactly continues with newly sampled tokens."""
    args = {"urls": [server_of_somebody_else(folder, *flags)]}
    worker = whole(OpenAiEngine, folder, args=args)
    await load(worker)
    async with Bench(worker) as bench:
        spoilt = [fake_token_server.SPOILT, *PROMPT]
        tokens = await bench.whole(bench.begin(KINDS["sampled"], prompt=spoilt))
        again = bench.begin(KINDS["sampled"], tokens[:5], prompt=spoilt)
        assert len(await bench.whole(again)) == COUNT - 5
        await bench.is_at_rest()


@pytest.mark.asyncio(loop_scope="module")
async def test_server_without_token_ids_must_be_declared_inexact(folder: Path) -> None:
    """Such a server sends no token ids: its streams continue from their text."""
    url = server_of_somebody_else(
        folder, "--text", "--tokenizer", str(folder / "tokenizer.json")
    )
    exact = whole(OpenAiEngine, folder, args={"urls": [url]})
    worker = whole(OpenAiEngine, folder, args={"urls": [url]}, exact=False)
    await load(worker)
    with pytest.raises(EngineLostError, match="exact: false"):
        await exact.load(StageContext())
    async with Bench(worker) as bench:
        tokens = await bench.whole(bench.begin(KINDS["greedy"]))
        assert len(tokens) == COUNT
        for cut in range(1, COUNT):
            assert await bench.whole(bench.begin(KINDS["greedy"], tokens[:cut]))
        assert len(await bench.whole(bench.begin(KINDS["sampled"]))) == COUNT
        await bench.is_at_rest()


@pytest.mark.parametrize("make", [vllm, llama_cpp])
@pytest.mark.asyncio(loop_scope="module")
async def test_engine_that_is_stopped_while_it_starts_is_lost(
    make: Callable[..., EngineWorker], folder: Path
) -> None:
    worker, before = make(folder), set(family_of(os.getpid()))
    loading = asyncio.ensure_future(worker.load(StageContext()))
    while not (started := set(family_of(os.getpid())) - before):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for pid in started:
        os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineLostError, match="was stopped"):
            await loading


@pytest.mark.asyncio(loop_scope="module")
async def test_replica_leaves_for_a_server_that_serves_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an outage of some servers, each of them has a replica again."""
    monkeypatch.setattr(address_choice, "LOOK_S", 0.1)
    late = free_port()
    urls = [server_of_somebody_else(folder), f"http://127.0.0.1:{late}"]
    first, second = (whole(OpenAiEngine, folder, args={"urls": urls}) for _ in range(2))
    await load(first)
    await load(second)
    async with Bench(first) as staying, Bench(second) as leaving:
        program = str(fake_token_server.interpreter(folder))
        OTHERS.append(EngineProcess([program, "", "", "--port", str(late)], {}))
        await leaving.run_ended()
        assert len(await staying.whole(staying.begin(KINDS["greedy"]))) == COUNT


@pytest.mark.asyncio(loop_scope="module")
async def test_replica_stays_at_its_server_when_the_others_leave_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every update does this: the new replica starts beside the old one."""
    monkeypatch.setattr(address_choice, "LOOK_S", 0.1)
    args = {"urls": [server_of_somebody_else(folder)]}
    old, new, last = (whole(OpenAiEngine, folder, args=args) for _ in range(3))
    await load(old)
    await load(new)
    async with Bench(new) as staying:
        async with Bench(old) as leaving:
            assert len(await leaving.whole(leaving.begin(KINDS["greedy"]))) == COUNT
        await asyncio.sleep(1.0)  # ten looks
        assert len(await staying.whole(staying.begin(KINDS["greedy"]))) == COUNT
        await load(last)
        async with Bench(last) as beside:
            assert len(await beside.whole(beside.begin(KINDS["greedy"]))) == COUNT
        assert len(await staying.whole(staying.begin(KINDS["greedy"]))) == COUNT


@pytest.mark.asyncio(loop_scope="module")
async def test_llama_cpp_needs_a_slot_for_each_sequence(folder: Path) -> None:
    """The server reports how many slots it has; a second replica may not use them."""
    args = {"urls": [server_of_somebody_else(folder, "--llama")]}
    first = whole(OpenAiEngine, folder, args=args)
    await load(first)
    second = whole(OpenAiEngine, folder, args=args)
    with pytest.raises(EngineLostError, match="another replica"):
        await second.load(StageContext())
    async with Bench(first) as bench:
        assert len(await bench.whole(bench.begin(KINDS["greedy"]))) == COUNT
