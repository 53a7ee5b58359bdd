"""What would have sufficed: learnt from bursts that come again and again. Pure.

Who starts replicas when a burst has begun is too late for it where replicas take
longer to start than requests may wait. All that helps is to keep some between two
bursts, which costs; so it is done only once the objective was missed without.

For every number of replicas that a stage might have had all the time, a fluid queue
runs beside the real one (arrivals flow in, the replicas drain it), and what would have
waited too long in it is counted. How closely together requests come between two looks,
and what batches and chance add to their waiting, nobody has seen: that is found by the
same reckoning for the replicas that there were, against the requests that were late
for want of replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

SIGMAS = 2.0
"""So many standard deviations more than allowed must have been late to say so."""

SPELLS = 2
"""So many times, apart from each other, answers must have been late."""

EXPLAINED = 0.25
"""Who is late has waited about as long as one may. What all have waited says how many
that can be: at a fourth of it each, as few are seen while they wait."""

EACH = 16
"""Every number of replicas up to this one is tried; above, steps grow."""

STEP = 1.2

VIEWS = ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.0, 0.5), (0.0, 0.25))
"""From the brightest to the darkest: in which part of the time between two looks
requests come, and which part of the time that they may wait is left to the fluid."""

CLUMP_S = 1.0
"""Requests of longer times are taken to have come in clumps of no more than this."""

BRIGHTER = 1.0
"""Views by which what was seen darkly is seen brighter, in a horizon in which fewer are
late: that nobody is says little while enough are kept."""

Late = tuple[float, ...]
"""Requests that would have waited too long, in each of the ``VIEWS``."""

NONE: Late = (0.0,) * len(VIEWS)


@dataclass(frozen=True, slots=True)
class FleetFacts:
    """So many replicas of a stage.

    Attributes:
        queue: Requests that would wait now.
        late: In this half of the horizon.
        before: The same, in the half before.
    """

    replicas: int
    queue: float = 0.0
    late: Late = NONE
    before: Late = NONE


@dataclass(frozen=True, slots=True)
class Counts:
    """Of a model.

    Attributes:
        came: Requests.
        missed: Of which the answer was late, or none for want of replicas. Measured.
        refused: Of which there was none because too many waited.
        waited: So many times as long as they may was waited, by all together.
        spells: Times that answers began to be late.
    """

    came: float = 0.0
    missed: float = 0.0
    refused: float = 0.0
    waited: float = 0.0
    spells: int = 0


@dataclass(frozen=True, slots=True)
class BurstReserve:
    """What is known of a model.

    Attributes:
        seconds: That this half of the horizon lasts already.
        recent: Of this half.
        before: Of the half before.
        calm_s: Since an answer was late; None if none ever was.
        is_missed: Whether too many were, and it does not go without keeping some.
        view: In which of the ``VIEWS`` as many would be late as were; 1.5 is between.
        was: By stage, the replicas that there were.
        fleets: By stage, those that might have been there all the time, the smallest
            first.
    """

    seconds: float = 0.0
    recent: Counts = field(default_factory=Counts)
    before: Counts = field(default_factory=Counts)
    calm_s: float | None = None
    is_missed: bool = False
    view: float = 0.0
    was: tuple[FleetFacts, ...] = ()
    fleets: tuple[tuple[FleetFacts, ...], ...] = ()

    @property
    def came(self) -> float:
        """Requests within the horizon."""
        return self.before.came + self.recent.came

    @property
    def missed(self) -> float:
        """Of which too late for want of replicas, as far as can be told."""
        missed = self.before.missed + self.recent.missed
        refused = self.before.refused + self.recent.refused
        waited = max(0.0, self.before.waited + self.recent.waited)
        return min(missed, refused + waited / EXPLAINED)

    @property
    def spells(self) -> int:
        """See ``Counts``."""
        return self.before.spells + self.recent.spells


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRecord:
    """What is new since the last look.

    Attributes:
        seconds: Since then.
        arrived: Requests.
        missed: Requests that were found to be late, or refused.
        refused: Requests that were refused.
        ongoing: By stage, requests that are waiting or computed, now.
        item_s: By stage, seconds that a replica is busy with one request.
        ready: By stage, the replicas that there were.
        least: By stage, the replicas that there are always.
        most: By stage, the replicas that there may be.
        patience_s: For how long requests may wait.
        deadline_s: After which they wait no more.
        apart_s: After which it is another burst that is late: there was time to answer
            the one before with more replicas.
        share: Of the requests, that should be answered in time.
    """

    seconds: float
    arrived: float
    missed: float
    refused: float
    ongoing: Sequence[float]
    item_s: Sequence[float]
    ready: Sequence[int]
    least: Sequence[int]
    most: Sequence[int]
    patience_s: float
    deadline_s: float
    apart_s: float
    share: float


def learnt(before: BurstReserve, seen: BurstRecord, horizon_s: float) -> BurstReserve:
    """Return what is known with what is new.

    What is older than ``horizon_s`` is forgotten, half of it at a time.
    """
    old = _turned(before) if before.seconds >= horizon_s / 2 else before
    was, fleets = [], []
    for k, item_s in enumerate(seen.item_s):
        there = old.was[k] if k < len(old.was) else FleetFacts(0)
        was.append(_after(there, seen.ready[k], seen, item_s))
        tried = old.fleets[k] if k < len(old.fleets) else ()
        by_count = {fleet.replicas: fleet for fleet in tried}
        fleets.append(
            tuple(
                _after(by_count.get(n, FleetFacts(n)), n, seen, item_s)
                for n in sizes(seen.most[k])
            )
        )
    found = replace(
        old,
        seconds=old.seconds + seen.seconds,
        recent=_counted(old, seen),
        calm_s=_calm_s(old, seen),
        was=tuple(was),
        fleets=tuple(fleets),
    )
    view = max(_view(found), old.view - BRIGHTER * seen.seconds / horizon_s)
    found = replace(found, view=view)
    return replace(found, is_missed=_is_missed(found, seen))


def sufficient(
    hindsight: BurstReserve, item_s: Sequence[float], share: float
) -> tuple[int, ...]:
    """Return by stage how many replicas would have sufficed; none if all is well.

    No stage needs to be faster than the narrowest of them can ever be.

    Args:
        item_s: By stage, seconds that a replica is busy with one request.
        share: Of the requests, that should be answered in time.
    """
    fleets = hindsight.fleets
    if not hindsight.is_missed:
        return (0,) * len(fleets)
    allowed = (1.0 - share) * hindsight.came
    least = [_least(tried, hindsight.view, allowed) for tried in fleets]
    narrowest = min(
        (tried[-1].replicas / s for tried, s in zip(fleets, item_s, strict=True) if s),
        default=math.inf,
    )
    return tuple(
        min(count, math.ceil(narrowest * s - 1e-9)) if s else 1
        for count, s in zip(least, item_s, strict=True)
    )


def sizes(most: int) -> list[int]:
    """Return the numbers of replicas that are tried."""
    found = list(range(1, min(most, EACH) + 1))
    while found[-1] < most:
        found.append(min(most, math.ceil(STEP * found[-1])))
    return found


# What was.


def _turned(old: BurstReserve) -> BurstReserve:
    """Return the same at the begin of a new half: the one before last is forgotten."""

    def turned(fleet: FleetFacts) -> FleetFacts:
        return replace(fleet, late=NONE, before=fleet.late)

    return replace(
        old,
        seconds=0.0,
        recent=Counts(),
        before=old.recent,
        was=tuple(map(turned, old.was)),
        fleets=tuple(tuple(map(turned, tried)) for tried in old.fleets),
    )


def _counted(old: BurstReserve, seen: BurstRecord) -> Counts:
    # Little's law: what is there, times how long, is what all spend there together.
    computed_s = sum(seen.item_s) * (seen.arrived - seen.refused)
    waited_s = sum(seen.ongoing) * seen.seconds - computed_s
    is_new = seen.missed > 0 and (old.calm_s is None or old.calm_s >= seen.apart_s)
    return Counts(
        came=old.recent.came + seen.arrived,
        missed=old.recent.missed + seen.missed,
        refused=old.recent.refused + seen.refused,
        waited=old.recent.waited + waited_s / seen.patience_s,
        spells=old.recent.spells + is_new,
    )


def _calm_s(old: BurstReserve, seen: BurstRecord) -> float | None:
    if seen.missed > 0:
        return 0.0
    return None if old.calm_s is None else old.calm_s + seen.seconds


def _is_missed(found: BurstReserve, seen: BurstRecord) -> bool:
    """Tell whether some are to be kept; once they are, until the fewest would do."""
    allowed = (1.0 - seen.share) * found.came
    if found.is_missed:
        return any(
            _least(tried, found.view, allowed) > least
            for tried, least in zip(found.fleets, seen.least, strict=True)
        )
    much = allowed + SIGMAS * math.sqrt(max(allowed, 1.0))
    return found.spells >= SPELLS and found.missed > much


# What would have been.


def _view(hindsight: BurstReserve) -> float:
    """Return the first of the ``VIEWS`` in which as many would be late as were."""
    before = 0.0
    for view in range(len(VIEWS)):
        late = max(_late(fleet, view) for fleet in hindsight.was)
        if late >= hindsight.missed:
            gap = late - before
            return view - (late - hindsight.missed) / gap if view and gap > 0 else view
        before = late
    return len(VIEWS) - 1.0


def _least(tried: Sequence[FleetFacts], view: float, allowed: float) -> int:
    """Return the fewest replicas with which no more than so many would be late."""
    enough = (fleet.replicas for fleet in tried if _late(fleet, view) <= allowed)
    return next(enough, tried[-1].replicas)


def _late(fleet: FleetFacts, view: float) -> float:
    """Return how many would be late, also in between two views."""
    low = min(int(view), len(VIEWS) - 2)
    one = fleet.before[low] + fleet.late[low]
    other = fleet.before[low + 1] + fleet.late[low + 1]
    return one + (view - low) * (other - one)


def _after(
    fleet: FleetFacts, replicas: int, seen: BurstRecord, item_s: float
) -> FleetFacts:
    """Return a fleet of so many after what is new."""
    if item_s <= 0:
        return FleetFacts(replicas)
    rate = max(replicas, 0.01) / item_s  # with none, everybody waits for long
    clumps = max(1, math.ceil(seen.seconds / CLUMP_S))
    arrived, seconds = seen.arrived / clumps, seen.seconds / clumps
    queue, late = fleet.queue, fleet.late
    for _ in range(clumps):
        late = tuple(
            before
            + arrived
            * _above(
                part * seen.patience_s,
                queue / rate,
                max(0.0, queue + arrived - rate * of * seconds) / rate,
            )
            for before, (of, part) in zip(late, VIEWS, strict=True)
        )
        queue = max(0.0, queue + arrived - rate * seconds)
        queue = min(queue, rate * seen.deadline_s)  # who waits for longer has left
    return FleetFacts(replicas, queue, late, fleet.before)


def _above(limit: float, first: float, last: float) -> float:
    """Return the share of what lies evenly between two numbers that is above."""
    low, high = min(first, last), max(first, last)
    if high <= limit:
        return 0.0
    return 1.0 if low >= limit else (high - limit) / (high - low)
