"""What would have sufficed: learnt from bursts that come again and again. Pure.

Who starts replicas when a burst has begun is too late for it where replicas take
longer to start than requests may wait. All that helps is to keep some between two
bursts, which costs; so it is done only once the objective was missed without.

For every number of replicas that a stage might have had all the time, a fluid queue
runs beside the real one (arrivals flow in, the replicas drain it), and what would have
waited too long in it is counted. How closely together requests come between two looks,
and what batches and chance add to their waiting, nobody has seen: that is found by the
same reckoning for the replicas that there were, against the requests that were late.
What is older than the horizon is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

SIGMAS = 2.0
"""So many standard deviations more than allowed must have been late to say so."""

RELIEF = 0.5
"""All is well again when no more than this part of what is allowed was late."""

EXPLAINED = 0.25
"""Of those that were late, such a share at least must have waited for replicas: all
that was waited is compared with what they would have."""

EACH = 16
"""Every number of replicas up to this one is tried; above, steps grow."""

STEP = 1.2

VIEWS = ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.0, 0.5), (0.0, 0.25))
"""From the brightest to the darkest: in which part of the time between two looks
requests come, and which part of the time that they may wait is left to the fluid."""

Late = tuple[float, ...]
"""Requests that would have waited too long, in each of the ``VIEWS``."""

NONE: Late = (0.0,) * len(VIEWS)


@dataclass(frozen=True, slots=True)
class Fleet:
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
        waited: So many times as long as they may was waited, by all together.
    """

    came: float = 0.0
    missed: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True, slots=True)
