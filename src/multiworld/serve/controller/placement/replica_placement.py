"""Bookings of the replicas of a service, and the choice of their machines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

from multiworld.errors import PlacementError
from multiworld.serve.controller.fleet.state import DesiredState
from multiworld.serve.controller.placement.problem_builder import PlacedReplica, moves
from multiworld.serve.machines.amounts import Location, Need, Node, needs_of
from multiworld.serve.machines.assignment import Plan, Policy, assign
from multiworld.serve.machines.bookings import Booking, Bookings
from multiworld.serve.spec.schema import ModelSpec

Specs = Mapping[str, Mapping[str, ModelSpec]]

# A post (one stage of one version of a model), its title for people, its number of
# replicas, and the need of each replica.
PlaceRequest = tuple[object, str, int, Need]


class ReplicaBookings:
    def __init__(self, nodes: Iterable[Node], policy: Policy = assign) -> None:
        self.ledger = Bookings(nodes)
        self.plan: Plan = {}
        self._policy = policy

    def set_nodes(self, nodes: Iterable[Node]) -> tuple[list[str], list[str]]:
        """Replace the machines; return the names of added and of lost ones."""
        before = set(self.ledger.nodes)
        self.ledger.set_nodes(nodes)
        after = set(self.ledger.nodes)
        return sorted(after - before), sorted(before - after)

    def take(self, name: str, post: object, need: Need) -> tuple[Location, str]:
        """Book a location for a replica; return both the location and the reason."""
        spot = self._choose(self.ledger, post, need)
        here = self.ledger.count(spot.node, post)
        is_planned = here < self.plan.get((post, spot.node), 0)
        self.ledger.book(name, post, spot, need)
        if is_planned:
            return spot, "as planned"
        peers = "few replicas" if here else "no replica"
        return spot, f"the machine has room, and {peers} of this stage"

    def _choose(self, ledger: Bookings, post: object, need: Need) -> Location:
        try:
            found: object = self._policy(ledger, post, need, self.plan)
        except PlacementError:
            raise
        except Exception as error:  # a user's policy may raise anything
            text = f"the placement policy raised {type(error).__name__}: {error}"
            raise PlacementError(text) from error
        if not isinstance(found, Location):
            raise PlacementError(
                f"the placement policy returned {found!r} instead of a Location"
            )
        return found

    def admit(self, asks: Iterable[PlaceRequest]) -> Bookings:
        """Return bookings with all requests; raise PlacementError if one lacks room."""
        trial = self.ledger.copy()
        missing = []
        for post, title, count, need in asks:
            here = sum(b.post == post for b in trial.bookings.values())
            missing += [(post, title, need, count)] * max(0, count - here)
        # Largest first, because they are the hardest to place.
        missing.sort(key=lambda ask: _size(ask[2]), reverse=True)
        for number, (post, title, need, count) in enumerate(missing):
            try:
                spot = self._choose(trial, post, need)
            except PlacementError as error:
                placed = sum(b.post == post for b in trial.bookings.values())
                raise PlacementError(
                    f"{title}: {placed} of {count} replicas can be placed; one more "
                    f"cannot: {error}",
                    short=error.short,
                ) from None
            trial.book(f"\0{number}", post, spot, need)
        return trial

    def runs(
        self, versions: Mapping[str, str], names: Iterable[str]
    ) -> list[PlacedReplica]:
        """Return the locations of the named replicas that run the given versions."""
        found = []
        bookings = [self.ledger.bookings.get(name) for name in names]
        for booking in filter(None, bookings):
            model, version, stage = cast("tuple[str, str, int]", booking.post)
            if versions.get(model) == version:
                spot = booking.spot
                found.append(PlacedReplica(model, stage, spot.node, spot.gpus))
        return found

    def moves(self, names: Iterable[str]) -> list[str]:
        """Return the replicas that the plan places elsewhere and that fit there."""
        # Check the room: a plan ignores replicas of unplanned models, and the cores of
        # GPU replicas.
        bookings = self.ledger.bookings
        here = {n: (bookings[n].post, bookings[n].spot.node) for n in names}
        return [n for n in moves(self.plan, here) if self._has_room(bookings[n])]

    def _has_room(self, booking: Booking) -> bool:
        return any(
            post == booking.post
            and self.ledger.count(node, post) < count
            and not self.ledger.shortage(node, booking.need)
            for (post, node), count in self.plan.items()
        )

    def limits(self) -> dict[str, int]:
        """Return the memory limit of each replica that declares one, in bytes."""
        return {
            name: booking.need.memory_bytes
            for name, booking in self.ledger.bookings.items()
            if booking.need.memory_bytes
        }


def asks_of(wanted: DesiredState, specs: Specs) -> list[PlaceRequest]:
    asks: list[PlaceRequest] = []
    for name, model in wanted.models.items():
        spec = specs[name][model.version]
        for k, need in enumerate(needs_of(spec)):
            post = name, model.version, k
            title = f"stage {spec.stages[k].name or k} of {name} ({model.version})"
            count = model.replicas[k] + model.spares_of(k)
            asks.append((post, title, count, need))
    return asks


def _size(need: Need) -> tuple[bool, int, int, int, float]:
    return (
        bool(need.nodes),
        need.gpus,
        need.gpu_memory_bytes,
        need.memory_bytes,
        need.cpus,
    )
