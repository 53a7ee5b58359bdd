"""Short soak for every run; ``make soak MINUTES=20`` runs a long one."""

from __future__ import annotations

import random

import pytest

from tests.soak.overseer import overseer
from tests.soak.plan import KINDS, expected, make_city, next_fault

SEED = 11
SECONDS = 8.0


@pytest.mark.heavy
@pytest.mark.timeout(150)
async def test_short_soak_finds_no_problem(fork_server: None) -> None:
    async with overseer(SEED) as city:
        await city.run(SECONDS)
        account = city.account
    assert account.problems() == []
    assert sum(account.faults.values()) >= 1
    assert account.rounds > 0


def test_plan_is_the_same_for_the_same_seed() -> None:
    plans = []
    for _ in range(2):
        chance = random.Random(SEED)
        city = make_city(chance, 3)
        plans.append((city, [next_fault(chance, city) for _ in range(300)]))
    assert plans[0] == plans[1]
    city, faults = plans[0]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert all(city.of(number) for number in range(len(city.homes)))


def test_expectations_touch_only_worlds_of_the_victim() -> None:
    chance = random.Random(SEED)
    city = make_city(chance, 3)
    for _ in range(300):
        fault = next_fault(chance, city)
        wanted = expected(city, fault)
        for world in city.worlds:
            if fault.kind in ("kill", "stop"):
                assert (world.name in wanted) == (fault.resident in world.members)
            if world.name in wanted:
                named = wanted[world.name].named
                assert all(rank not in others for rank, others in named.items())
