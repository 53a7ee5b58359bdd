"""Which replica gets the next piece of work. Pure.

Two are drawn at random and the one with less work in flight gets it: nearly as even as
always asking everybody, and senders that know only their own share do not all rush to
the same replica (Mitzenmacher, "The power of two choices", 2001). Work of one session
goes to the replica that rendezvous hashing names (Thaler and Ravishankar, 1998), so
that a replica which comes or goes moves few sessions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

Chance = Callable[[], float]
"""Returns a number from 0 to below 1."""


def choose(
    candidates: Sequence[str],
    load: Mapping[str, int],
    chance: Chance,
    session: str | None = None,
) -> str | None:
    """Return the replica to take, or None if there is none.

    Args:
        candidates: Those that may get it.
        load: Work in flight by replica; 0 where it says nothing.
        chance: Where the two are drawn from.
        session: What must stay together.
    """
    if not candidates:
        return None
    if session is not None:
        return max(candidates, key=lambda name: _weight(session, name))
    if len(candidates) == 1:
        return candidates[0]
    first = int(chance() * len(candidates))
    second = (first + 1 + int(chance() * (len(candidates) - 1))) % len(candidates)
    one, other = candidates[first], candidates[second]
    return one if load.get(one, 0) <= load.get(other, 0) else other


def _weight(session: str, name: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
