"""Load balancing: choice of the replica for the next piece of work. Pure.

Each piece of work goes to the less loaded of two random replicas. This balances the
load nearly as well as comparing all replicas, and senders that know only their own work
in flight do not all choose the same replica (Mitzenmacher, "The Power of Two Choices in
Randomized Load Balancing", 2001). Work of a session goes to the session's home, which
consistent hashing selects: adding or removing a replica moves few sessions.
"""

from __future__ import annotations

import hashlib
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Of = TypeVar("Of")
Chance = Callable[[], float]  # random numbers in [0, 1)

# Probes per session. With this many, the most loaded replica gets 1.05 times its fair
# share.
PROBES = 21
BYTES = 8  # size of a point on the ring
CIRCLE = 256**BYTES


def choose(
    candidates: Sequence[Of],
    load: Callable[[Of], int | tuple[int, int]],
    chance: Chance,
) -> Of | None:
    """Return the replica that gets the work, or None without candidates."""
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    first = int(chance() * len(candidates))
    second = (first + 1 + int(chance() * (len(candidates) - 1))) % len(candidates)
    return min(candidates[first], candidates[second], key=load)


class HashRing:
    """Consistent hashing of sessions: a point per replica, several probes per session.

    A session's home is the replica whose point follows one of its probes most closely
    (Appleton and O'Reilly, "Multi-probe consistent hashing", 2015).
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._ring = sorted((_points(name, 1)[0], name) for name in names)
        self._points = [point for point, _ in self._ring]

    def home(self, session: str) -> str:
        """Return the home of a session; empty if there are no replicas."""
        best, home = CIRCLE, ""
        for probe in _points(session, PROBES) if self._ring else ():
            point, name = self._ring[bisect(self._points, probe) % len(self._ring)]
            distance = (point - probe) % CIRCLE
            if distance < best:
                best, home = distance, name
        return home


def _points(text: str, count: int) -> list[int]:
    bits = hashlib.shake_128(text.encode()).digest(BYTES * count)
    ends = range(BYTES, len(bits) + 1, BYTES)
    return [int.from_bytes(bits[end - BYTES : end], "big") for end in ends]
