"""Choice of a replica by two random candidates, and homes of sessions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from multiworld.serve.routing.load_balancer import HashRing, choose


def test_choose_when_two_then_the_one_with_less_work() -> None:
    for seed in range(20):
        assert (
            choose("ab", {"a": 3, "b": 1}.__getitem__, random.Random(seed).random)
            == "b"
        )
    assert choose((), len, random.random) is None
    assert choose(["a"], len, random.random) == "a"


def test_choose_spreads_evenly() -> None:
    draw = random.Random(7)
    load: Counter[str] = Counter()
    for _ in range(1000):
        name = choose("abcde", load.__getitem__, draw.random)
        assert name is not None
        load[name] += 1
    assert max(load.values()) - min(load.values()) <= 10


def homes(names: Iterable[str], sessions: int) -> dict[str, str]:
    ring = HashRing(names)
    return {f"s{n}": ring.home(f"s{n}") for n in range(sessions)}


@pytest.mark.parametrize("count", [2, 6, 300])
def test_homes_when_a_replica_goes_then_its_sessions_move_alone(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    before, after = homes(reversed(names), 3000), homes(names[1:], 3000)
    moved = {session for session in before if before[session] != after[session]}
    assert moved == {session for session in before if before[session] == names[0]}


@pytest.mark.parametrize("count", [2, 6, 30])
def test_homes_are_spread_evenly(count: int) -> None:
    found = Counter(homes((f"n{n}" for n in range(count)), 3000).values())
    assert len(found) == count
    assert max(found.values()) < 1.4 * 3000 / count


def test_home_without_replicas_is_none() -> None:
    assert HashRing([]).home("s") == ""
    assert HashRing(["a"]).home("s") == "a"
