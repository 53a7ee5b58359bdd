"""Discrete-event simulation of a served model: queues, batches, replicas.

It follows the rules of the service: a bounded queue at the gateway, a credit window for
each replica, the less loaded of two random replicas, batches of the requests that
arrived during the previous batch. Replicas are ready after ``start_s``, and drained
before they exit. Replicas do not slow each other down: each has the cores that it was
measured with.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from multiworld.serve.controller.scaling.limits import (
    keep_starting,
    largest_that_fits,
    within,
)
from multiworld.serve.controller.scaling.samples import PERIODS
from multiworld.serve.controller.scaling.snapshot import (
    Policy,
    Sample,
    Snapshot,
    StageNow,
    StageSeen,
    TextObjectives,
)
from multiworld.serve.routing.load_balancer import Chance, choose
from multiworld.serve.text.engine_limits import EngineLimits

# Schedules a function for a simulated time, which the function gets as its argument.
At = Callable[[float, Callable[[float], None]], None]


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request of a trace, ``at`` seconds after the first."""

    at: float
    work: float = 1.0  # amount of work, relative to the mean of its trace
    model: str = ""
    prompt: int = 0  # tokens; 0 if unknown
    answer: int = 0  # tokens; 0 if unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel(StageNow):
    """One stage of a simulated model, in its initial state."""

    # Seconds that a batch takes, by its work (its rows, if each request has work 1).
    seconds: Callable[[float], float]
    max_batch_size: int = 16
    max_wait_s: float = 0.0  # longest wait of a request for others in its batch
    window: int = 32  # requests that one sender may have waiting at a replica
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """One simulated model and how it is scaled."""

    name: str
    stages: tuple[StageModel, ...]
    policy: Policy
    text: TextObjectives | None = None  # None: the model does not generate text
    # Engine limits of a replica of stage 0; None: the model does not generate text.
    limits: EngineLimits | None = None
    max_model_len: int | None = None
    objective_s: float | None = None
    objective_share: float = 0.99
    deadline_s: float = 30.0
    max_queued_requests: int = 512
    start_s: float = 1.0  # time until a started replica is ready
    interval_s: float = 1.0  # time between two decisions


@dataclass(slots=True, eq=False)
class Request:
    """A simulated request; times are in seconds, ``ended`` is -1 until it ends."""

    at: float
    work: float
    queued_at: float = 0.0
    ended: float = -1.0
    is_refused: bool = False


@dataclass(slots=True, eq=False)
class Replica:
    name: str
    stage: int
    launched_at: float
    is_ready: bool = False
    is_draining: bool = False
    is_gone: bool = False
    due_at: float = -1.0
    queue: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    finished: deque[Request] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        return not (self.queue or self.running or self.finished)


@dataclass(frozen=True, slots=True)
class Moment:
    """Desired and ready replicas of each stage from one moment on."""

    at: float
    wanted: tuple[int, ...]
    ready: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SimulatedDecision:
    at: float
    before: tuple[int, ...]
    after: tuple[int, ...]
    why: str


@dataclass(slots=True)
class SimulationResult:
    """Result of replaying a trace for one model."""

    model: str
    objective_s: float | None
    # Arrival and latency in seconds; for generated text, the latency of the first
    # token. The latency is -1 if the request was refused or passed its deadline.
    requests: list[tuple[float, float]]
    attained: int
    refused: int
    late: int
    replica_s: tuple[float, ...]  # replica-seconds by stage, from launch on
    seconds: float
    moments: list[Moment]  # moments at which the desired or ready replicas changed
    decided: list[SimulatedDecision]  # decisions that changed a number of replicas


class Room:
    """Unlimited room for replicas; subclasses may limit it."""

    def take(self, name: str, model: str, stage: int) -> bool:
        return True

    def fits(self, model: str, more: Sequence[int]) -> bool:
        """Return whether there is room for so many more replicas of each stage."""
        return True

    def free(self, name: str) -> None:
        """Release the room of a replica."""


