"""Choosing a replica by two random choices, or by session."""

from __future__ import annotations

import random
from collections import Counter

from multiworld.serve.core.load_balancer import choose


def test_choose_when_two_then_the_one_with_less_work() -> None:
    """For any random numbers."""
    for seed in range(20):
        assert choose(["a", "b"], {"a": 3, "b": 1}, random.Random(seed).random) == "b"
    assert choose([], {}, random.random) is None
    assert choose(["a"], {"a": 9}, random.random) == "a"


def test_choose_spreads_evenly() -> None:
    """The fullest replica has little more work than the emptiest."""
    draw = random.Random(7)
    load: Counter[str] = Counter()
    for _ in range(1000):
        name = choose(list("abcde"), load, draw.random)
        assert name is not None
        load[name] += 1
    assert max(load.values()) - min(load.values()) <= 10


def test_choose_when_session_then_it_stays_while_others_come_and_go() -> None:
    """Only sessions of the removed replica move."""
    names = [f"n{number}" for number in range(6)]
    sessions = [f"s{number}" for number in range(200)]
    before = {s: choose(names, {}, random.random, s) for s in sessions}
    after = {s: choose(names[1:], {}, random.random, s) for s in sessions}
    assert {s for s in sessions if before[s] != after[s]} == {
        s for s in sessions if before[s] == names[0]
    }
    assert len(set(before.values())) == 6
