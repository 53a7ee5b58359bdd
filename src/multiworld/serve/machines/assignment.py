"""Choice of the machine for the next replica. Pure.

Criteria, in this order: the solvers' plan; the fewest replicas of the same post (stage
of a version), so that losing a machine affects few of them; the most free resources;
the fewest replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from multiworld.errors import PlacementError
from multiworld.serve.machines.amounts import Location, Need, in_words
from multiworld.serve.machines.bookings import Bookings, able_gpus

Plan = Mapping[tuple[Any, str], int]  # planned replicas of each post on each machine


# Returns the location of one more replica of a post, as ``assign`` does. It raises
# PlacementError if no machine fits; ``short`` says why, by machine.
Policy = Callable[[Bookings, object, Need, Plan], Location]


def assign(ledger: Bookings, post: object, need: Need, plan: Plan) -> Location:
    short = {name: ledger.shortage(name, need) for name in ledger.nodes}
    able = [name for name, lack in short.items() if not lack]
    if not able:
        lacks = "; ".join(f"{name}: {lack}" for name, lack in short.items())
        raise PlacementError(
            f"a replica needs {in_words(need)}, and no machine has this free: "
            f"{lacks or 'there are no machines'}",
            short=short,
        )

    def merit(name: str) -> tuple[float, ...]:
        here = ledger.count(name, post)
        is_planned = here < plan.get((post, name), 0)
        return is_planned, -here, _share_left(ledger, name), -len(ledger.on(name))

    # max() returns the first of equals, so the order of the machines breaks ties.
    best = max(able, key=merit)
    return Location(
        best, tuple(sorted(able_gpus(ledger.free(best), need)[: need.gpus]))
    )


def _share_left(ledger: Bookings, name: str) -> float:
    """Return the free share of the scarcest resource of a machine."""
    has, free = ledger.nodes[name], ledger.free(name)
    shares = [free.memory_bytes / max(1, has.memory_bytes)]
    shares.append(free.cpus / max(1e-9, has.cpus))
    return round(min(shares), 6)
