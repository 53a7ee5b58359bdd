"""False alarms: stalls that are no loss, and losses of live processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest

from multiworld import MemberLostError, MemberStalled, StaleEpochError, WorldConfig
from multiworld.rendezvous.store_server import StoreServer
from multiworld.testing import Child, ProcessFleet
from tests.citizen import Account, Membership, citizen

SILENCE_S = 2.0
CONFIG = WorldConfig(join_s=30, silence_s=SILENCE_S, stall_s=0.5)
HANG_S = 60.0


class Town:
    """Two citizens in the world ``w``, and a third in ``other`` with the first."""

    def __init__(self, fleet: ProcessFleet, store: str) -> None:
        self.fleet, self.store = fleet, store
        self.citizens: list[Child] = []

    async def settle(
        self, config: WorldConfig = CONFIG, backend: str = "direct"
    ) -> None:
        for worlds in (
            [Membership("w", 0, 2, backend), Membership("other", 0, 2)],
            [Membership("w", 1, 2, backend)],
            [Membership("other", 1, 2)],
        ):
            self.citizens.append(self.fleet.start(citizen, self.store, config, worlds))
        for child in self.citizens:
            assert await child.report() == "ready"
        await self.advances("w", 0, 1)

    async def advances(self, world: str, *members: int) -> None:
        for number in members:
            self.citizens[number].order(("advance", world, 10))
        for number in members:
            await self.citizens[number].report(HANG_S)

    async def account(self, number: int, world: str = "w") -> Account:
        self.citizens[number].order("status")
        account: Account = (await self.citizens[number].report(HANG_S))[world]
        return account

    async def broken(self, number: int) -> Account:
        """Return the error of ``w`` once raised, while the other world continues."""
        async with asyncio.timeout(HANG_S):
            while (account := await self.account(number)).error is None:
                await self.advances("other", 0, 2)
        return account

    async def stalls(self, number: int) -> list[MemberStalled]:
        self.citizens[number].order("stalled")
        events: list[MemberStalled] = await self.citizens[number].report(HANG_S)
        return events


@pytest.fixture
async def town(fork_server: None) -> AsyncIterator[Town]:
    async with AsyncExitStack() as stack:
        server = await StoreServer.listen("127.0.0.1", 0)
        stack.push_async_callback(server.close)
        fleet = await stack.enter_async_context(ProcessFleet())
        yield Town(fleet, f"tcp://127.0.0.1:{server.port}")


@pytest.mark.heavy
@pytest.mark.parametrize(
    "kind",
    [
        "pickle",
        pytest.param("json", marks=pytest.mark.heavy),
        pytest.param("sort", marks=pytest.mark.heavy),
    ],
)
async def test_call_that_holds_the_gil_is_no_loss(town: Town, kind: str) -> None:
    await town.settle()
    town.citizens[1].order(("busy", kind, 3 * SILENCE_S, 1.25 * SILENCE_S))
    begin = time.monotonic()
    await town.advances("other", 0, 2)
    longest = await town.citizens[1].report(HANG_S)
    assert longest > SILENCE_S  # otherwise the test shows nothing
    assert time.monotonic() - begin > SILENCE_S
    await town.advances("w", 0, 1)
    account = await town.account(0)
    assert (account.error, account.epoch) == (None, 1)
    stalls = await town.stalls(0)
    assert stalls
    assert {(stall.world, stall.rank) for stall in stalls} == {("w", 1)}
    assert all("computes" in stall.evidence for stall in stalls)


async def test_process_that_is_stopped_in_pulses_is_no_loss(town: Town) -> None:
    """``cpulimit`` does this: most checks find it stopped, but it makes progress."""
    await town.settle()
    pid = town.citizens[1].pid

    def pulse() -> None:
        end = time.monotonic() + 3 * SILENCE_S
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.09)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.015)

    pulses = asyncio.create_task(asyncio.to_thread(pulse))
    while not pulses.done():
        await town.advances("w", 0, 1)
    await pulses
    account = await town.account(0)
    assert (account.error, account.epoch) == (None, 1)


def helpers(pid: int) -> list[int]:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


async def test_processes_that_starve_together_are_no_loss(town: Town) -> None:
    """Their helpers starve too: the host lacks something, no process is at fault."""
    await town.settle()
    starved = [
        pid for child in town.citizens[1:] for pid in (child.pid, *helpers(child.pid))
    ]
    for pid in starved:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(1.5 * SILENCE_S)
    for pid in starved:  # they do not wake in one moment
        os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(0.15)
    await town.advances("w", 0, 1)
    await town.advances("other", 0, 2)
    for number, world in ((0, "w"), (0, "other"), (1, "w"), (2, "other")):
        account = await town.account(number, world)
        assert (account.error, account.epoch) == (None, 1)


async def test_blocked_loop_is_reported_as_waiting(town: Town) -> None:
    await town.settle()
    town.citizens[1].order(("sleep", 3.0))
    assert await town.citizens[1].report() == "slept"
    await town.advances("w", 0, 1)
    stalls = await town.stalls(0)
    assert len(stalls) == 1
    assert "waits" in stalls[0].evidence
    town.citizens[0].order(("event", "MemberResumed"))
    await town.citizens[0].report(HANG_S)


@pytest.mark.heavy
async def test_blocked_loop_is_a_loss_where_configured(town: Town) -> None:
    await town.settle(CONFIG.replace(stalled_limit_s=1.5))
    town.citizens[1].order(("sleep", 5.0))
    await town.advances("other", 0, 2)
    account = await town.broken(0)
    assert isinstance(account.error, MemberLostError)
    assert "event loop" in account.error.reason
    assert await town.citizens[1].report() == "slept"
    hung = await town.broken(1)
    assert isinstance(hung.error, StaleEpochError), hung.error


@contextmanager
def full_load(times: int) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_spin, daemon=True)
        for _ in range(times * (os.cpu_count() or 1))
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()


def _spin() -> None:
    while True:
        pass


async def _loaded(town: Town, seconds: float, config: WorldConfig) -> None:
    await town.settle(config)
    with full_load(5):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await town.advances("w", 0, 1)
            await town.advances("other", 0, 2)
    for number in (0, 1):
        account = await town.account(number)
        assert (account.error, account.epoch) == (None, 1)


@pytest.mark.heavy
async def test_cores_five_times_over_subscribed_are_no_loss(town: Town) -> None:
    """The observers are late as well, so they accuse nobody."""
    await _loaded(town, 8, CONFIG)


@pytest.mark.heavy
@pytest.mark.timeout(900)
async def test_ten_minutes_of_full_load_are_no_loss(town: Town) -> None:
    await _loaded(town, 600, WorldConfig(join_s=30))


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["pickle", "json", "sort"])
async def test_long_call_that_holds_the_gil_is_no_loss(town: Town, kind: str) -> None:
    await town.settle(WorldConfig(join_s=30))
    town.citizens[1].order(("busy", kind, 20.0, 10.0))
    await town.citizens[1].report(200)
    await town.advances("w", 0, 1)
    account = await town.account(0)
    assert (account.error, account.epoch) == (None, 1)


async def test_revived_process_is_fenced_and_can_join_again(town: Town) -> None:
    for backend in ("direct", "gloo"):
        await town.settle(CONFIG, backend)
        stopped = town.citizens[1]
        stopped.stop()
        account = await town.broken(0)
        epoch = account.epoch
        assert isinstance(account.error, MemberLostError)
        assert "stopped" in account.error.reason
        # A replacement takes its place while it is stopped.
        replacement = town.fleet.start(
            citizen, town.store, CONFIG, [Membership("w", 1, 2, backend)]
        )
        town.citizens[0].order(("join", Membership("w", 0, 2, backend)))
        assert await town.citizens[0].report() is None
        assert await replacement.report() == "ready"
        await town.advances("w", 0)
        stopped.go_on()
        revived = await town.broken(1)
        assert isinstance(revived.error, StaleEpochError), revived.error
        assert (revived.error.seen, revived.error.expected) == (epoch, epoch + 1)
        await town.advances("w", 0)
        replacement.order("leave")
        await replacement.done()
        stopped.order(("join", Membership("w", 1, 2, backend)))
        town.citizens[0].order(("join", Membership("w", 0, 2, backend)))
        assert await stopped.report() is None
        assert await town.citizens[0].report() is None
        assert (await town.account(1)).epoch == epoch + 2
        await town.advances("w", 0, 1)
        for child in town.citizens:
            child.order("leave")
            await child.done()
        town.citizens.clear()
