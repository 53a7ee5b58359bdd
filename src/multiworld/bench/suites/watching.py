"""What fault management costs: the same traffic, watched and not, in turns."""

from __future__ import annotations

import torch

from multiworld.bench.contenders import OneWorld, stream
from multiworld.bench.members import Options, Teller, cpu_s

BASELINE = "unwatched"
SIZE = 2
PAIRS = 30
"""Least pairs; the interval of their ratios is what is reported."""

SECONDS = 0.5
SIZES = (4_096, 409_600)


def body(rank: int, options: Options, teller: Teller) -> None:
    """Stream for half a second, watched or not, many times."""
    rivals = {
        "watched": OneWorld(rank, options.ports[0]),
        "unwatched": OneWorld(rank, options.ports[1], is_watched=False),
    }
    pairs = 4 if options.is_quick else max(PAIRS, options.rounds)
    counts: dict[tuple[str, int], int] = {}
    for number in range(pairs):
        teller.step(number / pairs, f"pair {number + 1} of {pairs}")
        for size in SIZES:
            tensor = torch.zeros(size, dtype=torch.uint8)
            order = list(rivals)[::-1] if number % 2 else list(rivals)
            for name in order:
                count = counts.get((name, size)) or _calibrate(
                    rank, rivals[name], tensor
                )
                counts[name, size] = counts["watched", size] = counts[
                    "unwatched", size
                ] = count
                took, cpu = _stream(rank, rivals[name], tensor, count)
                teller.sample("stream", size, name, "messages/s", count / took)
                teller.sample("cpu of sender", size, name, "us", cpu / count * 1e6)
    for rival in rivals.values():
        rival.close()


def _calibrate(rank: int, rival: OneWorld, tensor: torch.Tensor) -> int:
    """Return how many messages take about so long; both ends agree on it."""
    took, _ = _stream(rank, rival, tensor, 200)
    agreed = torch.tensor([int(200 * SECONDS / took)])
    if rank == 0:
        rival.send_many(agreed, 1)
    else:
        rival.recv_many(agreed, 1)
    return max(50, int(agreed))


def _stream(
    rank: int, rival: OneWorld, tensor: torch.Tensor, count: int
) -> tuple[float, float]:
    rival.ping(torch.zeros(1), 5, is_first=rank == 0)
    cpu = cpu_s()
    return stream(rank, rival, tensor, count), cpu_s() - cpu
