"""Streams that a replica returns."""

from __future__ import annotations

import itertools
import random

import pytest

from multiworld.serve.gateway.streams.actions import Send
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
from multiworld.serve.wire.generation_messages import (
    BeginSequences,
    Sampling,
    SequenceFailed,
)
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_stream_returned_by_its_chain_is_placed_elsewhere(
    count: int,
) -> None:
    """That one may be the only one that cannot compute it; without another it stays."""
    router = StreamRouter("g", random.Random(0).random)
    now, begun = 0.0, list[str]()

    def handle(event: Event) -> None:
        for action in router.handle(event, now):
            if isinstance(action, Send) and isinstance(action.message, BeginSequences):
                begun.append(action.replica)

    names = [f"r{number}" for number in range(count)]
    replicas = {n: Replica(n, "m", "1", 0, ReplicaState.READY, "a") for n in names}
    route = Route("1", {"1": 1}, 10**6, generates=True)
    handle(TableChanged(RoutingTable(1, ("g",), {"m": route}, replicas)))
    for name in names:
        handle(Connected(name))
    prompt = [*range(8)]
    sampling = Sampling(max_tokens=9)
    stream = Stream(
        *(0, "m", "1", prompt, len(prompt), sampling), 1e6, {}, NO_LIMITS, now
    )
    handle(Opened(stream))
    for _ in range(6):
        key = ("g", 0, stream.attempt)
        handle(Received(begun[-1], [SequenceFailed(key)]))
        for _ in range(100):
            now += 0.1
            handle(Ticked(frozenset(), 0.0))
    assert len(begun) == 7
    pairs = itertools.pairwise(begun)
    assert all((one != other) is (count > 1) for one, other in pairs)
