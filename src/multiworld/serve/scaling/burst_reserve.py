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

MIN_LATE_BURSTS = 2
"""So many times, apart from each other, answers must have been late."""

MIN_WAIT_SHARE = 0.25
"""Who is late has waited about as long as one may. What all have waited says how many
that can be: at a fourth of it each, as few are seen while they wait."""

EVERY_SIZE_UP_TO = 16
"""Every number of replicas up to this one is tried; above, steps grow."""

SIZE_GROWTH = 1.2

CALIBRATION_LEVELS = ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.0, 0.5), (0.0, 0.25))
"""From the brightest to the darkest: in which part of the time between two looks
requests come, and which part of the time that they may wait is left to the fluid."""

MAX_STEP_S = 1.0
"""Requests of longer times are taken to have come in clumps of no more than this."""

RECOVERY = 1.0
"""Views by which what was seen darkly is seen brighter, in a horizon in which fewer are
late: that nobody is says little while enough are kept."""

LateCounts = tuple[float, ...]
"""Requests that would have waited too long, in each of the ``VIEWS``."""

NO_LATE: LateCounts = (0.0,) * len(CALIBRATION_LEVELS)


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
    late: LateCounts = NO_LATE
    previous: LateCounts = NO_LATE


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

    arrived: float = 0.0
    missed: float = 0.0
    refused: float = 0.0
    waited: float = 0.0
    late_bursts: int = 0


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
    previous: Counts = field(default_factory=Counts)
    since_late_s: float | None = None
    is_active: bool = False
    level: float = 0.0
    actual: tuple[FleetFacts, ...] = ()
    fleets: tuple[tuple[FleetFacts, ...], ...] = ()

    @property
    def arrived(self) -> float:
        """Requests within the horizon."""
        return self.previous.arrived + self.recent.arrived

    @property
    def missed(self) -> float:
        """Of which too late for want of replicas, as far as can be told."""
        missed = self.previous.missed + self.recent.missed
        refused = self.previous.refused + self.recent.refused
        waited = max(0.0, self.previous.waited + self.recent.waited)
        return min(missed, refused + waited / MIN_WAIT_SHARE)

    @property
    def late_bursts(self) -> int:
        """See ``Counts``."""
        return self.previous.late_bursts + self.recent.late_bursts


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
    min_replicas: Sequence[int]
    max_replicas: Sequence[int]
    max_wait_s: float
    deadline_s: float
    burst_gap_s: float
    objective_share: float


def update(
    previous: BurstReserve, record: BurstRecord, horizon_s: float
) -> BurstReserve:
    """Return what is known with what is new.

    What is older than ``horizon_s`` is forgotten, half of it at a time.
    """
    old = _start_half(previous) if previous.seconds >= horizon_s / 2 else previous
    actual, fleets = [], []
    for k, item_s in enumerate(record.item_s):
        actual_fleet = old.actual[k] if k < len(old.actual) else FleetFacts(0)
        actual.append(_advance(actual_fleet, record.ready[k], record, item_s))
        stage_fleets = old.fleets[k] if k < len(old.fleets) else ()
        by_count = {fleet.replicas: fleet for fleet in stage_fleets}
        fleets.append(
            tuple(
                _advance(by_count.get(n, FleetFacts(n)), n, record, item_s)
                for n in candidate_sizes(record.max_replicas[k])
            )
        )
    found = replace(
        old,
        seconds=old.seconds + record.seconds,
        recent=_add_counts(old, record),
        since_late_s=_since_late_s(old, record),
        actual=tuple(actual),
        fleets=tuple(fleets),
    )
    level = max(_calibrate(found), old.level - RECOVERY * record.seconds / horizon_s)
    found = replace(found, level=level)
    return replace(found, is_active=_is_needed(found, record))


def reserved_replicas(
    reserve: BurstReserve, item_s: Sequence[float], objective_share: float
) -> tuple[int, ...]:
    """Return by stage how many replicas would have sufficed; none if all is well.

    No stage needs to be faster than the narrowest of them can ever be.

    Args:
        item_s: By stage, seconds that a replica is busy with one request.
        share: Of the requests, that should be answered in time.
    """
    fleets = reserve.fleets
    if not reserve.is_active:
        return (0,) * len(fleets)
    allowed = (1.0 - objective_share) * reserve.arrived
    enough = [
        _smallest_sufficient(stage_fleets, reserve.level, allowed)
        for stage_fleets in fleets
    ]
    narrowest = min(
        (
            stage_fleets[-1].replicas / s
            for stage_fleets, s in zip(fleets, item_s, strict=True)
            if s
        ),
        default=math.inf,
    )
    return tuple(
        min(count, math.ceil(narrowest * s - 1e-9)) if s else 1
        for count, s in zip(enough, item_s, strict=True)
    )


