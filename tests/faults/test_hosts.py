"""Faults of hosts and networks, on hosts made of network namespaces."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from multiworld import (
    MemberLostError,
    StaleEpochError,
    StoreUnreachableError,
    WorldConfig,
)
from multiworld.testing import Child, ProcessFleet
from multiworld.testing.hosts import Host, Hosts, unavailable
from tests.citizen import Account, Membership, citizen, store_host

pytestmark = pytest.mark.skipif(
    unavailable() is not None, reason=f"no hosts: {unavailable()}"
)
if unavailable() and os.environ.get("MULTIWORLD_REQUIRE_NAMESPACES") == "1":
    raise RuntimeError(
        f"MULTIWORLD_REQUIRE_NAMESPACES=1, but no hosts: {unavailable()}"
    )

CONFIG = WorldConfig(join_s=20, silence_s=2.0)
NOTICE_S = 20.0
"""Hang bound in seconds, not a timing."""

BACKENDS = ["direct", "gloo"]
ONE_SUFFICES = pytest.mark.parametrize(
    "country",
    ["direct", pytest.param("gloo", marks=pytest.mark.heavy)],
    indirect=True,
)


class Country:
    """Three hosts with a citizen each, another one on host 1, and a separate store.

    ``all`` is the world of the three citizens; ``far`` is hosts 0 and 2 alone; ``near``
    is the two citizens of host 1. Whatever happens to host 1's network breaks ``all``,
    and neither ``far`` nor ``near``.
    """

    def __init__(self, fleet: ProcessFleet, hosts: Hosts, backend: str) -> None:
        self.fleet, self.hosts, self.backend = fleet, hosts, backend
        self.store_host = hosts[3]
        self.store_address = f"tcp://{self.store_host.address}:29500"
        self.citizens: list[Child] = []

    async def settle(self) -> None:
        self.store = self.fleet.start(
            store_host, self.store_host.address, host=self.store_host
        )
        assert await self.store.report() == "ready"
        kind = self.backend
        worlds = [
            [Membership("all", 0, 3, kind), Membership("far", 0, 2, kind)],
            [Membership("all", 1, 3, kind), Membership("near", 0, 2, kind)],
            [Membership("all", 2, 3, kind), Membership("far", 1, 2, kind)],
            [Membership("near", 1, 2, kind)],
        ]
        places = [self.hosts[0], self.hosts[1], self.hosts[2], self.hosts[1]]
        for place, memberships in zip(places, worlds, strict=True):
            self.start(place, memberships)
        for child in self.citizens:
            assert await child.report() == "ready"
        await self.advances("all", (0, 1, 2))

    def start(self, place: Host, memberships: list[Membership]) -> Child:
        child = self.fleet.start(
            citizen, self.store_address, CONFIG, memberships, host=place
        )
        self.citizens.append(child)
        return child

    async def status(self, number: int) -> dict[str, Account]:
        child = self.citizens[number]
        child.order("status")
        status: dict[str, Account] = await child.report()
        return status

    async def advances(self, world: str, members: tuple[int, ...]) -> None:
        for number in members:
            self.citizens[number].order(("advance", world, 5))
        for number in members:
            await self.citizens[number].report(NOTICE_S)

    async def errors(
        self, *members: int, others: tuple[str, ...] = ("far", "near")
    ) -> list[Account]:
        """Return the accounts of ``all`` once these members know that it is broken."""
        accounts = []
        async with asyncio.timeout(NOTICE_S):
            for number in members:
                while (account := (await self.status(number))["all"]).error is None:
                    await self.undisturbed(others)
                accounts.append(account)
        return accounts

    async def undisturbed(self, others: tuple[str, ...] = ("far", "near")) -> None:
        """Check that the other worlds make rounds now, and at a steady rate."""
        for world in others:
            member = {"far": 0, "near": 3}[world]
            before, begin = (await self.status(member))[world], time.monotonic()
            await asyncio.sleep(0.2)  # the time over which rounds are counted
            after, end = (await self.status(member))[world], time.monotonic()
            rate = (after.rounds - before.rounds) / (end - begin)
            assert after.error is None, (world, after.error)
            # On an idle machine, each world makes a hundred rounds a second and more.
            assert rate > 10, f"{world} makes {rate:.1f} rounds a second"


@pytest.fixture(params=BACKENDS)
async def country(
    request: pytest.FixtureRequest, fork_server: None
) -> AsyncIterator[Country]:
    async with AsyncExitStack() as stack:
        hosts = stack.enter_context(Hosts(4))
        fleet = await stack.enter_async_context(ProcessFleet())
        country = Country(fleet, hosts, request.param)
        await country.settle()
        yield country


def named(account: Account) -> int:
    """Return the rank that a member's error names."""
    assert isinstance(account.error, MemberLostError), account.error
    return account.error.rank


async def test_silent_partition_is_named_on_both_sides(country: Country) -> None:
    """Each side names the other without help from the kernel."""
    country.hosts[1].cut()
    cut_at = time.monotonic()
    zero, one, two = await country.errors(0, 1, 2)
    assert (named(zero), named(two)) == (1, 1)
    assert named(one) in (0, 2)
    for account in (zero, one, two):
        assert account.failed_at - cut_at >= CONFIG.silence_s - 0.5
        assert "silent" in str(account.error)
    await country.undisturbed()
    country.citizens[1].order(("lost", "all", {0, 2}))  # grows to the true set
    await country.citizens[1].report(NOTICE_S)
    country.hosts[1].restore()
    await rejoin(country)


