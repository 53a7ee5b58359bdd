"""Burst reserve: replicas kept for bursts that end before a new replica is ready. Pure.

Starting replicas when a burst starts is too late if a start takes longer than a request
may wait. Only replicas that already run help, and they have a cost. The reserve is
therefore empty until SLO attainment falls short without it.

Its size comes from fluid queues. For each candidate number of replicas, a fluid queue
runs beside the real one: requests flow in, the replicas drain it, and it counts the
requests that would have waited too long. The fluid is too optimistic: it ignores
batches, chance, and how closely requests arrive between two samples. A calibration
corrects this: the same fluid queue runs for the replicas that were actually ready, and
its assumptions are tightened until it predicts as many late requests as the lack of
replicas actually caused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# The reserve is activated if late requests exceed the allowed number by ``SIGMAS``
# standard deviations, and if they came in at least ``MIN_LATE_BURSTS`` separate bursts.
SIGMAS = 2.0
MIN_LATE_BURSTS = 2

# A request that is late for lack of replicas has waited at least this share of the
# allowed wait, so the total waiting time limits the number of such requests. The share
# is well below 1, because samples miss part of the waiting.
MIN_WAIT_SHARE = 0.25

EVERY_SIZE_UP_TO = 16  # fleet size up to which every number is a candidate
SIZE_GROWTH = 1.2  # ratio of successive candidates above ``EVERY_SIZE_UP_TO``

# Assumptions of the fluid queue, from optimistic to pessimistic. Each pair holds the
# share of a sampling interval within which all its requests arrive, and the share of
# the allowed wait above which a request in the fluid queue counts as late.
CALIBRATION_LEVELS = ((1.0, 1.0), (1.0, 0.5), (0.5, 0.5), (0.0, 0.5), (0.0, 0.25))

MAX_STEP_S = 1.0  # maximum step of a fluid queue; longer intervals are split

# Number of calibration levels by which a horizon with few misses makes the fluid queue
# more optimistic. It is small, because a period without misses proves little while a
# reserve is kept.
RECOVERY = 1.0

LateCounts = tuple[float, ...]  # late requests, by calibration level

NO_LATE: LateCounts = (0.0,) * len(CALIBRATION_LEVELS)


@dataclass(frozen=True, slots=True)
class FleetFacts:
    replicas: int
    queue: float = 0.0
    late: LateCounts = NO_LATE
    previous: LateCounts = NO_LATE


@dataclass(frozen=True, slots=True)
class Counts:
    """Measured requests of a model in one half of the horizon."""

    arrived: float = 0.0
    missed: float = 0.0  # late requests, including refused ones
    refused: float = 0.0
    waited: float = 0.0  # total waiting time, as a multiple of the allowed wait
    late_bursts: int = 0


@dataclass(frozen=True, slots=True)
class BurstReserve:
    """Measurements and fluid queues of one model, and whether a reserve is kept."""

    seconds: float = 0.0  # since the current half of the horizon started
    recent: Counts = field(default_factory=Counts)
    previous: Counts = field(default_factory=Counts)
    since_late_s: float | None = None
    is_active: bool = False
    # Position among the ``CALIBRATION_LEVELS`` at which the fluid queue predicts the
    # measured number of late requests; fractions interpolate.
    level: float = 0.0
    actual: tuple[FleetFacts, ...] = ()  # by stage: fluid queue of the ready replicas
    # By stage: fluid queues of all candidate fleet sizes, smallest first.
    fleets: tuple[tuple[FleetFacts, ...], ...] = ()

    @property
    def arrived(self) -> float:
        return self.previous.arrived + self.recent.arrived

    @property
    def missed(self) -> float:
        """Estimated requests that a lack of replicas made late within the horizon."""
        missed = self.previous.missed + self.recent.missed
        refused = self.previous.refused + self.recent.refused
        waited = max(0.0, self.previous.waited + self.recent.waited)
        return min(missed, refused + waited / MIN_WAIT_SHARE)

    @property
    def late_bursts(self) -> int:
        return self.previous.late_bursts + self.recent.late_bursts


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstRecord:
    """Measurements of one sampling interval; sequences are by stage."""

    seconds: float
    arrived: float
    missed: float  # requests found late, or refused
    refused: float
    ongoing: Sequence[float]
    item_s: Sequence[float]  # time that a replica is busy with one request
    ready: Sequence[int]
    min_replicas: Sequence[int]
    max_replicas: Sequence[int]
    max_wait_s: float  # time that a request may wait and still meet the objective
    deadline_s: float
    # Seconds without a late answer after which the next late answer starts a new burst:
    # enough for replicas that were started in the previous burst to become ready.
    burst_gap_s: float
    objective_share: float


def update(
    previous: BurstReserve, record: BurstRecord, horizon_s: float
) -> BurstReserve:
    """Return the reserve with one interval added, and expired intervals dropped."""
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
    """Return the replicas to keep by stage; all zero while none is needed."""
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
    # A stage need not carry more than the bottleneck can carry at its maximum size.
    return tuple(
        min(count, math.ceil(narrowest * s - 1e-9)) if s else 1
        for count, s in zip(enough, item_s, strict=True)
    )


def candidate_sizes(max_replicas: int) -> list[int]:
    found = list(range(1, min(max_replicas, EVERY_SIZE_UP_TO) + 1))
    while found[-1] < max_replicas:
        found.append(min(max_replicas, math.ceil(SIZE_GROWTH * found[-1])))
    return found


# Measurements.


def _start_half(old: BurstReserve) -> BurstReserve:
    """Return the reserve at the start of a new half; drops the half before last."""

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
    # Little's law: the number of requests present, times the seconds, is the total time
    # that requests spend in the system.
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
    allowed = (1.0 - record.objective_share) * found.arrived
    if found.is_active:
        # The reserve ends when the minimum number of replicas is enough.
        return any(
            _smallest_sufficient(stage_fleets, found.level, allowed) > lowest
            for stage_fleets, lowest in zip(
                found.fleets, record.min_replicas, strict=True
            )
        )
    # The reserve starts when attainment falls short in several bursts.
    threshold = allowed + SIGMAS * math.sqrt(max(allowed, 1.0))
    return found.late_bursts >= MIN_LATE_BURSTS and found.missed > threshold


# Fluid queues.


def _calibrate(reserve: BurstReserve) -> float:
    """Return the lowest level (interpolated) that predicts the measured misses."""
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
    enough = (
        fleet.replicas
        for fleet in stage_fleets
        if _late_requests(fleet, level) <= allowed
    )
    return next(enough, stage_fleets[-1].replicas)


def _late_requests(fleet: FleetFacts, level: float) -> float:
    """Return how many requests would be late, interpolated between two levels."""
    low = min(int(level), len(CALIBRATION_LEVELS) - 2)
    one = fleet.previous[low] + fleet.late[low]
    other = fleet.previous[low + 1] + fleet.late[low + 1]
    return one + (level - low) * (other - one)


def _advance(
    fleet: FleetFacts, replicas: int, record: BurstRecord, item_s: float
) -> FleetFacts:
    """Return the fluid queue of ``replicas`` replicas after one more interval."""
    if item_s <= 0:
        return FleetFacts(replicas)
    rate = max(replicas, 0.01) / item_s  # not 0, because it is a divisor
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
        # Requests that wait longer than the deadline have been abandoned.
        queue = min(queue, rate * record.deadline_s)
    return FleetFacts(replicas, queue, late, fleet.previous)


def _share_above(limit: float, first: float, last: float) -> float:
    """Return the share of the range ``first`` to ``last`` that exceeds ``limit``."""
    low, high = min(first, last), max(first, last)
    if high <= limit:
        return 0.0
    return 1.0 if low >= limit else (high - limit) / (high - low)
