"""The cost of an event at a gateway, whatever its number of streams."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from multiworld.errors import DeadlineExceededError
from multiworld.serve.gateway.streams import stream_router
from multiworld.serve.gateway.streams.actions import Action, Cut, Deliver
from multiworld.serve.gateway.streams.chain_selection import ChainSelection
from multiworld.serve.gateway.streams.events import (
    Closed,
    Connected,
    Disconnected,
    Event,
    Opened,
    Received,
    TableChanged,
    Ticked,
)
from multiworld.serve.gateway.streams.stream import NO_LIMITS, Stream, TimeLimits
from multiworld.serve.gateway.streams.stream_router import StreamRouter
from multiworld.serve.wire.generation_messages import (
    Sampling,
    TokenItem,
    Tokens,
)
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)
from tests.lines import lines_of
from tests.recorded import recorded

TICK = Ticked(frozenset(), 0.0)


def table_of(*counts: int, draining: str = "") -> RoutingTable:
    states = {draining: ReplicaState.DRAINING}
    replicas = {
        name: Replica(name, "m", "1", k, states.get(name, ReplicaState.READY))
        for k, count in enumerate(counts)
        for name in (f"{k}.{n}" for n in range(count))
    }
    route = Route("1", {"1": len(counts)}, 10**6, generates=True)
    return RoutingTable(1, ("g",), {"m": route}, replicas)


class Bench:
    def __init__(self, *counts: int, streams: int = 0) -> None:
        self.router = StreamRouter("g", random.Random(0).random)
        self.now = 0.0
        self.handle(TableChanged(table_of(*counts)))
        for name in self.router.view.table.replicas:
            self.handle(Connected(name))
        self.now = 100.0  # no replica is new
        for number in range(streams):
            self.open(number)

    def handle(self, event: Event) -> list[Action]:
        return self.router.handle(event, self.now)

    def open(
        self,
        number: int,
        limits: TimeLimits = NO_LIMITS,
        deadline_s: float = 1e6,
        **options: Any,
    ) -> None:
        one = Stream(
            *(number, "m", "1", [1] * 9, 9, Sampling(max_tokens=99)),
            self.now + deadline_s,
            {},
            limits,
            self.now,
            **options,
        )
        self.handle(Opened(one))

    def token(self, number: int) -> None:
        one = self.router.streams[number]
        item = TokenItem(("g", number, one.attempt), one.made, 5)
        self.handle(Received(one.chain[-1], [Tokens((item,))]))

    def lines(self, *events: Event) -> list[int]:
        return [lines_of(partial(self.handle, event)) for event in events]


def work_beside(streams: int) -> list[int]:
    """Return the lines of code for events about few of many streams."""
    bench = Bench(2, 2, streams=streams)
    lines = [lines_of(partial(bench.token, streams // 2))]
    lines += bench.lines(TICK, Closed(streams // 2, None))
    return [*lines, lines_of(partial(bench.open, streams)), *bench.lines(TICK)]


def test_work_for_an_event_does_not_grow_with_the_streams() -> None:
    assert work_beside(1000) == work_beside(10)


def work_while_they_wait(streams: int) -> list[int]:
    """Return the lines of code for a tick while no stream has a chain."""
    bench = Bench(2, 1)
    bench.handle(Disconnected("1.0", is_polite=True))
    for number in range(streams):
        bench.open(number)
    lines = bench.lines(TICK)
    bench = Bench(2, 1, streams=streams)
    bench.handle(Disconnected("1.0", is_polite=True))
    assert bench.router.waiting("m") == streams
    lines += [*bench.lines(TICK), lines_of(partial(bench.router.waiting, "m"))]
    bench.handle(Connected("1.0"))
    assert bench.router.waiting("m") == 0
    return lines


def test_work_for_a_tick_does_not_grow_with_the_streams_that_wait() -> None:
    assert work_while_they_wait(1000) == work_while_they_wait(10)


def work_for_an_arrival(replicas: int, session: str) -> int:
    """Return the lines of code for a new stream, the second of its session."""
    bench = Bench(replicas, replicas)
    bench.open(1, session=session)
    return lines_of(partial(bench.open, 2, session=session))


@pytest.mark.parametrize("session", ["", "a"])
def test_work_for_an_arrival_does_not_grow_with_the_replicas(session: str) -> None:
    few, many = (work_for_an_arrival(n, session) for n in (100, 1000))
    assert many < few + 10  # which replica is drawn takes a line or two


def test_streams_are_spread_evenly_over_many_replicas() -> None:
    with recorded(stream_router, ChainSelection) as made:
        Bench(300, 300, streams=900)
    assert set(made[0].load.values()) <= {2, 3, 4, 5}


def test_streams_go_to_their_prefix_and_their_home_among_many_replicas() -> None:
    bench = Bench(300, 300)
    for number in range(0, 40, 2):
        prefixes = [bytes([number])]
        bench.open(number, prefixes=prefixes * 9)
        bench.open(number + 1, prefixes=prefixes * 9)
        one, other = (bench.router.streams[n] for n in (number, number + 1))
        assert one.chain == other.chain
    for number in range(100, 110):
        bench.open(number, session="x")
    homes = [bench.router.streams[n].chain[0] for n in (100, 101)]
    assert homes[0] == homes[1] == bench.router.view.home("m", "1", 0, "x")


def choices_while_draining(streams: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many chains a tick looks for when there is no other replica."""
    with recorded(stream_router, ChainSelection) as made:
        bench = Bench(1, 1, streams=streams)
    bench.handle(TableChanged(table_of(1, 1, draining="1.0")))
    count, (selection,) = 0, made
    chosen = selection.without_draining

    def counted(stream: Stream) -> object:
        nonlocal count
        count += 1
        return chosen(stream)

    monkeypatch.setattr(selection, "without_draining", counted)
    bench.handle(TICK)
    return count