class Pipeline:
    """One model in a simulation."""

    def __init__(
        self, model: PipelineModel, at: At, chance: Chance, room: Room
    ) -> None:
        self._model, self._at, self._chance, self._room = model, at, chance, room
        self._replicas: list[list[Replica]] = [[] for _ in model.stages]
        self._wanted = [stage.replicas for stage in model.stages]
        self._waiting: deque[Request] = deque()
        self._requests: list[Request] = []
        self._numbers = itertools.count(1)
        self._counts = [[0, 0, 0.0] for _ in model.stages]
        self._samples: deque[Sample] = deque()
        self._memory: object = None
        self._replica_s = [0.0] * len(model.stages)
        self.in_flight = 0
        self._missed = self._refused = 0
        self.moments: list[Moment] = []
        self.decided: list[SimulatedDecision] = []
        self._last_end = 0.0
        look_back = [s.limits.look_back_period_s for s in model.stages if s.limits]
        self._horizon_s = PERIODS * max([*look_back, 1.0])

    # Replicas.

    def begin(self) -> None:
        """Start the initial replicas; they are ready at once."""
        for k, count in enumerate(self._wanted):
            for _ in range(count):
                self._launch(k, 0.0, is_ready=True)
        self._note(0.0)
        self._samples.append(self._sample(0.0))

    def _launch(self, k: int, now: float, *, is_ready: bool = False) -> None:
        name = f"{self._model.name}/{k}/{next(self._numbers)}"
        if not self._room.take(name, self._model.name, k):
            return
        replica = self._made(name, k, now, is_ready=is_ready)
        self._replicas[k].append(replica)
        if not is_ready:
            self._at(now + self._model.start_s, lambda then: self._ready(replica, then))

    def _made(self, name: str, k: int, now: float, *, is_ready: bool) -> Replica:
        return Replica(name, k, now, is_ready)

    def _ready(self, replica: Replica, now: float) -> None:
        if replica.is_gone:
            return
        replica.is_ready = True
        self._note(now)
        self._move(now)

    def _drain(self, k: int, surplus: int, now: float) -> None:
        order = sorted(self._live(k), key=lambda r: (r.is_ready, -r.launched_at))
        for replica in order[: max(0, surplus)]:
            replica.is_draining = True
            self._leave_if_done(replica, now)

    def _leave_if_done(self, replica: Replica, now: float) -> None:
        if replica.is_draining and not replica.is_gone and replica.is_done:
            replica.is_gone = True
            self._replicas[replica.stage].remove(replica)
            self._replica_s[replica.stage] += now - replica.launched_at
            self._room.free(replica.name)

    def _live(self, k: int) -> list[Replica]:
        return [r for r in self._replicas[k] if not r.is_draining]

    # Requests.

    def arrive(self, arrival: Arrival, now: float) -> None:
        request = Request(now, arrival.work)
        self._requests.append(request)
        self.in_flight += 1
        self._waiting.append(request)
        self._move(now)
        is_full = len(self._waiting) > self._model.max_queued_requests
        if is_full and self._waiting[-1] is request:
            self._waiting.pop()
            self.in_flight -= 1
            request.is_refused = True
            self._missed += 1
            self._refused += 1
        elif 0 in self._wanted:
            self.decide(now)  # do not wait for the interval to scale up from zero

    def _expire(self, now: float) -> None:
        begin = now - self._model.deadline_s
        lines = [self._waiting]
        for replicas in self._replicas:
            lines += [line for r in replicas for line in (r.queue, r.finished)]
        for line in lines:
            while line and line[0].at <= begin:
                line.popleft()
                self._give_up()

    def _give_up(self) -> None:
        self.in_flight -= 1
        self._missed += 1

    def _move(self, now: float) -> None:
        """Forward requests, last stage first, and start batches."""
        for k in reversed(range(1, len(self._model.stages))):
            for sender in self._replicas[k - 1]:
                self._send(sender.finished, k, len(self._replicas[k - 1]), now)
        self._send(self._waiting, 0, 1, now)
        for k, replicas in enumerate(self._replicas):
            for replica in list(replicas):
                self._begin(replica, k, now)
                self._leave_if_done(replica, now)

    def _send(self, queue: deque[Request], k: int, senders: int, now: float) -> None:
        if not queue:
            return
        by_name = {r.name: r for r in self._live(k) if r.is_ready}
        if not by_name:
            # If all replicas of a later stage drain, they still accept work; draining
            # replicas of stage 0 do not.
            by_name = {r.name: r for r in self._replicas[k] if r.is_ready and k}
        load = {n: len(r.queue) + len(r.running) for n, r in by_name.items()}
        limit = self._model.stages[k].window * max(1, senders)
        while queue:
            open_ = [n for n, r in by_name.items() if len(r.queue) < limit]
            name = choose(open_, load.__getitem__, self._chance)
            if name is None:
                return
            request = queue.popleft()
            request.queued_at = now
            by_name[name].queue.append(request)
            load[name] += 1

    def _begin(self, replica: Replica, k: int, now: float) -> None:
        stage = self._model.stages[k]
        is_full = len(replica.finished) >= stage.window
        if replica.running or not replica.is_ready or is_full:
            return
        if not self._is_due(replica, stage, now):
            return
        while replica.queue and len(replica.running) < stage.max_batch_size:
            request = replica.queue.popleft()
            if now - request.at >= self._model.deadline_s:
                self._give_up()  # its client has already received an error
            else:
                replica.running.append(request)
        if replica.running:
            seconds = stage.seconds(sum(r.work for r in replica.running))
            self._at(now + seconds, lambda then: self._end(replica, seconds, then))

    def _is_due(self, replica: Replica, stage: StageModel, now: float) -> bool:
        """Return whether a batch may start; if not, schedule the next check."""
        if not replica.queue or len(replica.queue) >= stage.max_batch_size:
            return bool(replica.queue)
        due_at = replica.queue[0].queued_at + stage.max_wait_s
        if now < due_at and replica.due_at != due_at:
            replica.due_at = due_at
            self._at(due_at, self._move)
        return now >= due_at

    def _end(self, replica: Replica, seconds: float, now: float) -> None:
        done, replica.running = replica.running, []
        # A real replica, too, counts a batch when it ends.
        counts = self._counts[replica.stage]
        counts[0] += len(done)
        counts[1] += 1
        counts[2] += seconds
        if replica.stage == len(self._model.stages) - 1:
            for request in done:
                request.ended = now
                self.in_flight -= 1
                limit = self._model.objective_s
                self._missed += limit is not None and now - request.at > limit
                self._last_end = now
        else:
            replica.finished.extend(done)
        self._move(now)

    # Decisions.

    def _sample(self, now: float) -> Sample:
        stages = []
        for k, replicas in enumerate(self._replicas):
            ongoing = sum(len(r.queue) + len(r.running) for r in replicas)
            if k == 0:
                ongoing += len(self._waiting)
            else:
                ongoing += sum(len(r.finished) for r in self._replicas[k - 1])
            requests, batches, busy_s = self._counts[k]
            ready = sum(r.is_ready for r in self._live(k))
            stages.append(
                StageSeen(
                    ongoing=ongoing,
                    ready=ready,
                    requests=int(requests),
                    batches=int(batches),
                    busy_s=busy_s,
                )
            )
        return Sample(
            at=now,
            arrived=len(self._requests),
            stages=tuple(stages),
            missed=self._missed,
            refused=self._refused,
        )

    def decide(self, now: float) -> None:
        self._expire(now)
        self._samples.append(self._sample(now))
        while len(self._samples) > 2 and self._samples[1].at < now - self._horizon_s:
            self._samples.popleft()
        snapshot = self._snapshot(now)
        decision = within(self._model.policy(snapshot), snapshot.stages)
        self._memory = decision.memory
        before = tuple(self._wanted)
        live = [self._live(k) for k in range(len(before))]
        starting = [sum(not r.is_ready for r in replicas) for replicas in live]
        there = [len(replicas) for replicas in live]
        wanted = keep_starting(decision.replicas, before, starting, there)
        if not self._fits(wanted):
            wanted = tuple(largest_that_fits(before, wanted, self._fits))
        self._wanted = [*wanted]
        if tuple(self._wanted) != before:
            after = tuple(self._wanted)
            self.decided.append(SimulatedDecision(now, before, after, decision.why))
        for k, count in enumerate(self._wanted):
            here = len(self._live(k))
            for _ in range(count - here):
                self._launch(k, now)
            self._drain(k, here - count, now)
        self._note(now)
        self._move(now)

    def _fits(self, counts: Sequence[int]) -> bool:
        here = [len(self._live(k)) for k in range(len(counts))]
        more = [max(0, n - m) for n, m in zip(counts, here, strict=True)]
        return self._room.fits(self._model.name, more)

    def _snapshot(self, now: float) -> Snapshot:
        stages = [
            StageNow(name=s.name, replicas=n, limits=s.limits, item_s=s.item_s)
            for s, n in zip(self._model.stages, self._wanted, strict=True)
        ]
        return Snapshot(
            model=self._model.name,
            now=now,
            stages=tuple(stages),
            samples=tuple(self._samples),
            objective_s=self._model.objective_s,
            objective_share=self._model.objective_share,
            deadline_s=self._model.deadline_s,
            start_s=self._model.start_s,
            interval_s=self._model.interval_s,
            text=self._model.text,
            memory=self._memory,
        )

    def _note(self, now: float) -> None:
        ready = tuple(
            sum(r.is_ready for r in self._live(k)) for k in range(len(self._wanted))
        )
        moment = Moment(now, tuple(self._wanted), ready)
        if not self.moments or replace(self.moments[-1], at=now) != moment:
            self.moments.append(moment)

    def outcome(self, now: float) -> SimulationResult:
        replica_s = list(self._replica_s)
        for k, replicas in enumerate(self._replicas):
            replica_s[k] += sum(now - r.launched_at for r in replicas)
        found = []
        late = 0
        for request in self._requests:
            took = self._took_s(request)
            if request.ended - request.at > self._model.deadline_s:
                took = -1.0
            late += took < 0 and not request.is_refused
            found.append((request.at, took))
        return SimulationResult(
            model=self._model.name,
            objective_s=self._model.objective_s,
            requests=found,
            attained=sum(map(self._is_good, self._requests)),
            refused=sum(r.is_refused for r in self._requests),
            late=late,
            replica_s=tuple(replica_s),
            seconds=max(self._last_end, now),
            moments=self.moments,
            decided=self.decided,
        )

    def _took_s(self, request: Request) -> float:
        return request.ended - request.at if request.ended >= 0 else -1.0

    def _is_good(self, request: Request) -> bool:
        objective_s, took_s = self._model.objective_s, self._took_s(request)
        limit_s = self._model.deadline_s if objective_s is None else objective_s
        return 0 <= took_s <= min(limit_s, self._model.deadline_s)
