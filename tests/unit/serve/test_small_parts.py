"""Choosing, cutting chains, crash guard, the table's edges, quantiles."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.fleet.backoff import (
    FREE,
    LAST_READY_S,
    LAST_S,
    CrashGuard,
)
from multiworld.serve.load.summary import Sample, quantile, summarise
from multiworld.serve.models.chain_partition import chain_partition
from multiworld.serve.routing.load_balancer import choose
from multiworld.serve.transport.routing_table import (
    Replica,
    ReplicaState,
    Route,
    Table,
    edges_of,
    table_from_json,
)

READY = ReplicaState.READY


def test_choose_when_two_then_the_one_with_less_work() -> None:
    """Whatever is drawn."""
    for seed in range(20):
        assert choose(["a", "b"], {"a": 3, "b": 1}, random.Random(seed).random) == "b"
    assert choose([], {}, random.random) is None
    assert choose(["a"], {"a": 9}, random.random) == "a"


def test_choose_spreads_evenly() -> None:
    """The fullest has hardly more than the emptiest."""
    draw = random.Random(7)
    load: Counter[str] = Counter()
    for _ in range(1000):
        name = choose(list("abcde"), load, draw.random)
        assert name is not None
        load[name] += 1
    assert max(load.values()) - min(load.values()) <= 10


def test_choose_when_session_then_it_stays_while_others_come_and_go() -> None:
    """Only what was at the one that left moves."""
    names = [f"n{number}" for number in range(6)]
    sessions = [f"s{number}" for number in range(200)]
    before = {s: choose(names, {}, random.random, s) for s in sessions}
    after = {s: choose(names[1:], {}, random.random, s) for s in sessions}
    assert {s for s in sessions if before[s] != after[s]} == {
        s for s in sessions if before[s] == names[0]
    }
    assert len(set(before.values())) == 6


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.integers(1, 4))
def test_chain_partition_is_as_good_as_trying_all(
    costs: list[float], parts: int
) -> None:
    """Contiguous, complete, and no other cut has a cheaper worst part."""
    if parts > len(costs):
        with pytest.raises(ValueError, match="cannot be cut"):
            chain_partition(costs, parts)
        return
    found = chain_partition(costs, parts)
    assert found[0][0] == 0
    assert found[-1][1] == len(costs)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(begin < end for begin, end in found)
    worst = max(sum(costs[b:e]) for b, e in found)
    best = min(
        max(sum(costs[b:e]) for b, e in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    assert worst == pytest.approx(best)


def test_crash_guard_waits_longer_each_time_and_forgets_what_was_sound() -> None:
    """A fault is replaced at once, a loop is not."""
    guard = CrashGuard()
    pauses = [guard.failed("p", None, 10.0) for _ in range(FREE + 9)]
    assert pauses[:FREE] == [0.0] * FREE
    assert pauses[FREE : FREE + 3] == [0.5, 1.0, 2.0]
    assert max(pauses) == LAST_S
    assert guard.not_before("p") == 10.0 + LAST_S
    assert guard.not_before("other") == 0.0
    assert guard.failed("p", 1.0, 50.0) == LAST_READY_S
    assert guard.failed("p", 60.0, 100.0) == 0.0
    assert guard.failures("p") == 1


def a_table() -> Table:
    """Return two gateways and stages of one, two and one replicas."""
    replicas = [
        Replica(f"m/{stage}/{n}", "m", "1", stage, READY)
        for n, stage in enumerate((0, 1, 1, 2))
    ]
    return Table(
        3, ("g/1", "g/2"), {"m": Route("1", {"1": 3})}, {r.name: r for r in replicas}
    )


def test_edges_have_two_ends_that_agree() -> None:
    """The same name, both ranks, and the upper one is rank 0."""
    table = a_table()
    processes = [*table.gateways, *table.replicas]
    ends = {
        (process, edge.peer): edge
        for process in processes
        for edge in edges_of(table, process).values()
    }
    for (process, peer), edge in ends.items():
        other = ends[peer, process]
        assert other.world == edge.world
        assert {other.rank, edge.rank} == {0, 1}
        assert edge.is_upstream == (edge.rank == 1)
    # every gateway to every replica, and neighbours of the chain
    assert len(ends) == 2 * (2 * 4 + 2 + 2)
    assert edges_of(table, "stranger") == {}


def test_edges_when_versions_differ_then_none() -> None:
    """Two versions of a model never talk to each other."""
    table = a_table()
    newer = Replica("m/1/9", "m", "2", 1, READY)
    both = Table(4, (), table.routes, {**table.replicas, newer.name: newer})
    assert edges_of(both, newer.name) == {}


def test_table_survives_the_wire() -> None:
    """And garbage is refused."""
    table = a_table()
    assert table_from_json(table.to_json()) == table
    with pytest.raises(ValueError, match="number"):
        table_from_json({"number": "many"})


def test_summary_counts_what_was_lost_and_wrong() -> None:
    """Latencies are of answers only."""
    samples = [Sample(0, n / 100, 200, True) for n in range(1, 101)]
    samples += [Sample(0, 9.0, 503, error="no"), Sample(0, 9.0, 0, error="cut")]
    samples += [Sample(0, 0.5, 200, False)]
    found = summarise(samples)
    assert (found.sent, found.answered, found.failed, found.wrong) == (103, 101, 2, 1)
    assert found.statuses == {0: 1, 200: 101, 503: 1}
    assert found.p99_s == pytest.approx(0.99, abs=0.011)
    assert quantile([3, 1, 2], 0.5) == 2
    assert math.isnan(quantile([], 0.5))
