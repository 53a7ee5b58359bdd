"""Chain selection: even loads, and steps that are split as little as possible."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from multiworld.serve.gateway.streams.chain_selection import (
    NEW_S,
    PREFIX_BLOCK,
    ChainSelection,
    Uneven,
    surplus_of,
)
from multiworld.serve.gateway.streams.stream import (
    NO_LIMITS,
    Chain,
    Stream,
    TimeLimits,
)
from multiworld.serve.replica.scheduling.pipeline_share import adapt_to, steps_for
from multiworld.serve.replica.scheduling.scheduled_sequence import (
    ScheduledSequence,
    by_route,
)
from multiworld.serve.replica.scheduling.scheduler import Scheduler
from multiworld.serve.routing.replica_view import ReplicaView
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.text.prefixes import digests
from multiworld.serve.wire.generation_messages import Sampling
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)


def table_of(*counts: int, version: str = "1", weights: str = "w") -> RoutingTable:
    replicas = {
        name: Replica(name, "m", version, k, ReplicaState.READY, weights=weights)
        for k, count in enumerate(counts)
        for name in (f"v{version}.{k}.{n}" for n in range(count))
    }
    routes = {"m": Route(version, {version: len(counts)}, generates=True)}
    return RoutingTable(1, ("gateway/1",), routes, replicas)


def stream(number: int = 0) -> Stream:
    return Stream(number, "m", "1", [1], 1, Sampling(), 1e9, {}, NO_LIMITS, 0.0)


def chains(table: RoutingTable) -> ChainSelection:
    """Return the chain selection of a gateway that is connected to all replicas."""
    made = ChainSelection(ReplicaView(), random.Random(0).random)
    for name in table.replicas:
        made.view.connect(name)
    use(made, table, 0.0)
    return made


def use(made: ChainSelection, table: RoutingTable, now: float) -> None:
    made.view.table_changed(table)
    made.table_changed(now)


def placed(made: ChainSelection, count: int) -> list[Stream]:
    found = []
    for number in range(count):
        one = stream(number)
        chain = made.choose(one)
        assert chain is not None
        one.version, one.chain = chain.version, chain.replicas
        made.enter(one)
        found.append(one)
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_even_fleet_becomes_separate_pipelines(size: int) -> None:
    made = chains(table_of(size, size, size))
    schedulers = defaultdict(set)
    for one in placed(made, 4 * size):
        for name in one.chain[1:]:
            schedulers[name].add(one.chain[0])
    assert all(len(found) == 1 for found in schedulers.values())
    assert set(made.load.values()) == {4}


def test_uneven_fleet_is_loaded_evenly_within_a_few_streams() -> None:
    made = chains(table_of(2, 3, 1))
    placed(made, 60)
    for k, count in enumerate((2, 3, 1)):
        loads = [n for name, n in made.load.items() if name.startswith(f"v1.{k}.")]
        assert len(loads) == count
        assert max(loads) - min(loads) <= 10


def test_streams_that_leave_are_forgotten() -> None:
    made = chains(table_of(2, 2))
    for one in placed(made, 9):
        made.leave(one.chain)
    assert not any(made.load.values())
    assert not any(made.sources.is_split(name, "") for name in made.load)


def test_draining_replica_is_replaced_in_the_chain() -> None:
    table = table_of(2, 2)
    made = chains(table)
    (one,) = placed(made, 1)
    assert made.without_draining(one) is None
    gone = one.chain[1]
    old = table.replicas[gone]
    table.replicas[gone] = Replica(gone, "m", "1", 1, ReplicaState.DRAINING)
    use(made, table, 0.0)
    (other,) = {"v1.1.0", "v1.1.1"} - {gone}
    assert made.without_draining(one) == Chain("1", (one.chain[0], other))
    table.replicas[other] = Replica(other, "m", "1", 1, ReplicaState.DRAINING)
    use(made, table, 0.0)
    assert made.without_draining(one) is None
    assert old.state is ReplicaState.READY


def test_stream_of_a_removed_model_ends_where_it_is() -> None:
    table = table_of(1, 1)
    made = chains(table)
    (one,) = placed(made, 1)
    draining = {
        name: Replica(name, "m", "1", k, ReplicaState.DRAINING)
        for k, name in enumerate(one.chain)
    }
    use(made, RoutingTable(2, (), {}, draining), 0.0)
    assert made.without_draining(one) is None


@pytest.mark.parametrize(
    ("weights", "is_same"), [("w", True), ("x", False), ("", False)]
)
def test_another_version_is_taken_if_it_has_the_same_weights(
    weights: str, is_same: bool
) -> None:
    """Unknown weights are never the same."""
    made = chains(table_of(1, 1))
    (one,) = placed(made, 1)
    draining = {
        name: Replica(name, "m", "1", k, ReplicaState.DRAINING, weights="w")
        for k, name in enumerate(one.chain)
    }
    new = table_of(1, 1, version="2", weights=weights)
    route = Route("2", {"1": 2, "2": 2}, generates=True)
    both = RoutingTable(2, (), {"m": route}, {**draining, **new.replicas})
    fresh = chains(both)
    found = fresh.without_draining(one)
    assert (found == Chain("2", ("v2.0.0", "v2.1.0"))) is is_same


def test_new_replica_takes_streams_for_a_while() -> None:
    table = table_of(1, 1)
    made = chains(table)
    placed(made, 6)
    grown = table_of(1, 2)
    made = chains(grown)
    use(made, table, 0.0)
    made.load.update({"v1.0.0": 6, "v1.1.0": 6})
    use(made, grown, 100.0)
    assert list(made.uneven(100.0)) == [Uneven("v1.1.0", "v1.1.1", 3)]
    assert list(made.uneven(101.0 + NEW_S)) == []


def test_surplus_is_half_of_a_large_difference() -> None:
    assert [surplus_of(*loads) for loads in ((2, 0), (3, 1), (5, 3), (8, 1))] == [
        1,
        1,
        0,
        3,
    ]


def test_step_takes_the_oldest_and_those_of_its_route() -> None:
    """No sequence waits for ever."""
    routes = ("a", "b", "b", "a")
    ready = [
        ScheduledSequence(("g", n, 0), [1], route=("first", route), last_step=9 - n % 3)
        for n, route in enumerate(routes)
    ]
    assert [s.key[1] for s in by_route(ready)] == [2, 1, 0, 3]
    assert by_route([]) == []


def test_all_replicas_have_steps_to_compute() -> None:
    assert steps_for([1, 1, 1]) == 3
    assert steps_for([2, 4, 3]) == 5
    assert steps_for([4, 2, 0]) == 3
    table = table_of(2, 4, 3)
    scheduler = Scheduler(EngineLimits(blocks=10))
    adapt_to(scheduler, table, "gone")
    assert (scheduler.steps.max_steps, scheduler.pool.withheld) == (1, 0)
    adapt_to(scheduler, table, "v1.0.0")
    assert (scheduler.steps.max_steps, scheduler.pool.withheld) == (5, 0)
    adapt_to(scheduler, table_of(4, 4, 3), "v1.0.0")
    assert scheduler.pool.withheld == 3, "three share what four would fill"
    adapt_to(scheduler, table_of(20, 1), "v1.0.0")
    assert scheduler.pool.withheld == 9, "each has a block"


def test_stream_stays_on_its_hardware_fingerprint_while_possible() -> None:
    table = table_of(4)
    for name in ("v1.0.0", "v1.0.1"):
        table.replicas[name] = replace(table.replicas[name], fingerprint="a")
    for name in ("v1.0.2", "v1.0.3"):
        table.replicas[name] = replace(table.replicas[name], fingerprint="b")
    made = chains(table)
    for name in ("v1.0.0", "v1.0.1"):
        made.load[name] = 30
    one = stream()
    one.fingerprints[0] = "a"
    found = {made.choose(one) for _ in range(20)}
    assert found <= {Chain("1", ("v1.0.0",)), Chain("1", ("v1.0.1",))}
    left = {n: table.replicas[n] for n in ("v1.0.2", "v1.0.3")}
    use(made, replace(table, replicas=left), 0.0)
    assert made.choose(one) in (Chain("1", ("v1.0.2",)), Chain("1", ("v1.0.3",)))


def test_stream_never_moves_to_a_replica_with_other_noise() -> None:
    """It rather waits: another release of an engine may draw other tokens."""
    table = table_of(3)
    for name, noise in (("v1.0.0", "a"), ("v1.0.1", "b"), ("v1.0.2", "b")):
        table.replicas[name] = replace(table.replicas[name], noise=noise)
    made = chains(table)
    made.load["v1.0.0"] = 30
    one = stream()
    assert {made.choose(one) for _ in range(40)} == {
        Chain("1", ("v1.0.1",)),
        Chain("1", ("v1.0.2",)),
    }
    one.noise = "a"
    assert {made.choose(one) for _ in range(40)} == {Chain("1", ("v1.0.0",))}
    left = {n: table.replicas[n] for n in ("v1.0.1", "v1.0.2")}
    use(made, replace(table, replicas=left), 0.0)
    assert made.choose(one) is None


@pytest.mark.parametrize(
    ("tokens", "busier", "is_taken"),
    [(128, 0, True), (128, 2, False), (1024, 6, True), (1024, 9, False)],
)
def test_cached_prefix_outweighs_as_much_load_as_it_saves(
    tokens: int, busier: int, is_taken: bool
) -> None:
    """128 cached tokens outweigh one more stream."""
    made = chains(table_of(3))
    before, after = stream(1), stream(2)
    for one in (before, after):
        one.prefixes = tuple(digests(range(tokens), PREFIX_BLOCK, "m\0acme"))
    before.chain = ("v1.0.1",)
    made.enter(before)
    made.leave(before.chain)
    made.load["v1.0.1"] = busier
    assert (made.choose(after) == Chain("1", ("v1.0.1",))) is is_taken
    after.prefixes = tuple(digests(range(tokens), PREFIX_BLOCK, "m\0beta"))
    found = {made.choose(after) for _ in range(50)}
    assert len(found) > 1, "of another tenant nothing is known"


@pytest.mark.parametrize("wait_s", [0.4, 0.6])
def test_ttft_and_token_gaps_have_separate_limits(wait_s: float) -> None:
    """Each counts from the last event; the deadline covers the whole stream."""
    one = stream()
    one.limits, one.deadline_at = TimeLimits(0.5, 0.5), 10.0
    assert bool(one.late(wait_s)) == (wait_s > 0.5)
    one.first_at, one.last_at = 3.0, 4.0
    one.tokens += [7, 8]
    found = one.late(4.0 + wait_s)
    assert bool(found) == (wait_s > 0.5)
    assert not found or found == "no token after 2 within 0.5 s"
    one.limits = TimeLimits(0.5, None)
    assert not one.late(4.0 + wait_s)
    assert "deadline" in one.late(10.1)
