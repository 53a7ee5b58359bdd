"""What fault management costs: the same traffic, watched and not, in turns."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from multiworld.bench.contenders import OneWorld, stream
from multiworld.bench.members import Options, Teller
from multiworld.config import WorldConfig

BASELINE = "unwatched"
SIZE = 2
PAIRS = 30
"""Least pairs; the interval of their ratios is what is reported."""

SECONDS = 0.5
SIZES = (4_096, 409_600)


SILENCE_S = 60.0
"""While nobody beats nobody may be missed; what the watch costs is the same."""


def body(rank: int, options: Options, teller: Teller) -> None:
    """Stream for half a second, watched or not, many times.

    It is the same world all the time: two would differ by more than what is sought, by
    where their memory happens to lie.
    """
    world = OneWorld(rank, options.ports[0], config=WorldConfig(silence_s=SILENCE_S))
    pairs = 4 if options.is_quick else max(PAIRS, options.rounds)
    counts: dict[int, int] = {}
    for number in range(pairs):
        teller.step(number / pairs, f"pair {number + 1} of {pairs}")
        for size in SIZES:
            tensor = torch.zeros(size, dtype=torch.uint8)
            if size not in counts:
                counts[size] = _calibrate(rank, world, tensor)
            order = ("watched", "unwatched")
            for name in order[::-1] if number % 2 else order:
                world.watch(is_on=name == "watched")
                took, cpu = _stream(rank, world, tensor, counts[size])
                rate = counts[size] / took
                teller.sample("stream", size, name, "messages/s", rate)
                cost = cpu / counts[size] * 1e6
                teller.sample("cpu of sender", size, name, "us", cost)
    world.close()


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
    cpu = _cpu_s(rival)
    return stream(rank, rival, tensor, count), _cpu_s(rival) - cpu


def _cpu_s(rival: OneWorld) -> float:
    """Return what this process and the one that beats for it have taken of a core."""
    helper = rival.manager.watchdog.helper_pid
    schedstat = Path(f"/proc/{helper}/schedstat")
    beating = int(schedstat.read_text().split()[0]) / 1e9 if schedstat.exists() else 0.0
    return time.process_time() + beating
