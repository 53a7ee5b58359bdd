"""Discrete-event simulation of a model that generates text.

Each replica of stage 0 has the real scheduler. In each stage, a step takes the time
that was measured for its number of tokens. A sequence is pinned to the least loaded
replica of each stage. It moves off a draining replica, or onto a new replica, which
first recomputes the sequence's tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from multiworld.serve.controller.scaling.snapshot import Sample, StageSeen
from multiworld.serve.gateway.streams.chain_selection import (
    NEW_S,
    SPLIT,
    StepSources,
    surplus_of,
)
from multiworld.serve.gateway.streams.moves import MAX_MOVES, WORTH
from multiworld.serve.replica.scheduling.pipeline_share import adapt
from multiworld.serve.replica.scheduling.scheduled_sequence import ScheduledSequence
from multiworld.serve.replica.scheduling.scheduler import Scheduler
from multiworld.serve.routing.load_balancer import Chance
from multiworld.serve.simulation.pipeline import (
    Arrival,
    At,
    Pipeline,
    PipelineModel,
    Replica,
    Request,
    Room,
)
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.wire.generation_messages import StepPart
from multiworld.serve.wire.protocol import Key


@dataclass(slots=True, eq=False)
class SimulatedSequence(Request):
    prompt: int = 1
    answer: int = 1  # tokens to generate
    key: Key = ("", 0, 0)
    # Replicas by stage; empty until the sequence is placed.
    chain: list[TextReplica] = field(default_factory=list)
    made: int = 0  # tokens generated so far
    first_at: float = -1.0  # time of the first token; negative before
    moving: int = -1  # stage at which it moves to another replica; negative: none

    @property
    def tokens(self) -> int:
        return self.prompt + self.made


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Part of a step in a replica's queue."""

    origin: TextReplica  # stage-0 replica that planned the step
    number: int
    parts: tuple[StepPart, ...]


@dataclass(frozen=True, slots=True)
class Preparation:
    """Prefill of a sequence that moves to a replica; ``rows`` tokens remain."""

    sequence: SimulatedSequence
    rows: int


@dataclass(slots=True, eq=False)
class TextReplica(Replica):
    """A replica of a stage; only replicas of stage 0 have a scheduler."""

    scheduler: Scheduler | None = None
    work: deque[SimulatedStep | Preparation] = field(default_factory=deque)
    is_busy: bool = False
    sequences: set[SimulatedSequence] = field(default_factory=set)
    new_until: float = 0.0

    @property
    def is_done(self) -> bool:
        return not self.sequences and not self.work and not self.is_busy


