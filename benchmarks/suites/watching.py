"""Suite "watching": cost of fault management, switched on and off alternately."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.contenders import OneWorld, stream
from benchmarks.members import Options, Reporter
from multiworld.config import WorldConfig

BASELINE = "unwatched"
SIZE = 2
PAIRS = 30
"""Minimum number of on-off pairs; the report is the interval of their ratios."""

SECONDS = 0.5
"""Approximate seconds of one stream."""

SIZES = (4_096, 409_600)


SILENCE_S = 60.0
"""Seconds of silence that count as a loss: more than a measurement without heartbeats
takes. The value does not change the cost of heartbeats."""


def body(rank: int, options: Options, reporter: Reporter) -> None:
    """Stream for half a second, watched and unwatched alternately, many times."""
    # The same world is used throughout. Two worlds would differ by more than the
    # effect, because their memory lies at different addresses.
    world = OneWorld(rank, options.ports[0], config=WorldConfig(silence_s=SILENCE_S))
    pairs = 4 if options.is_quick else max(PAIRS, options.rounds)
    counts: dict[int, int] = {}
    for number in range(pairs):
        reporter.step(number / pairs, f"pair {number + 1} of {pairs}")
        for size in SIZES:
            tensor = torch.zeros(size, dtype=torch.uint8)
            if size not in counts:
                counts[size] = _calibrate(rank, world, tensor)
            order = ("watched", "unwatched")
            for name in order[::-1] if number % 2 else order:
                world.watch(is_on=name == "watched")
                took, cpu = _stream(rank, world, tensor, counts[size])
                rate = counts[size] / took
                reporter.sample("stream", size, name, "messages/s", rate)
                cost = cpu / counts[size] * 1e6
                reporter.sample("cpu of sender", size, name, "us", cost)
    world.close()


def _calibrate(rank: int, rival: OneWorld, tensor: torch.Tensor) -> int:
    """Return the number of messages that take about ``SECONDS``; rank 0 decides."""
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
    """Return the CPU seconds of this process and its heartbeat helper."""
    helper = rival.manager.watchdog.helper_pid
    schedstat = Path(f"/proc/{helper}/schedstat")
    beating = int(schedstat.read_text().split()[0]) / 1e9 if schedstat.exists() else 0.0
    return time.process_time() + beating
