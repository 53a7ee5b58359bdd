"""Suite "p2p": one-way streams and round trips of 64 B to 64 MB."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks import contenders
from benchmarks.contenders import Contender, stream
from benchmarks.members import Options, Reporter
from benchmarks.rivals.contender import Apart

BASELINE = "plain gloo"
SIZE = 2
SIZES = (64, 4_096, 40_960, 409_600, 4_194_304, 67_108_864)
QUICK = (4_096, 409_600)
BUDGET_BYTES = 384 * 1024 * 1024
"""Bytes of one stream."""

MAX_MESSAGES, MIN_MESSAGES = 5_000, 6
"""Maximum and minimum number of messages of one stream."""

STREAM, TRIP, UNKNOWN = "stream", "round trip", "stream, shape unknown"


ENDS = ("pymultiworld", "ucxx", "nixl")
"""Contenders that have environments of their own."""

TRIPS_ONLY = ("by name", "no spin")
"""Contenders whose streams would equal those of ``world, direct``."""

SLOW = ("gloo, asyncio", "pymultiworld")
"""Contenders that send a quarter of the messages, to save time."""


def messages_in(size: int) -> int:
    """Return the number of messages of this size in one stream."""
    return max(MIN_MESSAGES, min(MAX_MESSAGES, BUDGET_BYTES // size))


def body(rank: int, options: Options, reporter: Reporter) -> None:
    """Measure every contender in every round, at each size."""
    rivals = _rivals(rank, options)
    sizes = QUICK if options.is_quick else SIZES
    total = options.rounds * len(sizes)
    for number in range(options.rounds):
        for place, size in enumerate(sizes):
            reporter.step((number * len(sizes) + place) / total, f"{size:,} bytes")
            tensor = torch.zeros(size, dtype=torch.uint8)
            order = list(rivals)[::-1] if number % 2 else list(rivals)
            for name in order:
                _measure(rank, name, rivals[name], tensor, reporter)
    for rival in rivals.values():
        rival.close()


def _rivals(rank: int, options: Options) -> dict[str, Contender]:
    ports = iter(options.ports)
    rivals: dict[str, Contender] = {}
    for name in contenders.available():
        rivals[name] = contenders.MAKERS[name](rank, next(ports))
    for name in (n for n in options.apart if n in ENDS):
        apart = Apart(name, Path(options.environments), rank, next(ports))
        apart.wait_ready()
        rivals[name] = apart
    return rivals


def _measure(
    rank: int, name: str, rival: Contender, tensor: torch.Tensor, reporter: Reporter
) -> None:
    size = tensor.numel()
    count = messages_in(size)
    if name in SLOW:
        count = max(MIN_MESSAGES, count // 4)
    if name in contenders.COPIES:
        # Only rank 0 copies; rank 1 waits for it in the next ``_meet``.
        if rank == 0 and size >= contenders.COPIES[name]:
            took = _timed_copies(rival, tensor, count)
            reporter.sample(STREAM, size, name, "messages/s", count / took)
        return
    _meet(rival, rank)
    if name not in TRIPS_ONLY:
        took = stream(rank, rival, tensor, count, is_known=True)
        reporter.sample(STREAM, size, name, "messages/s", count / took)
    if name.startswith(("world", "unwatched")):
        _meet(rival, rank)
        took = stream(rank, rival, tensor, count, is_known=False)
        reporter.sample(UNKNOWN, size, name, "messages/s", count / took)
    trips = max(MIN_MESSAGES, count // 6)
    began = time.perf_counter()
    rival.ping(tensor, trips, is_first=rank == 0)
    took = (time.perf_counter() - began) / trips * 1e6
    reporter.sample(TRIP, size, name, "us", took)


def _meet(rival: Contender, rank: int) -> None:
    """Wait for the other rank, and warm both up."""
    rival.ping(torch.zeros(1), 10, is_first=rank == 0)


def _timed_copies(rival: Contender, tensor: torch.Tensor, count: int) -> float:
    rival.recv_many(tensor, 2)
    began = time.perf_counter()
    rival.recv_many(tensor, count)
    return time.perf_counter() - began