def candidate_sizes(max_replicas: int) -> list[int]:
    """Return the numbers of replicas that are tried."""
    found = list(range(1, min(max_replicas, EVERY_SIZE_UP_TO) + 1))
    while found[-1] < max_replicas:
        found.append(min(max_replicas, math.ceil(SIZE_GROWTH * found[-1])))
    return found


# What was.


def _start_half(old: BurstReserve) -> BurstReserve:
    """Return the same at the begin of a new half: the one before last is forgotten."""

    def start_half(fleet: FleetFacts) -> FleetFacts:
        return replace(fleet, late=NO_LATE, previous=fleet.late)

    return replace(
        old,
        seconds=0.0,
        recent=Counts(),
        previous=old.recent,
        actual=tuple(map(start_half, old.actual)),
        fleets=tuple(
            tuple(map(start_half, stage_fleets)) for stage_fleets in old.fleets
        ),
    )


def _add_counts(old: BurstReserve, record: BurstRecord) -> Counts:
    # Little's law: what is there, times how long, is what all spend there together.
    computed_s = sum(record.item_s) * (record.arrived - record.refused)
    waited_s = sum(record.ongoing) * record.seconds - computed_s
    is_new = record.missed > 0 and (
        old.since_late_s is None or old.since_late_s >= record.burst_gap_s
    )
    return Counts(
        arrived=old.recent.arrived + record.arrived,
        missed=old.recent.missed + record.missed,
        refused=old.recent.refused + record.refused,
        waited=old.recent.waited + waited_s / record.max_wait_s,
        late_bursts=old.recent.late_bursts + is_new,
    )


def _since_late_s(old: BurstReserve, record: BurstRecord) -> float | None:
    if record.missed > 0:
        return 0.0
    return None if old.since_late_s is None else old.since_late_s + record.seconds


def _is_needed(found: BurstReserve, record: BurstRecord) -> bool:
    """Tell whether some are to be kept; once they are, until the fewest would do."""
    allowed = (1.0 - record.objective_share) * found.arrived
    if found.is_active:
        return any(
            _smallest_sufficient(stage_fleets, found.level, allowed) > lowest
            for stage_fleets, lowest in zip(
                found.fleets, record.min_replicas, strict=True
            )
        )
    threshold = allowed + SIGMAS * math.sqrt(max(allowed, 1.0))
    return found.late_bursts >= MIN_LATE_BURSTS and found.missed > threshold


# What would have been.


def _calibrate(reserve: BurstReserve) -> float:
    """Return the first of the ``VIEWS`` in which as many would be late as were."""
    previous = 0.0
    for level in range(len(CALIBRATION_LEVELS)):
        late = max(_late_requests(fleet, level) for fleet in reserve.actual)
        if late >= reserve.missed:
            gap = late - previous
            return level - (late - reserve.missed) / gap if level and gap > 0 else level
        previous = late
    return len(CALIBRATION_LEVELS) - 1.0


def _smallest_sufficient(
    stage_fleets: Sequence[FleetFacts], level: float, allowed: float
) -> int:
    """Return the fewest replicas with which no more than so many would be late."""
    enough = (
        fleet.replicas
        for fleet in stage_fleets
        if _late_requests(fleet, level) <= allowed
    )
    return next(enough, stage_fleets[-1].replicas)


def _late_requests(fleet: FleetFacts, level: float) -> float:
    """Return how many would be late, also in between two views."""
    low = min(int(level), len(CALIBRATION_LEVELS) - 2)
    one = fleet.previous[low] + fleet.late[low]
    other = fleet.previous[low + 1] + fleet.late[low + 1]
    return one + (level - low) * (other - one)


def _advance(
    fleet: FleetFacts, replicas: int, record: BurstRecord, item_s: float
) -> FleetFacts:
    """Return a fleet of so many after what is new."""
    if item_s <= 0:
        return FleetFacts(replicas)
    rate = max(replicas, 0.01) / item_s  # with none, everybody waits for long
    steps = max(1, math.ceil(record.seconds / MAX_STEP_S))
    arrived, seconds = record.arrived / steps, record.seconds / steps
    queue, late = fleet.queue, fleet.late
    for _ in range(steps):
        late = tuple(
            count
            + arrived
            * _share_above(
                wait_share * record.max_wait_s,
                queue / rate,
                max(0.0, queue + arrived - rate * spread * seconds) / rate,
            )
            for count, (spread, wait_share) in zip(
                late, CALIBRATION_LEVELS, strict=True
            )
        )
        queue = max(0.0, queue + arrived - rate * seconds)
        queue = min(queue, rate * record.deadline_s)  # who waits for longer has left
    return FleetFacts(replicas, queue, late, fleet.previous)


def _share_above(limit: float, first: float, last: float) -> float:
    """Return the share of what lies evenly between two numbers that is above."""
    low, high = min(first, last), max(first, last)
    if high <= limit:
        return 0.0
    return 1.0 if low >= limit else (high - limit) / (high - low)
