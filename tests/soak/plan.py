"""Plan of a soak: worlds, faults, and the verdicts that must follow, from one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

SILENCE_S = 2.0

RESIDENTS_A_HOST = 3
WORLDS = 24
SIZES = (2, 2, 3, 3, 4)
BACKENDS = ("direct", "direct", "direct", "gloo")


@dataclass(frozen=True)
class Place:
    """A world and its members by rank, as numbers of residents."""

    name: str
    members: tuple[int, ...]
    backend: str


@dataclass(frozen=True)
class City:
    """Residents, their hosts, and their worlds."""

    hosts: int
    homes: tuple[int, ...]
    worlds: tuple[Place, ...]

    def of(self, resident: int) -> list[Place]:
        return [world for world in self.worlds if resident in world.members]


@dataclass(frozen=True)
class Fault:
    """A fault, or another event that breaks worlds.

    Attributes:
        kind: Kind of the fault, as in ``KINDS``.
        resident: Resident that it affects, or -1.
        host: Host that it affects, or -1.
        other: Host towards which a one-way cut drops packets.
        seconds: Seconds that it lasts.
        world: World that is left, for a leave.
    """

    kind: str
    resident: int = -1
    host: int = -1
    other: int = -1
    seconds: float = 0.0
    world: str = ""


ENDS = ("kill", "segfault", "exit")
HARMLESS = ("short stop", "short cut", "store lost", "blocked")
KINDS = (*ENDS, "stop", "leave", "cut", "one-way cut", *HARMLESS)
NETWORK = ("cut", "one-way cut", "short cut")


def make_city(chance: random.Random, hosts: int) -> City:
    """Return a random city on this many hosts; one host has no network to break."""
    residents = RESIDENTS_A_HOST * 3
    homes = tuple(number % hosts for number in range(residents))
    worlds = []
    for number in range(WORLDS):
        size = chance.choice(SIZES)
        # Neighbours first, so that every resident is in some world.
        first = number % residents
        rest = [other for other in range(residents) if other != first]
        members = (first, *chance.sample(rest, size - 1))
        worlds.append(Place(f"w{number}", members, chance.choice(BACKENDS)))
    return City(hosts, homes, tuple(worlds))


def next_fault(chance: random.Random, city: City) -> Fault:
    kinds = [kind for kind in KINDS if city.hosts > 1 or kind not in NETWORK]
    kind = chance.choice(kinds)
    resident = chance.randrange(len(city.homes))
    host, other = chance.sample(range(city.hosts), 2) if city.hosts > 1 else (0, 0)
    long_s, short_s = SILENCE_S + 1.5, chance.uniform(0.2, SILENCE_S - 0.5)
    if kind in ENDS:
        return Fault(kind, resident=resident)
    if kind == "leave":
        world = chance.choice(city.of(resident)).name
        return Fault(kind, resident=resident, world=world)
    if kind in ("stop", "short stop"):
        return Fault(kind, resident, seconds=long_s if kind == "stop" else short_s)
    if kind == "blocked":
        return Fault(kind, resident, seconds=long_s)
    if kind == "store lost":
        return Fault(kind, seconds=chance.uniform(0.5, 3.0))
    if kind == "one-way cut":
        return Fault(kind, host=host, other=other, seconds=long_s + 0.5)
    return Fault(kind, host=host, seconds=short_s if kind == "short cut" else long_s)


@dataclass(frozen=True)
class Verdicts:
    """Verdicts that must follow in one world.

    Attributes:
        named: Ranks that a member may name as lost, by the member's rank.
        fenced: Ranks of members that may learn that they are stale instead.
    """

    named: dict[int, frozenset[int]]
    fenced: frozenset[int]


def expected(city: City, fault: Fault) -> dict[str, Verdicts]:
    found = {}
    for world in city.worlds:
        verdicts = _expected_of(city, world, fault)
        if verdicts is not None:
            found[world.name] = verdicts
    return found


def _expected_of(city: City, world: Place, fault: Fault) -> Verdicts | None:
    ranks = range(len(world.members))
    homes = [city.homes[member] for member in world.members]
    if fault.kind in (*ENDS, "stop"):
        if fault.resident not in world.members:
            return None
        victim = world.members.index(fault.resident)
        others = {rank: frozenset({victim}) for rank in ranks if rank != victim}
        return Verdicts(others, frozenset({victim}))
    if fault.kind == "cut":
        inside = frozenset(rank for rank in ranks if homes[rank] == fault.host)
        outside = frozenset(ranks) - inside
        if not inside or not outside:
            return None
        sides = {rank: outside if rank in inside else inside for rank in ranks}
        return Verdicts(sides, frozenset())
    if fault.kind == "one-way cut":
        here = frozenset(rank for rank in ranks if homes[rank] == fault.host)
        there = frozenset(rank for rank in ranks if homes[rank] == fault.other)
        if not here or not there:
            return None
        return Verdicts({rank: (here | there) - {rank} for rank in ranks}, here | there)
    return None


def left(city: City, fault: Fault) -> str:
    """Return the world that a resident leaves cleanly; empty if it is another fault."""
    return fault.world if fault.kind == "leave" else ""
