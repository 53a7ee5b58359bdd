"""The scheduler of steps, in a replica of stage 0. Pure.

It does continuous batching: every step takes one token of each running sequence that
waits for none of its own, and fills the rest of the token budget with parts of prompts
(chunked prefill). Several steps are under way at once, up to one for each stage, so
that the pipeline is full: each takes an equal part of the running sequences. But a step
that reads all weights for one row takes almost as long as for eight, so few sequences
are not split: they go in one step, and wait for each other.

Memory is counted in blocks of ``block_size`` tokens. If a running sequence needs a
block and none is free, the sequence that came last is preempted: its blocks are
freed, and it is computed again from its tokens when there is room (preemption by
recompute, as in vLLM: Kwon et al., "Efficient Memory Management for Large Language
Model Serving with PagedAttention", 2023). A sequence of a higher priority preempts one
of a lower priority for its place, too.

Prompts are computed in an order that gives each tenant its share of the tokens; those
of one tenant in the order of their arrival. Each step has a token of every running
sequence first, and the steps under way have no more tokens of prompts together than one
may have, so a flood of prompts delays running sequences by about that much, and by
less those of another tenant.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from multiworld.serve.generation.scheduled_sequence import (
    ScheduledSequence,
    by_route,
)
from multiworld.serve.generation.steps_under_way import StepsUnderWay
from multiworld.serve.generation.token_shares import TokenShares
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport.generation_messages import StepPart
from multiworld.serve.transport.protocol import Key

LEAST_PART = 32
"""Least tokens of a part of a prompt that is cut for the sake of the pipeline. A step
costs about as much as nine tokens besides (see ``ROWS``), so parts of 32 take 28 % more
time in all."""

ROWS = 8
"""Sequences of a step below which splitting them saves no time: the time of a step is
that of reading the weights (SmolLM2 on an EPYC, fp32, one thread: 55 ms with one row,
99 with eight, 136 with sixteen)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of one replica of stage 0.

    Attributes:
        max_num_seqs: Most sequences that run at once.
        max_num_batched_tokens: Most tokens of a step.
        block_size: Tokens of a block.
        blocks: Number of blocks.
        steps: Most steps under way at once; as many as there are stages.
        is_prefill_chunked: Whether a prompt may be computed in several steps.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    blocks: int = 1024
    steps: int = 1
    is_prefill_chunked: bool = True


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step to compute now.

    Attributes:
        number: Its number at this scheduler.
        parts: Its parts; each sequence has at most one.
        preempted: Sequences that were preempted, before this step.
        is_alone: Whether it has a suspect, and nothing else is under way.
    """

    number: int
    parts: tuple[StepPart, ...]
    preempted: tuple[Key, ...] = ()
    is_alone: bool = False


class Scheduler:
    """Decides which tokens of which sequences the next step computes.

    Args:
        limits: Its limits.

    Attributes:
        limits: See above.
        steps: Most steps under way at once; as many as in ``limits`` at first.
        withheld: Blocks that are left to other schedulers; but one sequence may have
            all, so that it can end.
        granule: Tokens in multiples of which a sequence takes memory.
        preemptions: Number of preemptions so far.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._waiting: list[ScheduledSequence] = []
        self._running: list[ScheduledSequence] = []
        self._known: dict[Key, ScheduledSequence] = {}
        self._steps = StepsUnderWay()
        self._arrivals = 0
        self._free = limits.blocks
        self._preempted: list[Key] = []
        self._planned: set[Key] = set()
        self._reserved: dict[Key, int] = {}
        self._shares = TokenShares()
        self.preemptions, self.granule = 0, 1
        self.steps = limits.steps
        self.withheld = 0

    # Sequences.

    def add(
        self,
        key: Key,
        tokens: Sequence[int],
        *,
        computed: int = 0,
        refill: int = 0,
        share: Share = DEFAULT_SHARE,
        is_probe: bool = False,
        is_suspect: bool = False,
        route: Sequence[str] = (),
    ) -> None:
        """Add a sequence; it is computed when it is its turn.

        Args:
            key: Gateway, stream and attempt.
            tokens: Its tokens so far; at least one.
            computed: Number of tokens that need not be computed; fewer than all.
            refill: Number of tokens that the other stages have.
            share: Its tenant.
            is_probe: Whether it is the next one, however many run.
            is_suspect: Whether it is computed alone until it has a token.
            route: Replicas by stage that compute it.

        Raises:
            ValueError: It needs more blocks than there are.
        """
        if self.blocks_of(len(tokens) + 1) > self.limits.blocks:
            raise ValueError(
                f"{len(tokens)} tokens need {self.blocks_of(len(tokens) + 1)} blocks "
                f"of {self.limits.block_size}; there are {self.limits.blocks}"
            )
        self._arrivals += 1
        sequence = ScheduledSequence(
            key,
            list(tokens),
            share,
            computed=computed,
            refill=min(refill, len(tokens)),
            number=self._arrivals,
            is_probe=is_probe,
            is_suspect=is_suspect,
            route=tuple(route),
        )
        self._known[key] = sequence
        self._shares.enter(share)
        self._waiting.append(sequence)

    def remove(self, key: Key) -> None:
        """Forget a sequence, if it is known.

        It counts as computed in the steps that are under way.
        """
        self._free += self._reserved.pop(key, 0)
        sequence = self._known.pop(key, None)
        if sequence is None:
            return
        self._shares.leave(sequence.share)
        self._free += sequence.blocks
        for found in (self._waiting, self._running):
            if sequence in found:
                found.remove(sequence)
        self._steps.leave(key)

    # Stages that are replaced.

    def knows(self, key: Key) -> bool:
        """Tell whether a sequence is known."""
        return key in self._known

    def pause(self, key: Key) -> None:
        """Compute nothing of a sequence until ``resume``, if it is known.

        What is under way of it does not come back.
        """
        sequence = self._known.get(key)
        if sequence is not None:
            sequence.is_paused = True
            self._steps.leave(key)

    def move(
        self,
        old: Key,
        new: Key,
        tokens: Sequence[int],
        computed: int,
        route: Sequence[str] = (),
    ) -> None:
        """Rename a sequence, and pause it.

        Args:
            old: Its key so far.
            new: Its key from now on.
            tokens: Its tokens, all that were delivered.
            computed: Number of those that were computed here.
            route: Replicas by stage that compute it from now on.
        """
        self.pause(old)
        sequence = self._known.pop(old)
        sequence.key, sequence.tokens, sequence.route = new, list(tokens), tuple(route)
        sequence.computed = min(computed, sequence.computed)
        self._known[new] = sequence

    def reserve(self, earlier: Iterable[Key], key: Key, tokens: int) -> bool:
        """Take blocks for a sequence that may come, if that many are free.

        Args:
            earlier: Its keys so far; their blocks count.
            key: Its key.
            tokens: Number of its tokens.

        Returns:
            Whether there is room for it.
        """
        self._free += sum(self._reserved.pop(old, 0) for old in earlier)
        needed = self.blocks_of(tokens + 1)
        if needed > self._free - self.withheld or self._places <= 0:
            return False
        self._free -= needed
        self._reserved[key] = needed
        return True

    def has_reserved(self, key: Key) -> bool:
        """Tell whether there are blocks for a sequence that may come."""
        return key in self._reserved

    def take_over(
        self,
        old: Key,
        new: Key,
        tokens: Sequence[int],
        computed: int,
        share: Share,
        route: Sequence[str] = (),
    ) -> None:
        """Add a sequence that has come from another replica, paused.

        Args:
            old: The key that it has blocks under.
            new: Its key from now on.
            tokens: Its tokens so far.
            computed: Number of those that were computed here.
            share: Its tenant.
            route: Replicas by stage that compute it.
        """
        self.add(new, tokens, computed=computed, share=share, route=route)
        sequence = self._known[new]
        sequence.is_paused, sequence.blocks = True, self._reserved.pop(old)
        self._waiting.remove(sequence)
        self._running.append(sequence)

    def rewind(self, key: Key, computed: int) -> None:
        """Compute a paused sequence again from a token on."""
        sequence = self._known[key]
        sequence.computed = min(computed, sequence.computed)

    def resume(self, key: Key, token: int | None) -> None:
        """Go on with a paused sequence, if it is known.

        Args:
            key: The sequence.
            token: Its next token, if the last stage has sampled it.
        """
        sequence = self._known.get(key)
        if sequence is None or not sequence.is_paused:
            return
        sequence.is_paused = sequence.is_under_way = False
        if token is not None:
            sequence.tokens.append(token)
            sequence.is_suspect = False

    # Steps.

    def sampled(self, step: int, tokens: Iterable[tuple[Key, int | None]]) -> None:
        """Record what the last stage has computed of a step.

        Args:
            step: Number of the step.
            tokens: Sequences that came out of the last stage, each with its next token;
                None if its prompt is not complete yet, or if it has ended there.
        """
        came = dict(tokens)
        routes = {self._known[key].route for key in came if key in self._known}
        for key, token in came.items():
            sequence = self._known.get(key)
            if sequence is not None and self._steps.is_waited_for(step, key):
                if token is not None:
                    sequence.tokens.append(token)
                    sequence.is_under_way = sequence.is_suspect = False
                elif self._steps.samples(step, key):
                    self.remove(key)  # it gets no more tokens
            self._steps.came_back(step, key)
        self._steps.left_out(step, routes, lambda key: self._known[key].route)

    def overdue(self, now: float, most_s: float) -> list[Key]:
        """Return sequences whose steps do not come back; see ``StepsUnderWay``."""
        return self._steps.overdue(now, most_s)

    def next_step(self) -> PlannedStep | None:
        """Return the next step to compute, or None if there is none now."""
        if len(self._steps) >= self.steps:
            return None
        budget = self.limits.max_num_batched_tokens
        parts: list[StepPart] = []
        self._planned.clear()
        suspect = next((s for s in self._known.values() if s.is_suspect), None)
        if suspect is not None:
            if len(self._steps):
                return None  # it must be alone
            self._suspect(parts, suspect, budget)
        if not parts:
            suspect = None
            self._let_first_in()
            self._decode(parts, budget)
            left = budget - sum(part.count for part in parts)
            self._prefill(parts, min(left, self._prompt_tokens()))
        if not parts:
            return None
        preempted, self._preempted = tuple(self._preempted), []
        number, is_alone = self._steps.begin(parts), suspect is not None
        return PlannedStep(number, tuple(parts), preempted, is_alone=is_alone)

    def _suspect(
        self, parts: list[StepPart], suspect: ScheduledSequence, budget: int
    ) -> None:
        """Add the next part of a suspect, if there is room for it."""
        if suspect in self._waiting and not self._admit(suspect):
            return
        count = self._chunk(suspect, budget, is_alone=True)
        if count and self._has_room(suspect, count):
            parts.append(self._take(suspect, count))

    def _let_first_in(self) -> None:
        """Admit waiting sequences of a higher priority than running ones have."""
        lowest = min((s.share.priority for s in self._running), default=0)
        for sequence in sorted(
            (s for s in self._waiting if s.share.priority > lowest and not s.is_paused),
            key=self._rank,
        ):
            if sequence.is_suspect or not self._admit(sequence):
                return

    def _decode(self, parts: list[StepPart], budget: int) -> None:
        """Add a token of each running sequence that waits for none, up to a share.

        Fewer than a share wait until others of their kind come back. During a refill
        nobody waits: steps are computed all the time, and a few rows more cost little.
        """
        decoding = [s for s in self._running if s.lacking <= 1 and not s.is_paused]
        groups = min(self.steps, max(1, round(len(decoding) / ROWS)))
        most = min(budget, math.ceil(len(decoding) / groups))
        ready = sum(not s.is_under_way for s in decoding)
        if ready < min(most, len(decoding)) and not self._is_refilling:
            return  # the others are under way
        for sequence in by_route([s for s in decoding if not s.is_under_way]):
            if len(parts) >= most:
                return
            if sequence not in self._running:
                continue  # it was preempted for an earlier one
            if sequence.lacking == 1 and self._has_room(sequence, 1):
                parts.append(self._take(sequence, 1))

    def _prompt_tokens(self) -> int:
        """Return the most tokens of prompts in the next step.

        All steps under way together have as many as one may have: running sequences
        wait for no more, and a prompt is computed in several stages at once. If nothing
        waits for them and there is more to compute, each step is full. Sequences that
        were refilled just now wait for those that still are. Beside another tenant's
        sequences the parts are smaller: these wait for one chunk in all.
        """
        most = self.limits.max_num_batched_tokens
        if self.steps == 1 or not self.limits.is_prefill_chunked:
            return most
        if not self._is_refilling:
            for sequence in self._running:
                sequence.refill = 0
        waited_for = [s for s in self._running if s.lacking <= 1 and not s.refill]
        prompts = [s for s in self._running if s.lacking > 1] + self._waiting
        tokens = sum(len(s.tokens) for s in prompts)
        if not waited_for and (tokens > most or self._is_refilling):
            return most
        parts = self.steps
        if waited_for and len({s.share for s in (*waited_for, *prompts)}) > 1:
            parts += 1  # what stage 0 computes when a token comes back counts as well
        return max(LEAST_PART, math.ceil(min(tokens, most) / parts))

    def _prefill(self, parts: list[StepPart], budget: int) -> None:
        """Fill the step with parts of prompts, in the order of fair shares."""
        running = [
            s
            for s in self._running
            if s.lacking > 1 and not s.is_under_way and not s.is_paused
        ]
        waiting = self._waiting_by_tenant()
        while budget > 0 and (running or waiting):
            heads = [queue[0] for queue in waiting.values()]
            sequence = min((*running, *heads), key=self._rank)
            if sequence in running:
                running.remove(sequence)  # and it may have been preempted meanwhile
            else:
                # One that waits to be computed alone is not overtaken.
                is_alone = sequence.is_suspect
                fits = self._chunk(sequence, budget, is_alone=not parts) > 0
                if is_alone or not fits or not self._admit(sequence):
                    waiting = {}  # later ones would overtake it again and again
                    continue
                self._next(waiting, sequence)
            count = self._chunk(sequence, budget, is_alone=not parts)
            if sequence in self._running and count and self._has_room(sequence, count):
                parts.append(self._take(sequence, count))
                budget -= count

    def _waiting_by_tenant(self) -> dict[Share, deque[ScheduledSequence]]:
        found: dict[Share, deque[ScheduledSequence]] = {}
        for sequence in self._waiting:
            if sequence.is_probe:
                found.setdefault(DEFAULT_SHARE, deque()).appendleft(sequence)
            elif not sequence.is_paused:
                found.setdefault(sequence.share, deque()).append(sequence)
        return found

    @staticmethod
    def _next(
        waiting: dict[Share, deque[ScheduledSequence]], sequence: ScheduledSequence
    ) -> None:
        """Remove a sequence from the head of its tenant's queue."""
        for share, queue in waiting.items():
            if queue[0] is sequence:
                queue.popleft()
                if not queue:
                    del waiting[share]
                return

    def _rank(self, sequence: ScheduledSequence) -> tuple[bool, int, float, int]:
        priority, served = self._shares.rank(sequence.share)
        return not sequence.is_probe, priority, served, sequence.number

    def _admit(self, sequence: ScheduledSequence) -> bool:
        """Let a sequence run, if there is room for all of it; return whether."""
        while not self._fits(sequence):
            victim = self._last_to_preempt(below=sequence.share.priority)
            if victim is None:
                return False
            self._preempt(victim)
        self._waiting.remove(sequence)
        self._running.append(sequence)
        return True

    def _fits(self, sequence: ScheduledSequence) -> bool:
        is_full = self._places <= 0
        # All of it must fit, or it would preempt what came before.
        needed = self.blocks_of(len(sequence.tokens) + 1)
        has_room = needed <= self._room(is_only=not self._running)
        return has_room and (sequence.is_probe or not is_full)

    def _chunk(
        self, sequence: ScheduledSequence, budget: int, *, is_alone: bool
    ) -> int:
        """Return how many tokens of a sequence to compute now."""
        if self.limits.is_prefill_chunked:
            return min(sequence.lacking, budget)
        fits = sequence.lacking <= budget or is_alone
        return sequence.lacking if fits else 0

    def _take(self, sequence: ScheduledSequence, count: int) -> StepPart:
        begin = sequence.computed
        sequence.computed += count
        samples = sequence.lacking == 0
        sequence.is_under_way = samples
        sequence.last_step = self._steps.last_number + 1
        self._planned.add(sequence.key)
        self._shares.charge(sequence.share, count)
        return StepPart(sequence.key, begin, count, samples)

    # Blocks.

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks that a number of tokens needs.

        One sequence may always have all of them, though they are no whole granules.
        """
        limits = self.limits
        least = math.ceil(tokens / limits.block_size)
        whole = math.ceil(tokens / self.granule) * self.granule
        return max(least, min(limits.blocks, math.ceil(whole / limits.block_size)))

    def _has_room(self, sequence: ScheduledSequence, count: int) -> bool:
        """Give a sequence the blocks for more tokens; preempt later ones for it."""
        needed = self.blocks_of(sequence.computed + count) - sequence.blocks
        while needed > self._room(is_only=self._running == [sequence]):
            victim = self._last_to_preempt()
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        self._free -= needed
        sequence.blocks += needed
        return True

    def _room(self, *, is_only: bool) -> int:
        """Return the free blocks for a sequence; more if no other one runs."""
        return self._free if is_only else self._free - self.withheld

    def _last_to_preempt(self, below: float = math.inf) -> ScheduledSequence | None:
        """Return the sequence to preempt first, of those below a priority."""
        idle = [
            s
            for s in self._running
            if s.share.priority < below
            and not s.is_paused
            and s.key not in self._planned
            and s.key not in self._steps
        ]
        return max(idle, key=lambda s: (-s.share.priority, s.number), default=None)

    def _preempt(self, sequence: ScheduledSequence) -> None:
        self.preemptions += 1
        self._running.remove(sequence)
        self._free += sequence.blocks
        sequence.blocks = sequence.computed = sequence.refill = 0
        self._preempted.append(sequence.key)
        place = next(
            (n for n, s in enumerate(self._waiting) if s.number > sequence.number),
            len(self._waiting),
        )
        self._waiting.insert(place, sequence)

    # What there is.

    @property
    def _is_refilling(self) -> bool:
        """True while a sequence lacks tokens here that the other stages have."""
        lacking = (s for s in self._known.values() if s.computed < s.refill)
        return any(
            not s.is_paused and (s in self._running or self._fits(s)) for s in lacking
        )

    @property
    def _places(self) -> int:
        """Number of sequences that may still run."""
        taken = len(self._running) + len(self._reserved)
        return self.limits.max_num_seqs - taken

    @property
    def running(self) -> int:
        """Number of sequences that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for their turn."""
        return len(self._waiting)

    @property
    def used_blocks(self) -> int:
        """Number of blocks in use."""
        return self.limits.blocks - self._free

    @property
    def usage(self) -> float:
        """Share of its blocks that are in use, from 0 to 1."""
        return min(1.0, self.used_blocks / (self.limits.blocks - self.withheld))

    @property
    def is_idle(self) -> bool:
        """True if there is no sequence."""
        return not self._known

    def tokens(self, key: Key) -> list[int]:
        """Return all tokens of a sequence."""
        return self._known[key].tokens
