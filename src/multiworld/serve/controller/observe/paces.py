"""Detection of slow replicas, compared with their peers and their own past. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

WINDOW_S = 10.0  # seconds over which a pace is measured
MIN_STEPS = 8  # minimum number of steps in a window; fewer are too noisy
LONGEST_S = 60.0  # maximum seconds of a window, which is longer if it has fewer steps
PAST = 60  # number of windows that make up a replica's own past
# A replica is slow if its step time is above this multiple of its peers' step time,
# unless this step time is usual for the replica; see ``FAST``.
SLOW = 1.8
# A replica without peers is slow if its step time is above this multiple of its past.
SLOW_ALONE = 2.5
# A slow replica has recovered once its step time is at most this multiple of its peers'
# step time (without peers: of its own past). A step time of at most this multiple of a
# replica's own past is usual for that replica.
FAST = 1.4
# A step in progress is slow if it has taken more than ``LONG_S`` seconds, and more than
# ``LONG`` times its peers' step time (or, without peers, the replica's own).
LONG_S = 1.0
LONG = 5.0
# CPU time per second of computing, relative to peers, below which a replica is starved.
STARVED = 0.6
FREE = 0.85  # used share of a machine's cores below which some of them are free
MIN_PAST = 3  # minimum number of past windows for comparing a whole stage
NO_COMPARISON = 1.0


class Work(NamedTuple):
    """Counts of a replica's work since its start."""

    stage: tuple[str, str, int]  # model, version, stage
    steps: int
    rows: int
    computed_s: float
    cpu_s: float
    computing_s: float  # seconds since its current step began
    machine_busy: float = 1.0  # used share of its machine's cores


@dataclass(frozen=True, slots=True)
class Pace:
    """Duration and size of a replica's steps in its last window."""

    stage: tuple[str, str, int]
    step_s: float  # mean seconds per step
    rows: float  # mean rows per step
    cpu: float  # CPU seconds per second of computing
    has_free_cores: bool = False  # whether its machine has some
    is_idle: bool = False  # whether it has computed nothing for ``WINDOW_S``


@dataclass(slots=True)
class _Replica:
    samples: deque[tuple[float, Work]] = field(default_factory=deque)
    past: deque[float] = field(default_factory=lambda: deque(maxlen=PAST))
    past_rows: deque[float] = field(default_factory=lambda: deque(maxlen=PAST))
    past_at: float = 0.0
    past_steps: int = 0  # number of steps when ``past`` was extended last
    why: str = ""  # reason why it is slow; empty: it is not


