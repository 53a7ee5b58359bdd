"""The streams that people look at."""

from __future__ import annotations

from typing import Any

from multiworld.serve.gateway.streams.live_streams import SHOWN, chains_of, shown
from multiworld.serve.gateway.streams.stream import NO_LIMITS, Phase, Stream
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
    found = [stream(n, began_at=10.0 - n, chain=("a",)) for n in range(1, 4)]
    waiting = stream(9, began_at=9.5)
    for each in found:
        each.become(Phase.COMPUTING)
        each.longest_s = 1.25
    probe = stream(8, via={0: "a"})
    told = shown([*found, probe, waiting], 20.0)
    assert [each.request for each in told] == ["r-9", "r-3", "r-2", "r-1"]
    assert (told[1].made, told[1].prompt, told[1].age_s) == (2, 2, 13.0)
    assert told[1].longest_s == 1.25


def test_few_of_many_are_shown() -> None:
    found = [stream(n, chain=(f"c{n % 200}", "d")) for n in range(1000)]
    assert len(shown(found, 1.0)) == SHOWN
    chains = chains_of(found)
    assert len(chains) == SHOWN
    assert all(count == 5 for _, count in chains)
