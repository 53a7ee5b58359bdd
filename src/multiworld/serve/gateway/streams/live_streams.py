"""The live streams of a gateway, for display to operators. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from multiworld.serve.gateway.streams.stream import Phase, Stream
from multiworld.serve.wire.control_messages import ModelLoad, StreamShown, TenantLoad

SHOWN = 100  # maximum number of streams, and of chains, that a gateway shows


def shown(streams: Collection[Stream], now: float) -> tuple[StreamShown, ...]:
    """Return streams, except probes: first those in trouble, then others, by age."""
    theirs = [stream for stream in streams if not stream.via]
    theirs.sort(key=lambda stream: (not _is_in_trouble(stream), stream.began_at))
    return tuple(
        StreamShown(
            stream.origin.request,
            stream.number,
            stream.share.tenant,
            stream.model,
            stream.prompt,
            stream.made,
            round(now - stream.began_at + stream.earlier_s, 1),
            stream.phase.value,
            stream.chain,
            stream.attempt,
            stream.losses.counted,
            round(stream.longest_s, 3),
        )
        for stream in theirs[:SHOWN]
    )


def chains_of(
    streams: Collection[Stream],
) -> tuple[tuple[tuple[str, ...], int], ...]:
    """Return the chains with the most streams, and the number of streams of each."""
    counts = Counter(stream.chain for stream in streams if stream.chain)
    return tuple(counts.most_common(SHOWN))


def loads_of(streams: Collection[Stream]) -> dict[str, TenantLoad]:
    """Return what each tenant has in progress; probes do not count."""
    found: dict[str, list[int]] = {}
    for stream in streams:
        if not stream.via:
            load = found.setdefault(stream.share.tenant, [0, 0, 0, 0])
            load[0] += 1
            load[2] += bool(stream.sampling.grammar)
            if not stream.made:
                load[1] += 1
                load[3] += stream.prompt
    return {name: TenantLoad(*load) for name, load in found.items()}


def held_back(streams: Collection[Stream]) -> dict[str, ModelLoad]:
    """Return the streams without a token, by model; probes do not count."""
    found: dict[str, list[int]] = {}
    for stream in streams:
        if not stream.made and not stream.via:
            load = found.setdefault(stream.model, [0, 0])
            load[0] += 1
            load[1] += stream.prompt
    return {name: ModelLoad(*load) for name, load in found.items()}


def oldest_of(streams: Collection[Stream], now: float) -> dict[str, float]:
    """Return, by model, how long the oldest stream has waited for its first token."""
    found: dict[str, float] = {}
    for stream in streams:
        if not stream.made and not stream.via:
            waited_s = now - stream.began_at
            found[stream.model] = max(found.get(stream.model, 0.0), waited_s)
    return found


def _is_in_trouble(stream: Stream) -> bool:
    return stream.losses.counted > 0 or stream.phase in (Phase.WAITING, Phase.PAUSED)