class Paces:
    """Compares the paces of replicas of the same stage."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._loading: dict[str, float] = {}  # when each process was loading last
        self.paces: dict[str, Pace] = {}
        # Share of the last ``WINDOW_S`` seconds in which each replica computed.
        self.busy: dict[str, float] = {}

    @property
    def slow(self) -> dict[str, str]:
        """The reason for each slow replica, by its name."""
        return {name: each.why for name, each in self._replicas.items() if each.why}

    @property
    def steps_s(self) -> dict[str, float]:
        """Mean seconds per step of each replica that computes."""
        return {name: pace.step_s for name, pace in self.paces.items()}

    @property
    def slower(self) -> dict[tuple[str, str, int], str]:
        """Stages whose replicas are all slower than before, and by how much.

        A stage's only replica is in ``slow`` instead. Steps with many more rows than
        before do not count as slower.
        """
        stages: dict[tuple[str, str, int], list[tuple[Pace, _Replica]]] = {}
        for name, pace in self.paces.items():
            if len(self._replicas[name].past) >= MIN_PAST:
                stages.setdefault(pace.stage, []).append((pace, self._replicas[name]))
        return {
            stage: _slower_words(found)
            for stage, found in stages.items()
            if len(found) > 1
            and all(pace.step_s > SLOW * median(each.past) for pace, each in found)
            and any(pace.rows <= SLOW * median(each.past_rows) for pace, each in found)
        }

    def seen(
        self, found: Mapping[str, Work], now: float, loading: Sequence[str] = ()
    ) -> None:
        """Compare all replicas by their work so far.

        ``loading``: replicas that load, which may be why other replicas are slow.
        """
        self._loading |= dict.fromkeys(loading, now)
        for name, at in list(self._loading.items()):
            if at < now - WINDOW_S:
                del self._loading[name]
        for name in self._replicas.keys() - found.keys():
            del self._replicas[name]
        for name, work in found.items():
            samples = self._replicas.setdefault(name, _Replica()).samples
            if samples and samples[-1][1].steps > work.steps:
                samples.clear()
            samples.append((now, work))
            while len(samples) > 2 and _is_enough(samples, since=1):
                samples.popleft()
        self.paces = {
            name: pace
            for name, each in self._replicas.items()
            if (pace := _pace(each.samples)) is not None
        }
        self.busy = {name: _busy(e.samples) for name, e in self._replicas.items()}
        for name, each in self._replicas.items():
            each.why = self._judged(name, each, now)

    def _judged(self, name: str, replica: _Replica, now: float) -> str:
        work = replica.samples[-1][1]
        peers = [
            pace
            for other, pace in self.paces.items()
            if other != name and pace.stage == work.stage
        ]
        pace = self.paces.get(name)
        past_s = median(replica.past) if replica.past else 0.0
        own_s = past_s or (pace.step_s if pace else 0.0)
        typical_s = median(p.step_s for p in peers) if peers else own_s
        if work.computing_s > max(LONG_S, LONG * typical_s) and (peers or pace):
            return f"its step has taken {work.computing_s:.1f} s so far"
        if pace is None:
            return ""
        limit = FAST if replica.why else SLOW
        beside_peers = _times(pace, peers)
        beside_past = pace.step_s / past_s if past_s else 0.0
        if peers:
            is_like_before = past_s and beside_past <= FAST
            is_slow = beside_peers > limit and (bool(replica.why) or not is_like_before)
            # If a machine has no free core, its other replicas are slower, too.
            is_slow |= beside_past > limit and _is_starved(pace, peers)
        else:
            is_slow = beside_past > (FAST if replica.why else SLOW_ALONE)
        if not is_slow:
            is_new = work.steps != replica.past_steps
            if is_new and now - replica.past_at >= WINDOW_S:
                replica.past_steps = work.steps
                replica.past.append(pace.step_s)
                replica.past_rows.append(pace.rows)
                replica.past_at = now
            return ""
        return _words(pace, peers, beside_peers, beside_past, [*self._loading])


def _is_enough(samples: Sequence[tuple[float, Work]], since: int) -> bool:
    """Return whether the samples from ``since`` on make up a window."""
    (at, first), (now, last) = samples[since], samples[-1]
    has_steps = last.steps - first.steps >= MIN_STEPS or at <= now - LONGEST_S
    return at <= now - WINDOW_S and has_steps


def _busy(samples: Sequence[tuple[float, Work]]) -> float:
    now, last = samples[-1]
    early = [each for each in samples if each[0] <= now - WINDOW_S]
    at, first = early[-1] if early else samples[0]
    if now <= at:
        return 0.0
    # ``computed_s`` grows only when a step ends.
    before_s = first.computed_s + first.computing_s
    computed_s = last.computed_s + last.computing_s - before_s
    return min(1.0, max(0.0, computed_s / (now - at)))


def _pace(samples: Sequence[tuple[float, Work]]) -> Pace | None:
    first, last = samples[0][1], samples[-1][1]
    steps, computed_s = last.steps - first.steps, last.computed_s - first.computed_s
    if steps < MIN_STEPS or computed_s <= 0:
        return None
    rows, cpu_s = last.rows - first.rows, last.cpu_s - first.cpu_s
    return Pace(
        last.stage,
        computed_s / steps,
        rows / steps,
        cpu_s / computed_s,
        0 <= last.machine_busy < FREE,
        is_idle=not _busy(samples),
    )


def _times(pace: Pace, peers: list[Pace]) -> float:
    """Return the ratio of a replica's step time to its peers' median.

    Steps with more rows may take longer, so the ratio per step or per row counts,
    whichever is smaller.
    """
    if not peers:
        return NO_COMPARISON
    by_step = pace.step_s / median(p.step_s for p in peers)
    if not pace.rows or not all(p.rows for p in peers):
        return by_step
    by_row = (pace.step_s / pace.rows) / median(p.step_s / p.rows for p in peers)
    return min(by_step, by_row)


def _usual_cpu(peers: list[Pace]) -> float:
    # While a replica computes nothing, its other CPU time makes this ratio grow.
    found = [peer.cpu for peer in peers if not peer.is_idle]
    return median(found) if found else 1.0


def _is_starved(pace: Pace, peers: list[Pace]) -> bool:
    return pace.cpu < STARVED * _usual_cpu(peers)


def _slower_words(found: Sequence[tuple[Pace, _Replica]]) -> str:
    step_s = median(pace.step_s for pace, _ in found)
    past_s = median(median(each.past) for _, each in found)
    rows = median(pace.rows for pace, _ in found)
    past_rows = median(median(each.past_rows) for _, each in found)
    return (
        f"a step takes {1000 * step_s:.3g} ms (before: {1000 * past_s:.3g} ms), with "
        f"{rows:.3g} rows (before: {past_rows:.3g})"
    )


def _words(
    pace: Pace,
    peers: list[Pace],
    beside_peers: float,
    beside_past: float,
    loading: Sequence[str],
) -> str:
    parts = [f"a step takes {1000 * pace.step_s:.3g} ms"]
    if peers:
        parts.append(f"{beside_peers:.1f} times its peers' time")
    if beside_past:
        parts.append(f"{beside_past:.1f} times its own past time")
    text = ", ".join(parts)
    if _is_starved(pace, peers):
        usual = _usual_cpu(peers)
        is_known = any(not peer.is_idle for peer in peers)
        beside = f", its peers {usual:.2f} s" if is_known else ""
        cause = "something else runs on its cores, or it is throttled"
        if loading:
            cause = (
                f"{', '.join(loading)} took its cores to load, or something else did"
            )
        if pace.has_free_cores:
            cause = "cores are free, so it is throttled, or stopped repeatedly"
        return (
            f"{text}; it is starved: it gets {pace.cpu:.2f} s of processor time for a "
            f"second of computing{beside}: {cause}"
        )
    return f"{text}; it gets enough processor time: the computation itself is slower"