async def rejoin(country: Country) -> None:
    for number in (0, 1, 2):
        wanted = Membership("all", number, 3, country.backend)
        country.citizens[number].order(("join", wanted))
    for number in (0, 1, 2):
        assert await country.citizens[number].report() is None
    assert (await country.status(0))["all"].epoch == 2
    await country.advances("all", (0, 1, 2))
    await country.undisturbed()


@ONE_SUFFICES
async def test_one_way_partition_is_noticed_on_both_sides(country: Country) -> None:
    country.hosts[1].cut_towards(country.hosts[0])
    zero, one, two = await country.errors(0, 1, 2)
    # Citizen 0 hears nothing from 1. Citizen 1 hears 0, which reports that to it.
    assert named(zero) == 1
    assert isinstance(one.error, StaleEpochError) or named(one) == 0
    assert named(two) in (0, 1)
    await country.undisturbed()
    country.hosts[1].restore()
    await rejoin(country)


@ONE_SUFFICES
async def test_pair_that_cannot_talk_accuses_each_other(country: Country) -> None:
    country.hosts[0].cut_towards(country.hosts[1])
    country.hosts[1].cut_towards(country.hosts[0])
    zero, one, two = await country.errors(0, 1, 2)
    accused = set()
    for account, other in ((zero, 1), (one, 0)):
        if isinstance(account.error, MemberLostError):
            assert account.error.rank == other
            accused.add(other)
    assert accused
    assert named(two) in accused
    await country.undisturbed()
    country.hosts[0].restore()
    country.hosts[1].restore()
    await rejoin(country)


@ONE_SUFFICES
async def test_network_that_recovers_in_time_is_no_fault(country: Country) -> None:
    """TCP backs off during a stall, which must not count as silence."""
    for _ in range(3):
        country.hosts[1].cut()
        # How long the network is away, and back: the commands take time, too.
        await asyncio.sleep(0.7)
        country.hosts[1].restore()
        await asyncio.sleep(0.4)
    await country.undisturbed()
    await country.advances("all", (0, 1, 2))
    for number in (0, 1, 2):
        account = (await country.status(number))["all"]
        assert (account.error, account.epoch) == (None, 1)


@ONE_SUFFICES
async def test_slow_network_is_no_fault(country: Country) -> None:
    country.hosts[1].throttle(1_000_000)
    for _ in range(5):
        await asyncio.sleep(0.5)  # for longer than the silence that is noticed
        await country.undisturbed()
    for number in (0, 1, 2):
        assert (await country.status(number))["all"].error is None
    country.hosts[1].restore()
    await country.advances("all", (0, 1, 2))


async def test_host_without_power_is_named_and_replaced_elsewhere(
    country: Country,
) -> None:
    country.hosts[1].remove()
    zero, two = await country.errors(0, 2, others=("far",))
    assert (named(zero), named(two)) == (1, 1)
    country.citizens[1].end()
    country.citizens[3].end()
    replacement = country.start(
        country.hosts[3], [Membership("all", 1, 3, country.backend)]
    )
    for number in (0, 2):
        wanted = Membership("all", number, 3, country.backend)
        country.citizens[number].order(("join", wanted))
    for number in (0, 2):
        assert await country.citizens[number].report() is None
    assert await replacement.report() == "ready"
    assert (await country.status(0))["all"].epoch == 2
    await country.advances("all", (0, 2, 4))


@ONE_SUFFICES
async def test_loss_of_the_stores_host_breaks_no_ready_world(country: Country) -> None:
    country.store_host.remove()
    for _ in range(5):
        await asyncio.sleep(0.5)  # for longer than the silence that is noticed
        await country.undisturbed()
        await country.advances("all", (0, 1, 2))
    country.citizens[0].order(("join", Membership("new", 0, 2), 3.0))
    failure = await country.citizens[0].report(40)
    assert isinstance(failure, StoreUnreachableError), failure
    await country.undisturbed()


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.heavy
@pytest.mark.parametrize("kill", [pytest.param(False, marks=pytest.mark.heavy), True])
@pytest.mark.parametrize(
    "example", [pytest.param("send_recv", marks=pytest.mark.heavy), "all_reduce"]
)
def test_examples_run_across_hosts(example: str, kill: bool) -> None:
    steps = "60"
    with Hosts(3) as hosts, ExitStack() as stack:
        base = [sys.executable, str(EXAMPLES / f"{example}.py")]
        base += ["--addr", f"{hosts[0].address}:29500", "--size", "3"]
        base += ["--steps", steps]

        def start(host: Host, *worlds: str) -> subprocess.Popen[str]:
            options = [part for world in worlds for part in ("--world", world)]
            process = subprocess.Popen(
                host.command(*base, *options),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=EXAMPLES,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            if process.stdout is not None:
                stack.callback(process.stdout.close)
            return process

        leader = start(hosts[0], "1:0", "2:0")
        workers = {
            (world, rank): start(hosts[rank], f"{world}:{rank}")
            for world in (1, 2)
            for rank in (1, 2)
        }
        assert leader.stdout is not None
        lines = []
        for line in leader.stdout:
            lines.append(line)
            if kill and "world2" in line and "step 15" in line:
                workers[2, 1].kill()
        text = "".join(lines)
        assert f"[world1 rank 0] all {steps} steps done" in text, text
        if kill:
            assert "[world2 rank 0] stopped" in text
            assert "rank 1 was lost" in text
        else:
            assert f"[world2 rank 0] all {steps} steps done" in text