def test_chain_is_chosen_once_while_a_drain_finds_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choices_while_draining(500, monkeypatch) == 1


def test_loads_of_replicas_that_are_gone_are_forgotten() -> None:
    """Replica names are never used again."""
    with recorded(stream_router, ChainSelection) as made:
        bench = Bench(3, 3, streams=9)
    for number in range(9):
        bench.handle(Closed(number, None))
    bench.handle(TableChanged(table_of(1, 1)))
    assert set(made[0].load) <= {"0.0", "1.0"}


@pytest.mark.parametrize("seed", range(20))
def test_late_streams_are_those_of_a_full_scan(seed: int) -> None:
    """The router finds the same late streams as a scan of all, with any limits."""
    chance = random.Random(seed)
    bench = Bench(1, 1)
    resumed_at, number = 0.0, 0
    for _ in range(200):
        bench.now += chance.choice([0.0, 0.05, 0.3])
        running = [s for s in bench.router.streams.values() if not s.has_ended]
        if chance.random() < 0.3:
            limits = TimeLimits(*chance.choices([None, 0.5, 1.0], k=2))
            bench.open(number, limits, deadline_s=3.0)
            number += 1
        elif running and chance.random() < 0.6:
            bench.token(chance.choice(running).number)
        if chance.random() < 0.05:
            bench.now += 1.0
            resumed_at = bench.now
        streams = bench.router.streams.values()
        running = [s for s in streams if not s.has_ended]
        late = [s.number for s in running if s.late(bench.now, resumed_at)]
        actions = bench.handle(Ticked(frozenset(), resumed_at))
        errors = [a for a in actions if isinstance(a, Deliver)]
        ends = [a.item.error if isinstance(a.item, Cut) else a.item for a in errors]
        assert all(isinstance(error, DeadlineExceededError) for error in ends)
        assert [a.number for a in errors] == late
        for gone in late:
            bench.handle(Closed(gone, None))
