"""Admission: checks that all replicas fit before any starts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from multiworld.errors import PlacementError
from multiworld.serve.resources.amounts import Need
from multiworld.serve.resources.assignment import Plan, Policy, assign
from multiworld.serve.resources.bookings import Bookings

PlaceRequest = tuple[object, str, int, Need]
"""Post, its title for people, its number of replicas, and the need of each.

A post identifies the replicas of one stage of one version of a model."""


def admit(
    ledger: Bookings,
    asks: Iterable[PlaceRequest],
    policy: Policy = assign,
    plan: Plan | None = None,
) -> Bookings:
    """Return the bookings with all requested replicas placed, the largest needs first.

    Running replicas stay. Raises ``PlacementError`` with what each machine lacks.
    """
    trial = ledger.copy()
    missing = []
    for post, title, count, need in asks:
        here = sum(b.post == post for b in trial.bookings.values())
        missing += [(post, title, need, count)] * max(0, count - here)
    missing.sort(key=lambda ask: _size(ask[2]), reverse=True)
    for number, (post, title, need, count) in enumerate(missing):
        try:
            spot = policy(trial, post, need, plan or {})
        except PlacementError as error:
            placed = sum(b.post == post for b in trial.bookings.values())
            raise PlacementError(
                f"{title}: {placed} of {count} replicas can be placed; for one more "
                f"{error}",
                short=error.short,
            ) from None
        trial.book(f"\0{number}", post, spot, need)
    return trial


def _size(need: Need) -> tuple[bool, bool, int, int, float]:
    return (
        bool(need.nodes),
        need.on_gpu,
        need.gpu_memory_bytes,
        need.memory_bytes,
        need.cpus,
    )