class TokenPipeline(Pipeline):
    def __init__(
        self, model: PipelineModel, at: At, chance: Chance, room: Room
    ) -> None:
        super().__init__(model, at, chance, room)
        assert model.limits is not None
        self._limits: EngineLimits = model.limits
        self._sequences: dict[tuple[str, int], SimulatedSequence] = {}
        self._rows = [0] * len(model.stages)
        self._ended = [0, 0, 0]
        self._generated = self._too_long = 0
        self._unplaced: deque[SimulatedSequence] = deque()
        self._schedulers = StepSources()
        self._moving: set[SimulatedSequence] = set()

    # Replicas.

    def _made(self, name: str, k: int, now: float, *, is_ready: bool) -> Replica:
        made = TextReplica(name, k, now, is_ready)
        if k == 0:
            made.scheduler = Scheduler(self._limits)
        return made

    def _at_stage(self, k: int) -> list[TextReplica]:
        found = [r for r in self._live(k) if r.is_ready]
        return [r for r in found if isinstance(r, TextReplica)]

    # Sequences.

    def arrive(self, arrival: Arrival, now: float) -> None:
        number = len(self._requests) + 1
        sequence = SimulatedSequence(
            now,
            arrival.work,
            prompt=max(1, arrival.prompt),
            answer=max(1, arrival.answer),
            key=("gateway", number, 0),
        )
        self._requests.append(sequence)
        waiting = sum(t.first_at < 0 for t in self._sequences.values())
        longest = min(self._limits.longest, self._model.max_model_len or math.inf)
        if sequence.prompt + sequence.answer > longest:
            # The client asks for too much. Do not count the request as missed: policies
            # must not react to it.
            sequence.is_refused = True
            self._too_long += 1
            return
        if waiting > self._model.max_queued_requests:
            sequence.is_refused = True
            self._missed += 1
            self._refused += 1
            return
        self.in_flight += 1
        self._sequences[sequence.key[:2]] = sequence
        self._unplaced.append(sequence)
        if 0 in self._wanted:
            self.decide(now)
        self._move(now)

    def _expire(self, now: float) -> None:
        begin = now - self._model.deadline_s
        for sequence in [t for t in self._sequences.values() if t.at <= begin]:
            self._leave(sequence)
            self.in_flight -= 1
            self._missed += 1

    def _leave(self, sequence: SimulatedSequence) -> None:
        del self._sequences[sequence.key[:2]]
        if not sequence.chain:
            self._unplaced.remove(sequence)
            return
        scheduler = sequence.chain[0].scheduler
        assert scheduler is not None
        scheduler.pool.remove(sequence.key)
        self._schedulers.leave(_names(sequence.chain))
        for replica in sequence.chain:
            replica.sequences.discard(sequence)
        sequence.chain = []

    def _move(self, now: float) -> None:
        """Place sequences, move them, and start whatever can start."""
        usable = [len(self._at_stage(k)) for k in range(len(self._model.stages))]
        for replica in self._replicas[0]:
            assert isinstance(replica, TextReplica)
            assert replica.scheduler is not None
            adapt(replica.scheduler, usable)
        while self._unplaced:
            chain: list[TextReplica] = []
            for k in range(len(self._model.stages)):
                target = self._least_loaded(k, chain[:1])
                chain += [] if target is None else [target]
            if len(chain) < len(self._model.stages):
                break
            self._place(self._unplaced.popleft(), chain)
        self._begin_moves(now)
        for replicas in self._replicas:
            for replica in list(replicas):
                assert isinstance(replica, TextReplica)
                self._begin_work(replica, now)
                self._leave_if_done(replica, now)

    def _least_loaded(self, k: int, first: Sequence[TextReplica]) -> TextReplica | None:
        """Return the best replica of a stage; see ``streams.chain_selection``."""

        def cost(replica: TextReplica) -> tuple[float, float]:
            splits = any(self._schedulers.is_split(replica.name, f.name) for f in first)
            return len(replica.sequences) + SPLIT * splits, self._chance()

        return min(self._at_stage(k), key=cost, default=None)

    def _place(self, sequence: SimulatedSequence, chain: list[TextReplica]) -> None:
        sequence.chain = chain
        self._schedulers.enter(_names(chain))
        for replica in chain:
            replica.sequences.add(sequence)
        scheduler = chain[0].scheduler
        assert scheduler is not None
        tokens, route = [0] * sequence.tokens, tuple(_names(chain))
        scheduler.add(ScheduledSequence(sequence.key, tokens, route=route))

    def _ready(self, replica: Replica, now: float) -> None:
        assert isinstance(replica, TextReplica)
        replica.new_until = now + NEW_S
        super()._ready(replica, now)

    def _begin_moves(self, now: float) -> None:
        """Move sequences off draining replicas.

        If no sequence is moving, move some to new replicas.
        """
        for replicas in self._replicas:
            for replica in replicas:
                assert isinstance(replica, TextReplica)
                if replica.is_draining:
                    for sequence in [t for t in replica.sequences if t.moving < 0]:
                        if len(self._moving) < MAX_MOVES:
                            self._prepare(sequence, replica.stage)
        for k in range(len(self._replicas)):
            if not self._moving:
                self._lighten(k, now)

    def _lighten(self, k: int, now: float) -> None:
        """Move sequences from the busiest replica to a less loaded new one."""
        usable = self._at_stage(k)
        new = [r for r in usable if r.new_until > now]
        if not new:
            return
        busiest = max(usable, key=lambda r: len(r.sequences))
        emptiest = min(new, key=lambda r: len(r.sequences))
        surplus = surplus_of(len(busiest.sequences), len(emptiest.sequences))
        there = [t for t in busiest.sequences if t.moving < 0 and t.chain[k] is busiest]
        waiting = sorted((t for t in there if t.first_at < 0), key=lambda t: -t.at)
        for sequence in waiting[:surplus]:
            self._restart(sequence)
        if surplus > len(waiting):
            worth = [t for t in there if t.answer - t.made >= WORTH and t.first_at >= 0]
            if worth:
                self._prepare(min(worth, key=lambda t: t.tokens), k, emptiest)

    def _restart(self, sequence: SimulatedSequence) -> None:
        """Place a sequence without output tokens again, and compute it anew."""
        number = sequence.key[:2]
        self._leave(sequence)
        sequence.key = (*number, sequence.key[2] + 1)
        self._sequences[number] = sequence
        self._unplaced.append(sequence)

    def _prepare(
        self, sequence: SimulatedSequence, k: int, target: TextReplica | None = None
    ) -> None:
        target = target or self._least_loaded(k, sequence.chain[:1] if k else ())
        if target is None or target is sequence.chain[k]:
            return
        sequence.moving = k
        self._moving.add(sequence)
        target.sequences.add(sequence)
        target.work.append(Preparation(sequence, sequence.tokens))

    def _switch(self, sequence: SimulatedSequence, target: TextReplica) -> None:
        """Continue a sequence on the replica that was prepared for it."""
        k, sequence.moving = sequence.moving, -1
        old = sequence.chain[0].scheduler
        self._schedulers.leave(_names(sequence.chain))
        sequence.chain[k].sequences.discard(sequence)
        sequence.chain[k] = target
        self._schedulers.enter(_names(sequence.chain))
        new = sequence.chain[0].scheduler
        key, sequence.key = sequence.key, (*sequence.key[:2], sequence.key[2] + 1)
        tokens, route = [0] * sequence.tokens, tuple(_names(sequence.chain))
        moved = ScheduledSequence(
            sequence.key, tokens, computed=len(tokens) - 1, route=route
        )
        assert old is not None
        assert new is not None
        if old is not new:
            old.pool.remove(key)
            new.add(moved)
        elif key in old.pool.known:
            old.move(key, moved)
            old.resume(sequence.key, None)

    # Steps.

    def _begin_work(self, replica: TextReplica, now: float) -> None:
        if replica.is_busy or not replica.is_ready:
            return
        work = self._next_work(replica)
        if work is None:
            return
        k = replica.stage
        if isinstance(work, Preparation):
            rows = min(work.rows, self._limits.max_num_batched_tokens)
        else:
            rows = sum(part.count for part in work.parts)
        seconds = self._model.stages[k].seconds(rows)
        replica.is_busy = True
        self._at(
            now + seconds, lambda then: self._done(replica, work, rows, seconds, then)
        )

    def _next_work(self, replica: TextReplica) -> SimulatedStep | Preparation | None:
        if replica.work and (replica.scheduler is None or self._chance() < 0.5):
            return replica.work.popleft()
        if replica.scheduler is not None:
            planned = replica.scheduler.next_step()
            if planned is not None:
                return SimulatedStep(replica, planned.number, planned.parts)
        return replica.work.popleft() if replica.work else None

    def _done(
        self,
        replica: TextReplica,
        work: SimulatedStep | Preparation,
        rows: int,
        seconds: float,
        now: float,
    ) -> None:
        replica.is_busy = False
        self._rows[replica.stage] += rows  # a real replica counts at the end, too
        self._counts[replica.stage][1] += 1
        self._counts[replica.stage][2] += seconds
        if isinstance(work, Preparation):
            self._prepared(replica, work)
        elif replica.stage == len(self._model.stages) - 1:
            self._sample_tokens(work, now)
        else:
            self._send_on(replica.stage + 1, work)
        self._move(now)

    def _prepared(self, replica: TextReplica, work: Preparation) -> None:
        sequence = work.sequence
        if sequence.key[:2] not in self._sequences or sequence.moving != replica.stage:
            replica.sequences.discard(sequence)
            self._moving.discard(sequence)
            return
        left = work.rows - self._limits.max_num_batched_tokens
        if left > 0:
            replica.work.append(Preparation(sequence, left))
        else:
            self._moving.discard(sequence)
            self._switch(sequence, replica)

    def _send_on(self, k: int, step: SimulatedStep) -> None:
        by_replica: dict[TextReplica, list[StepPart]] = {}
        for part in step.parts:
            sequence = self._sequences.get(part.key[:2])
            if sequence is not None and sequence.key == part.key:
                by_replica.setdefault(sequence.chain[k], []).append(part)
        for replica, parts in by_replica.items():
            sent = SimulatedStep(step.origin, step.number, tuple(parts))
            replica.work.append(sent)

    def _sample_tokens(self, step: SimulatedStep, now: float) -> None:
        done: list[tuple[Key, int | None]] = []
        for part in step.parts:
            sequence = self._sequences.get(part.key[:2])
            if sequence is None or sequence.key != part.key:
                continue
            if not part.samples:
                done.append((part.key, None))
                continue
            sequence.made += 1
            self._generated += 1
            if sequence.first_at < 0:
                sequence.first_at = now
            is_last = sequence.made >= sequence.answer
            done.append((part.key, None if is_last else 0))
        scheduler = step.origin.scheduler
        assert scheduler is not None
        scheduler.sampled(step.number, done)
        for key, _ in done:
            sequence = self._sequences[key[:2]]
            if sequence.made >= sequence.answer:
                self._end_sequence(sequence, now)

    def _end_sequence(self, sequence: SimulatedSequence, now: float) -> None:
        self._leave(sequence)
        sequence.ended = self._last_end = now
        self.in_flight -= 1
        self._missed += not self._is_good(sequence)
        self._ended[0] += 1
        self._ended[1] += sequence.prompt
        self._ended[2] += sequence.answer

    def _is_good(self, request: Request) -> bool:
        assert isinstance(request, SimulatedSequence)
        wanted = self._model.text
        if not 0 <= request.ended - request.at <= self._model.deadline_s:
            return False
        if wanted is None:
            return True
        ttft_s = request.first_at - request.at
        tpot_s = (request.ended - request.first_at) / max(1, request.answer - 1)
        is_first = wanted.ttft_s is None or ttft_s <= wanted.ttft_s
        return is_first and (wanted.tpot_s is None or tpot_s <= wanted.tpot_s)

    def _took_s(self, request: Request) -> float:
        assert isinstance(request, SimulatedSequence)
        return request.first_at - request.at if request.ended >= 0 else -1.0

    # Decisions.

    def _sample(self, now: float) -> Sample:
        stages = []
        for k in range(len(self._model.stages)):
            here: Iterable[Replica] = self._replicas[k]
            ongoing = sum(len(r.sequences) for r in here if isinstance(r, TextReplica))
            _, steps, busy_s = self._counts[k]
            stages.append(
                StageSeen(
                    ongoing=ongoing + (len(self._unplaced) if k == 0 else 0),
                    ready=sum(r.is_ready for r in self._live(k)),
                    requests=self._ended[0],
                    batches=int(steps),
                    busy_s=busy_s,
                    rows=self._rows[k],
                )
            )
        used = [r.scheduler.pool.usage for r in self._at_stage(0) if r.scheduler]
        return Sample(
            at=now,
            arrived=len(self._requests) - self._too_long,
            stages=tuple(stages),
            missed=self._missed,
            refused=self._refused,
            tokens=self._generated,
            completions=self._ended[0],
            prompt_tokens=self._ended[1],
            generated_tokens=self._ended[2],
            kv_usage=max(used, default=0.0),
        )


def _names(chain: Iterable[Replica]) -> list[str]:
    return [replica.name for replica in chain]
