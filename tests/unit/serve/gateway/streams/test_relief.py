"""A new replica that relieves the busiest one of its stage."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from multiworld.serve.gateway.streams.actions import Action, Send
from multiworld.serve.gateway.streams.events import (
    Connected,
    Event,
    Opened,
    Received,
    TableChanged,
    Ticked,
)
from multiworld.serve.gateway.streams.stream import NO_LIMITS, Stream
from multiworld.serve.gateway.streams.stream_router import StreamRouter
from multiworld.serve.text.prefixes import digests
from multiworld.serve.wire.generation_messages import (
    BeginSequences,
    PrepareSequence,
    Sampling,
    SequenceFailed,
    TokenItem,
    Tokens,
)
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)

PROMPT = [*range(512)]
TICK = Ticked(frozenset(), 0.0)


class Bench:
    """Four streams at a replica with fingerprint ``a``, and a new replica."""

    def __init__(self, kind: str, *, has_tokens: bool) -> None:
        self.router = StreamRouter("g", random.Random(0).random)
        self.now = 0.0
        self.add("old", "a")
        for number in range(4):
            one = Stream(
                *(number, "m", "1", PROMPT[:], len(PROMPT), Sampling(max_tokens=99)),
                1e6,
                {},
                NO_LIMITS,
                self.now,
                prefixes=tuple(digests(PROMPT, 64, "")),
            )
            self.handle(Opened(one))
            if has_tokens:
                item = TokenItem(("g", number, one.attempt), one.made, 5)
                self.handle(Received("old", [Tokens((item,))]))
        self.now = 100.0  # it is not new any more
        self.add("new", kind)

    def add(self, name: str, kind: str) -> None:
        known = dict(self.router.view.table.replicas)
        known[name] = Replica(name, "m", "1", 0, ReplicaState.READY, kind)
        route = Route("1", {"1": 1}, 10**6, generates=True)
        number = self.router.view.table.number + 1
        self.handle(TableChanged(RoutingTable(number, ("g",), {"m": route}, known)))
        self.handle(Connected(name))

    def handle(self, event: Event) -> list[Action]:
        return self.router.handle(event, self.now)

    def sent(self, kind: type[Any], seconds: int = 1) -> list[str]:
        found = []
        for _ in range(seconds):
            actions = self.handle(TICK)
            sends = [a for a in actions if isinstance(a, Send)]
            found += [a.replica for a in sends if isinstance(a.message, kind)]
            self.now += 1.5
        return found


def test_running_stream_moves_only_to_a_replica_with_its_fingerprint() -> None:
    """Its tokens could differ on other hardware."""
    assert Bench("a", has_tokens=True).sent(PrepareSequence) == ["new"]
    assert Bench("b", has_tokens=True).sent(PrepareSequence, 20) == []


def test_stream_without_a_token_starts_over_at_the_new_replica_or_stays() -> None:
    """The busy one, which has its prefix, would compute it all again."""
    bench = Bench("a", has_tokens=False)
    assert bench.sent(BeginSequences, 20) == ["new", "new"]
    at = sorted(stream.chain for stream in bench.router.streams.values())
    assert at == [("new",)] * 2 + [("old",)] * 2
    assert Bench("b", has_tokens=False).sent(BeginSequences, 20) == []


def test_stream_that_the_new_replica_returned_does_not_move_there_again() -> None:
    """That replica may be the only one that cannot compute it."""
    bench = Bench("a", has_tokens=False)
    assert bench.sent(BeginSequences, 20) == ["new", "new"]
    there = [s for s in bench.router.streams.values() if s.chain == ("new",)]
    for stream in there:
        failed = SequenceFailed(("g", stream.number, stream.attempt))
        bench.handle(Received("new", [failed]))
    assert bench.sent(BeginSequences, 20) == ["new", "new"], "the two others"
    assert [stream.chain for stream in there] == [("old",)] * 2


def test_stream_with_a_replica_that_is_gone_is_not_moved() -> None:
    """It starts over where all replicas of its chain are known."""
    bench = Bench("a", has_tokens=True)
    table = bench.router.view.table
    left = {n: r for n, r in table.replicas.items() if n == "new"}
    bench.handle(TableChanged(dataclasses.replace(table, replicas=left)))
    assert "old" not in bench.sent(BeginSequences, 5)
