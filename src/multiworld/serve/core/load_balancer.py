"""Load balancing: choice of the replica for the next piece of work. Pure.

Of two random replicas, the one with less work in flight gets it. This is nearly as even
as comparing all replicas, and senders that know only their own work in flight do not
all rush to the same replica (Mitzenmacher, "The Power of Two Choices in Randomized Load
Balancing", 2001). Work of a session goes to the replica chosen by rendezvous hashing
(Thaler and Ravishankar, 1998), so adding or removing a replica moves few sessions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

Chance = Callable[[], float]  # random numbers in [0, 1)


def choose(
    candidates: Sequence[str],
    load: Mapping[str, int],
    chance: Chance,
    session: str | None = None,
) -> str | None:
    """Return the replica that gets the work, or None without candidates."""
    if not candidates:
        return None
    if session is not None:
        return max(candidates, key=lambda name: affinity(session, name))
    if len(candidates) == 1:
        return candidates[0]
    first = int(chance() * len(candidates))
    second = (first + 1 + int(chance() * (len(candidates) - 1))) % len(candidates)
    one, other = candidates[first], candidates[second]
    return one if load.get(one, 0) <= load.get(other, 0) else other


def affinity(session: str, name: str) -> bytes:
    """Return how much a session prefers a replica: the highest value wins."""
    return hashlib.blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
