"""A replica with a whole engine that is silent or busy, under a fake clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from multiworld.serve.deadlines import BUSY_S
from multiworld.serve.engine.external.whole_engine import (
    BusyError,
    EngineSettings,
    EngineToken,
    Run,
)
from multiworld.serve.replica.hang_guard import EXIT_HUNG
from multiworld.serve.replica.whole_engines.engine_worker import (
    LOOK_S,
    PREFILL,
    EngineWorker,
)
from multiworld.serve.wire.generation_messages import Sampling
from tests.contract.engines import NAME, Bench

HUNG_S = 3.0


class Played:
    """An engine that never generates a token, or reports that it is busy."""

    has_adapters = False
    usage, phase = 0.0, ""

    def __init__(self, *, is_busy: bool) -> None:
        self._is_busy = is_busy

    async def start(self) -> None:
        pass

    async def wait_lost(self) -> str:
        await asyncio.Event().wait()
        return ""

    def stopped_s(self) -> float:
        return 0.0

    async def close(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def check(self, sampling: Sampling) -> None:
        pass

    async def generate(self, run: Run) -> AsyncGenerator[Sequence[EngineToken]]:
        if self._is_busy:
            raise BusyError("no room")
        await asyncio.Event().wait()
        yield ()


class Timed:
    """A worker with a fake clock, and the codes with which it would have exited."""

    def __init__(self, *, is_busy: bool = False) -> None:
        self.now, self.exits = 100.0, list[int]()
        settings = EngineSettings(
            replica=NAME, path="", vocabulary=300, max_num_seqs=4, hung_s=HUNG_S
        )
        self.worker = EngineWorker(
            lambda _: Played(is_busy=is_busy),
            settings,
            clock=lambda: self.now,
            exit_process=self.exits.append,
        )

    def look(self, late_s: float = 0.0) -> None:
        self.now += LOOK_S + late_s
        self.worker.tick()


async def begun(worker: EngineWorker) -> Bench:
    bench = Bench(worker)
    bench.begin(Sampling(max_tokens=9))
    for _ in range(5):
        await asyncio.sleep(0)
    return bench


@pytest.mark.parametrize("late_s", [0.0, 0.4, 2.0])
async def test_hang_is_found_on_a_machine_that_pauses_repeatedly(
    late_s: float,
) -> None:
    """Only the pauses themselves are excluded from the limit."""
    timed = Timed()
    await begun(timed.worker)
    looks = 0
    while not timed.exits and looks < 100:
        looks += 1
        timed.look(late_s if looks % 10 == 0 else 0.0)
    assert timed.exits[:1] == [EXIT_HUNG]
    assert HUNG_S <= looks * LOOK_S <= HUNG_S + 1.0
    timed.worker.close()


async def test_long_prompt_that_is_cancelled_does_not_make_the_engine_hang() -> None:
    """Until then, the engine may have computed that prompt, and nothing else."""
    timed = Timed()
    bench = Bench(timed.worker)
    long = bench.begin(Sampling(max_tokens=9), prompt=(1,) * int(20 * PREFILL))
    bench.begin(Sampling(max_tokens=9))
    for _ in range(int(15 / LOOK_S)):
        timed.look()
    bench.end(long)
    for _ in range(5):
        await asyncio.sleep(0)
    for _ in range(int(5 / LOOK_S)):
        timed.look()
    assert timed.exits == []
    # But prompts that are cancelled again and again hide no engine that hangs.
    for _ in range(int(30 / LOOK_S)):
        again = bench.begin(Sampling(max_tokens=9), prompt=(1,) * int(5 * PREFILL))
        timed.look()
        bench.end(again)
        for _ in range(5):
            await asyncio.sleep(0)
    assert timed.exits[:1] == [EXIT_HUNG]
    timed.worker.close()


async def test_engine_that_is_busy_now_and_then_has_not_failed() -> None:
    """It has failed only if it reports so for long, without any token."""
    timed = Timed(is_busy=True)
    for _ in range(3):
        await begun(timed.worker)
        timed.now += 3600.0
    assert not timed.worker.counts["failed_runs"]
    for _ in range(8):
        await begun(timed.worker)
        timed.now += BUSY_S / 4
    assert timed.worker.counts["failed_runs"] > 0
    timed.worker.close()
