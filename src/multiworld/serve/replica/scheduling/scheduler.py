"""Scheduler of steps, in a replica of stage 0: continuous batching. Pure.
``SequencePool`` decides which sequences run; ``StepPlanner`` decides which of their
tokens the next step computes."""

from __future__ import annotations

from collections.abc import Iterable

from multiworld.serve.replica.scheduling.scheduled_sequence import ScheduledSequence
from multiworld.serve.replica.scheduling.sequence_pool import SequencePool
from multiworld.serve.replica.scheduling.step_planner import PlannedStep, StepPlanner
from multiworld.serve.replica.scheduling.steps_in_flight import StepsInFlight
from multiworld.serve.text.engine_limits import EngineLimits
from multiworld.serve.wire.protocol import Key


class TooManyTokensError(Exception):
    """A sequence needs more blocks than there are."""


class Scheduler:
    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.steps = StepsInFlight(limits.steps)
        self.pool = SequencePool(limits, self.steps)
        self._planner = StepPlanner(self.pool, self.steps)

    def add(self, sequence: ScheduledSequence) -> None:
        """Add a sequence with at least one token to compute."""
        count = len(sequence.tokens)
        if sequence.lacking <= 0:
            raise ValueError(
                f"all {count} tokens of {sequence.key} are computed already"
            )
        needed = self.pool.blocks_of(count + 1)
        if needed > self.limits.blocks:
            raise TooManyTokensError(
                f"{count} tokens need {needed} blocks "
                f"of {self.limits.block_size}; there are {self.limits.blocks}"
            )
        self.pool.enter(sequence)
        self.pool.wait(sequence)

    def take_over(self, old: Key, sequence: ScheduledSequence) -> None:
        """Add a sequence, paused; it gets the blocks reserved for attempt ``old``."""
        self.pool.enter(sequence)
        sequence.is_paused = True
        self.pool.run_reserved(sequence, old)

    def pause(self, key: Key) -> None:
        """Pause a sequence until ``resume``; stop waiting for its steps in flight."""
        sequence = self.pool.known.get(key)
        if sequence is not None:
            sequence.is_paused = True
            self.pool.queue.remove(sequence)
            self.steps.leave(key)

    def move(self, old: Key, new: ScheduledSequence) -> None:
        """Pause a sequence, and continue it as ``new``."""
        self.pause(old)
        sequence = self.pool.known[old]
        self.pool.rename(sequence, new.key)
        sequence.tokens, sequence.route = new.tokens, new.route
        self.pool.suspect(sequence, new.group, is_suspect=new.is_suspect)
        sequence.computed = min(new.computed, sequence.computed)

    def rewind(self, key: Key, computed: int) -> None:
        """Recompute a paused sequence from position ``computed``."""
        sequence = self.pool.known[key]
        sequence.computed = min(computed, sequence.computed)

    def resume(self, key: Key, token: int | None) -> None:
        """Continue a paused sequence; ``token`` is its next one, if already sampled."""
        sequence = self.pool.known.get(key)
        if sequence is None or not sequence.is_paused:
            return
        sequence.is_paused = sequence.is_in_flight = False
        if token is not None:
            self.pool.append(sequence, token)
        if sequence.number not in self.pool.running:
            self.pool.wait(sequence)

    def evict(self, key: Key, replica: str, now: float) -> bool:
        """Preempt a sequence for which a replica of a later stage had no KV blocks."""
        # Send nothing to that replica for a while.
        self.pool.full.add(replica, now)
        sequence = self.pool.known.get(key)
        if sequence is None:
            return False
        # If the sequence is paused or in a step, the gateway must decide how it
        # continues: one of its tokens may be in flight, or a stage may be waiting for
        # dropped rows.
        is_elsewhere = sequence.is_paused or key in self.steps
        self.steps.leave(key)
        sequence.is_in_flight = False
        self.pool.free(sequence)
        return is_elsewhere

    def sampled(
        self, step: int, tokens: Iterable[tuple[Key, int | None]], now: float = 0.0
    ) -> None:
        """Record the next token of each sequence of a step."""
        self.steps.record_return(step, now)
        # A token is None if the prompt is not complete yet, or if the sequence has
        # ended.
        came = dict(tokens)
        routes = {self.pool.known[key].route for key in came if key in self.pool.known}
        for key, token in came.items():
            sequence = self.pool.known.get(key)
            if sequence is not None and self.steps.is_waited_for(step, key):
                if token is not None:
                    sequence.is_in_flight = False
                    self.pool.append(sequence, token)
                elif self.steps.samples(step, key):
                    # Keep the blocks until the gateway reacts to the end.
                    self.pool.reserve_own(key)
            self.steps.remove(step, key)
        self.steps.record_missing(step, routes, lambda key: self.pool.known[key].route)

    @property
    def wakes_at(self) -> float:
        """Time at which a step may become due without any event; may be infinite."""
        return min(self.steps.next_late_at, self.pool.full.ends_at)

    def next_step(self, now: float = 0.0) -> PlannedStep | None:
        return self._planner.next_step(now)
