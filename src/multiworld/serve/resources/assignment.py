"""Where the next replica goes. Pure.

In this order: as the solver's plan says; where fewest replicas of its post are, so that
a machine that fails takes few; where most is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from multiworld.errors import PlacementError
from multiworld.serve.resources.amounts import Location, Need, in_words
from multiworld.serve.resources.bookings import Bookings, Free

Plan = Mapping[tuple[Any, str], int]
"""How many replicas a solver wants of a post on a machine."""


class Policy(Protocol):
    """Chooses a spot from a snapshot; another one can be put in its place."""

    def __call__(
        self, ledger: Bookings, post: object, need: Need, plan: Plan
    ) -> Location:
        """Return it.

        Raises:
            PlacementError: There is none; ``short`` says why, by machine.
        """


def assign(ledger: Bookings, post: object, need: Need, plan: Plan) -> Location:
    """Return the spot for one more replica of ``post``.

    Raises:
        PlacementError: No machine has what it needs; ``short`` has what each lacks.
    """
    short = {name: ledger.shortage(name, need) for name in ledger.nodes}
    able = [name for name, lack in short.items() if not lack]
    if not able:
        lacks = "; ".join(f"{name}: {lack}" for name, lack in short.items())
        raise PlacementError(
            f"it needs {in_words(need)}, and no machine has that: "
            f"{lacks or 'there is no machine'}",
            short=short,
        )

    def merit(name: str) -> tuple[float, ...]:
        here = ledger.count(name, post)
        is_planned = here < plan.get((post, name), 0)
        return is_planned, -here, _share_left(ledger, name), -len(ledger.on(name))

    # max() keeps the first of equals: the order of the machines decides.
    best = max(able, key=merit)
    return Location(best, _gpu(ledger.free(best), need))


def _share_left(ledger: Bookings, name: str) -> float:
    """Return what is left of what would be short first."""
    has, free = ledger.nodes[name], ledger.free(name)
    shares = [free.memory_bytes / max(1, has.memory_bytes)]
    shares.append(free.cpus / max(1e-9, has.cpus))
    return round(min(shares), 6)


def _gpu(free: Free, need: Need) -> int | None:
    if not need.on_gpu:
        return None
    if need.gpu is not None:
        return need.gpu
    left = free.gpu_memory_bytes
    return max(left, key=lambda index: (left[index], -index))
