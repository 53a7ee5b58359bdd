"""Streams that only replicas with the same noise may continue, beside others."""

from __future__ import annotations

from dataclasses import replace

from multiworld.serve.gateway.streams import actions, events
from multiworld.serve.gateway.streams.stream import NO_LIMITS, Stream
from multiworld.serve.gateway.streams.stream_router import StreamRouter
from multiworld.serve.wire.generation_messages import Sampling, TokenItem, Tokens
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)

READY = ReplicaState.READY


def table(version: str, *replicas: Replica) -> RoutingTable:
    route = Route(version, {"1": 1, "2": 1}, generates=True)
    return RoutingTable(1, ("g",), {"m": route}, {r.name: r for r in replicas})


def stream(number: int, temperature: float) -> Stream:
    sampling = Sampling(temperature=temperature, max_tokens=50)
    tokens = [1, 2, 3]
    return Stream(number, "m", "1", tokens, 3, sampling, 1e9, {}, NO_LIMITS, 0.0)


class Begun:
    """A router with a sampled and a greedy stream, each with a token of ``replica``."""

    def __init__(self, replica: Replica, *others: Replica) -> None:
        self.router = StreamRouter("g", lambda: 0.5)
        self.handle(events.TableChanged(table("1", replica)), 0.0)
        self.handle(events.Connected(replica.name), 0.0)
        self.sampled, self.greedy = stream(1, 1.0), stream(2, 0.0)
        for each in (self.sampled, self.greedy):
            self.handle(events.Opened(each), 0.1)
            token = TokenItem(("g", each.number, each.attempt), 0, 7)
            self.handle(events.Received(replica.name, [Tokens((token,))]), 0.2)
        self.handle(events.TableChanged(table("1", replica, *others)), 0.5)
        for other in others:
            self.handle(events.Connected(other.name), 0.5)

    def handle(self, event: events.Event, now: float) -> list[actions.Action]:
        return list(self.router.handle(event, now))


def test_stream_that_must_wait_holds_no_other_back() -> None:
    """An update with another release of an engine leaves sampled streams waiting."""
    old = Replica("a", "m", "1", 0, READY, noise="vllm 1", stages=1)
    new = Replica("b", "m", "2", 0, READY, noise="vllm 2", stages=1)
    begun = Begun(old)
    leaving = replace(old, state=ReplicaState.DRAINING)
    begun.handle(events.TableChanged(table("2", leaving, new)), 1.0)
    begun.handle(events.Connected("b"), 1.0)
    begun.handle(events.Disconnected("a", True), 2.0)
    begun.handle(events.TableChanged(table("2", new)), 2.0)
    for second in range(3, 6):
        begun.handle(events.Ticked(frozenset(), 0.0), float(second))
    assert (begun.sampled.chain, begun.greedy.chain) == ((), ("b",))


def test_stream_that_only_a_silent_replica_can_continue_waits_for_it() -> None:
    silent = Replica("a", "m", "1", 0, READY, noise="vllm 1", stages=1)
    other = Replica("b", "m", "1", 0, READY, noise="vllm 2", stages=1)
    begun = Begun(silent, other)
    before = begun.sampled.attempt
    for tenth in range(20):
        now = 3.0 + tenth / 10
        begun.handle(events.Ticked(frozenset({"a"}), 0.0), now)
    assert begun.sampled.attempt == before
    assert begun.greedy.chain == ("b",)
