"""The streams that people look at."""

from __future__ import annotations

from typing import Any

from multiworld.serve.gateway.streams.live_streams import (
    SHOWN,
    chains_of,
    held_back,
    loads_of,
    oldest_of,
    shown,
)
from multiworld.serve.gateway.streams.stream import NO_LIMITS, Phase, Stream
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.wire.control_messages import ModelLoad, TenantLoad, summed
from multiworld.serve.wire.generation_messages import Sampling
from multiworld.serve.wire.origin import Origin


def stream(number: int, began_at: float = 0.0, **more: Any) -> Stream:
    return Stream(
        number,
        "m",
        "1",
        [1, 2, 3, 4],
        2,
        Sampling(),
        9e9,
        more.pop("via", {}),
        NO_LIMITS,
        began_at,
        origin=Origin(f"r-{number}"),
        **more,
    )


def test_streams_in_trouble_come_first_and_then_the_oldest() -> None:
    found = [
        stream(n, began_at=10.0 - n, earlier_s=5.0, chain=("a",)) for n in range(1, 4)
    ]
    waiting = stream(9, began_at=9.5)
    for each in found:
        each.become(Phase.COMPUTING)
        each.longest_s = 1.25
    probe = stream(8, via={0: "a"})
    told = shown([*found, probe, waiting], 20.0)
    assert [each.request for each in told] == ["r-9", "r-3", "r-2", "r-1"]
    assert (told[1].made, told[1].prompt, told[1].age_s) == (2, 2, 18.0)
    assert told[1].longest_s == 1.25


def test_few_of_many_are_shown() -> None:
    found = [stream(n, chain=(f"c{n % 200}", "d")) for n in range(1000)]
    assert len(shown(found, 1.0)) == SHOWN
    chains = chains_of(found)
    assert len(chains) == SHOWN
    assert all(count == 5 for _, count in chains)


def test_loads_of_tenants_and_the_longest_wait() -> None:
    structured = Sampling(grammar="g")
    streams = [
        stream(1, began_at=3.0, share=Share("acme")),
        stream(2, began_at=1.0, share=Share("bolt")),
        # Another gateway has delivered the tokens of this one.
        stream(3, began_at=0.0, share=Share("bolt"), earlier=2),
        stream(4, began_at=0.0, via={0: "a"}, share=Share("bolt")),
    ]
    streams[1].sampling = structured
    for each in streams[:2]:
        each.tokens = [1, 2]
    found = loads_of(streams)
    assert found == {"acme": TenantLoad(1, 1, 0, 2), "bolt": TenantLoad(2, 1, 1, 2)}
    assert summed(found, {"bolt": TenantLoad(1, 1, 1, 1)})["bolt"] == TenantLoad(
        3, 2, 2, 3
    )
    assert oldest_of(streams, 10.0) == {"m": 9.0}
    assert held_back(streams) == {"m": ModelLoad(2, 4)}