class Hindsight:
    """What is known of a model.

    Attributes:
        seconds: That this half of the horizon lasts already.
        recent: Of this half.
        before: Of the half before.
        is_missed: Whether too many were late, and it does not go without keeping some.
        view: In which of the ``VIEWS`` as many would be late as were; 1.5 is between.
        was: By stage, the replicas that there were.
        fleets: By stage, those that might have been there all the time, the smallest
            first.
    """

    seconds: float = 0.0
    recent: Counts = field(default_factory=Counts)
    before: Counts = field(default_factory=Counts)
    is_missed: bool = False
    view: float = 0.0
    was: tuple[Fleet, ...] = ()
    fleets: tuple[tuple[Fleet, ...], ...] = ()

    @property
    def came(self) -> float:
        """Requests within the horizon."""
        return self.before.came + self.recent.came

    @property
    def missed(self) -> float:
        """Of which too late."""
        return self.before.missed + self.recent.missed

    @property
    def waited(self) -> float:
        """See ``Counts``."""
        return self.before.waited + self.recent.waited


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is new since the last look.

    Attributes:
        seconds: Since then.
        arrived: Requests.
        missed: Requests that were found to be late.
        ongoing: By stage, requests that are waiting or computed, now.
        bare_s: Seconds that a request is computed, by all stages together.
        item_s: By stage, seconds that a replica is busy with one request.
        ready: By stage, the replicas that there were.
        most: By stage, the replicas that there may be.
        patience_s: For how long requests may wait.
        is_prompt: Whether new replicas are ready before that.
        share: Of the requests, that should be answered in time.
    """

    seconds: float
    arrived: float
    missed: float
    ongoing: Sequence[float]
    bare_s: float
    item_s: Sequence[float]
    ready: Sequence[int]
    most: Sequence[int]
    patience_s: float
    is_prompt: bool
    share: float


def learnt(before: Hindsight, seen: Seen, horizon_s: float) -> Hindsight:
    """Return what is known with what is new."""
    old = _turned(before) if before.seconds >= horizon_s / 2 else before
    was, fleets = [], []
    for k, item_s in enumerate(seen.item_s):
        there = old.was[k] if k < len(old.was) else Fleet(0)
        was.append(_after(there, seen.ready[k], seen, item_s))
        tried = old.fleets[k] if k < len(old.fleets) else ()
        by_count = {fleet.replicas: fleet for fleet in tried}
        fleets.append(
            tuple(
                _after(by_count.get(n, Fleet(n)), n, seen, item_s)
                for n in sizes(seen.most[k])
            )
        )
    # Little's law: what is there, times how long, is what all spend there together.
    spent_s = sum(seen.ongoing) * seen.seconds - seen.bare_s * seen.arrived
    recent = Counts(
        old.recent.came + seen.arrived,
        old.recent.missed + seen.missed,
        old.recent.waited + spent_s / seen.patience_s,
    )
    found = replace(
        old,
        seconds=old.seconds + seen.seconds,
        recent=recent,
        was=tuple(was),
        fleets=tuple(fleets),
    )
    # What was seen darkly once is seen brighter only bit by bit: that nobody is late
    # says little while enough are kept.
    view = max(_view(found), old.view - seen.seconds / horizon_s)
    return replace(found, is_missed=_is_missed(found, seen), view=view)


def sufficient(
    hindsight: Hindsight, item_s: Sequence[float], share: float
) -> tuple[int, ...]:
    """Return by stage how many replicas would have sufficed; none if all is well.

    None either where it is not for want of replicas that requests were late. No stage
    needs to be faster than the narrowest of them can ever be.

    Args:
        item_s: By stage, seconds that a replica is busy with one request.
        share: Of the requests, that should be answered in time.
    """
    fleets = hindsight.fleets
    if not hindsight.is_missed:
        return (0,) * len(fleets)
    allowed = (1.0 - share) * hindsight.came
    view = hindsight.view
    least = [
        next(
            (f.replicas for f in tried if _late(f, view) <= allowed), tried[-1].replicas
        )
        for tried in fleets
    ]
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


def _turned(old: Hindsight) -> Hindsight:
    """Return the same at the begin of a new half: the one before last is forgotten."""

    def turned(fleet: Fleet) -> Fleet:
        return replace(fleet, late=NONE, before=fleet.late)

    return replace(
        old,
        seconds=0.0,
        recent=Counts(),
        before=old.recent,
        was=tuple(map(turned, old.was)),
        fleets=tuple(tuple(map(turned, tried)) for tried in old.fleets),
    )


def _is_missed(found: Hindsight, seen: Seen) -> bool:
    allowed = (1.0 - seen.share) * found.came
    if found.is_missed:
        # Kept replicas are why all is well: only where it goes without are they let go.
        return not seen.is_prompt or found.missed > RELIEF * allowed
    is_much = found.missed > allowed + SIGMAS * math.sqrt(max(allowed, 1.0))
    return is_much and found.waited >= EXPLAINED * found.missed


def _view(hindsight: Hindsight) -> float:
    """Return the first of the ``VIEWS`` in which as many would be late as were."""
    before = 0.0
    for view in range(len(VIEWS)):
        late = max(_late(fleet, view) for fleet in hindsight.was)
        if late >= hindsight.missed:
            gap = late - before
            return view - (late - hindsight.missed) / gap if view and gap > 0 else view
        before = late
    return len(VIEWS) - 1.0


def _late(fleet: Fleet, view: float) -> float:
    """Return how many would be late, also in between two views."""
    low = min(int(view), len(VIEWS) - 2)
    one = fleet.before[low] + fleet.late[low]
    other = fleet.before[low + 1] + fleet.late[low + 1]
    return one + (view - low) * (other - one)


def _after(fleet: Fleet, replicas: int, seen: Seen, item_s: float) -> Fleet:
    """Return a fleet of so many after what is new."""
    if item_s <= 0:
        return Fleet(replicas)
    rate = max(replicas, 0.01) / item_s  # with none, everybody waits for long
    whole = fleet.queue + seen.arrived

    def left(seconds: float) -> float:
        return max(0.0, whole - rate * seconds)

    first = fleet.queue / rate
    late = tuple(
        before
        + seen.arrived
        * _above(part * seen.patience_s, first, left(of * seen.seconds) / rate)
        for before, (of, part) in zip(fleet.late, VIEWS, strict=True)
    )
    return Fleet(replicas, left(seen.seconds), late, fleet.before)


def _above(limit: float, first: float, last: float) -> float:
    """Return the share of what lies evenly between two numbers that is above."""
    low, high = min(first, last), max(first, last)
    if high <= limit:
        return 0.0
    return 1.0 if low >= limit else (high - limit) / (high - low)
