"""Scheduler of steps, in a replica of stage 0. Pure.

It does continuous batching: every step computes one token of each running sequence
whose previous token is known, and fills the rest of the token budget with prefill
chunks. Several steps are in flight at once, up to one per stage, to fill the pipeline:
each gets an equal part of the running sequences. But a step that reads all weights for
one row takes almost as long as for eight, so a few sequences are not split: they share
one step, and wait for each other.

Memory is counted in blocks of ``block_size`` tokens. If a running sequence needs a
block and none is free, the latest sequence is preempted: its blocks are freed, and it
is recomputed from its tokens when there is room (preemption by recompute, as in vLLM:
Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", 2023). A sequence of a higher priority may also preempt one of a lower
priority for its slot.

Slots, blocks and the tokens of each step are shared by weight between the tenants that
have sequences; a tenant alone may use everything. A tenant that has fewer slots or
blocks than its share preempts for them. The tenant that has received the fewest tokens
is first in a step, and a step is only as large as the tenant with the smallest part of
it can tolerate (``step_budget``).

A probe is in the next step, preempts whatever it must, and is preempted by no stream:
streams may be waiting for the replica that it makes ready.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from multiworld.serve.generation.engine_limits import EngineLimits
from multiworld.serve.generation.replica.scheduled_sequence import (
    ScheduledSequence,
    by_route,
)
from multiworld.serve.generation.replica.step_budget import (
    STEP_ROWS,
    StepBudget,
    cost_of,
    rows_of,
)
from multiworld.serve.generation.replica.steps_in_flight import StepsInFlight
from multiworld.serve.generation.replica.tenant_use import TenantUse
from multiworld.serve.generation.replica.token_shares import TokenShares
from multiworld.serve.generation.replica.waiting_queue import WaitingQueue
from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport.generation_messages import StepPart
from multiworld.serve.transport.protocol import Key

MIN_CHUNK = 32
"""Minimum tokens of a prefill chunk when a prompt is split over the pipeline. A step
also costs about as much as nine tokens (see ``ROWS``), so chunks of 32 take 28 % more
time in all."""

ROWS = 8
"""Sequences per step below which splitting them saves no time. The time of such a step
is spent on reading the weights (SmolLM2 on an EPYC, fp32, one thread: 55 ms with one
row, 99 with eight, 136 with sixteen)."""

SHARED_S, SHARED_TOKENS = 60.0, 32
"""Seconds for which a second tenant counts as present after its last sequence, and the
maximum cost of the tokens in flight meanwhile, in rows. A newcomer waits for at most
these; such steps take a fifth more time than full ones."""

FULL_S, LONGEST_FULL_S = 0.1, 2.0
"""Minimum and maximum seconds for which nothing is sent to a replica that had no KV
blocks for a sequence; the time doubles while it has none."""


class TooManyTokensError(Exception):
    """A sequence needs more blocks than there are."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step to compute now; ``is_alone``: nothing else may be in flight."""

    number: int
    parts: tuple[StepPart, ...]
    preempted: tuple[Key, ...] = ()
    is_alone: bool = False


class Scheduler:
    """Decides which tokens of which sequences the next step computes.

    Attributes:
        steps: Maximum number of steps in flight; initially as in ``limits``.
        withheld: Blocks that are left to other schedulers; but a lone sequence may use
            all, so that it can finish.
        granule: Tokens in multiples of which a sequence's memory is allocated.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self._known: dict[Key, ScheduledSequence] = {}
        self._queue = WaitingQueue()  # those that neither run nor are paused
        self._running: dict[int, ScheduledSequence] = {}  # by number
        self._suspects: dict[int, ScheduledSequence] = {}
        self._rebuilt: dict[int, ScheduledSequence] = {}
        self._steps = StepsInFlight()
        self._arrivals = 0
        self._free = limits.blocks
        self._preempted: list[Key] = []
        self._planned: set[Key] = set()
        self._reserved: dict[Key, int] = {}
        self._shares = TokenShares()
        self._use = TenantUse(limits.max_num_seqs, limits.blocks)
        self._full: dict[str, tuple[float, float]] = {}
        self._shunned: set[str] = set()
        self._seen: dict[str, float] = {}
        self._was_alone = False
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
        rebuild: int = 0,
        share: Share = DEFAULT_SHARE,
        is_probe: bool = False,
        is_suspect: bool = False,
        route: Sequence[str] = (),
        sample_rows: float = 0.0,
    ) -> None:
        """Add a sequence of which at least one token is to be computed."""
        if computed >= len(tokens):
            raise ValueError(f"all {computed} tokens of {key} are computed already")
        if self.blocks_of(len(tokens) + 1) > self.limits.blocks:
            raise TooManyTokensError(
                f"{len(tokens)} tokens need {self.blocks_of(len(tokens) + 1)} blocks "
                f"of {self.limits.block_size}; there are {self.limits.blocks}"
            )
        sequence = self._enter(
            key,
            tokens,
            computed=computed,
            rebuild=min(rebuild, len(tokens)),
            share=share,
            is_probe=is_probe,
            is_suspect=is_suspect,
            route=tuple(route),
            sample_rows=sample_rows,
        )
        self._wait(sequence)

    def _enter(
        self, key: Key, tokens: Sequence[int], **facts: Any
    ) -> ScheduledSequence:
        self._arrivals += 1
        sequence = ScheduledSequence(key, list(tokens), number=self._arrivals, **facts)
        self._known[key] = sequence
        self._shares.enter(sequence.share, self._steps.cost + STEP_ROWS)
        if sequence.is_suspect:
            self._suspects[sequence.number] = sequence
        if sequence.rebuild:
            self._rebuilt[sequence.number] = sequence
        return sequence

    def _wait(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence, unless it is paused or a suspect."""
        if not sequence.is_paused and not sequence.is_suspect:
            self._queue.add(sequence)

    def _run(self, sequence: ScheduledSequence) -> None:
        self._queue.remove(sequence)
        self._running[sequence.number] = sequence
        self._use.add(sequence.share, slots=1, blocks=sequence.blocks)

    def _leave(self, sequence: ScheduledSequence) -> int:
        """Stop running a sequence; return the blocks that it had."""
        blocks, sequence.blocks = sequence.blocks, 0
        if self._running.pop(sequence.number, None) is not None:
            self._use.add(sequence.share, slots=-1, blocks=-blocks)
        return blocks

    def _trust(self, sequence: ScheduledSequence) -> None:
        sequence.is_suspect = False
        self._suspects.pop(sequence.number, None)

    def remove(self, key: Key) -> None:
        """Forget a sequence; the steps in flight no longer wait for it."""
        self._free += self._reserved.pop(key, 0)
        self._free += self._forget(key)

    def _forget(self, key: Key) -> int:
        sequence = self._known.pop(key, None)
        if sequence is None:
            return 0
        self._shares.leave(sequence.share)
        self._queue.remove(sequence)
        self._suspects.pop(sequence.number, None)
        self._rebuilt.pop(sequence.number, None)
        self._steps.leave(key)
        return self._leave(sequence)

    # Replacement of stages.

    def knows(self, key: Key) -> bool:
        return key in self._known

    def is_paused(self, key: Key) -> bool:
        sequence = self._known.get(key)
        return sequence is not None and sequence.is_paused

    def pause(self, key: Key) -> None:
        """Compute nothing of a sequence until ``resume``; its steps do not return."""
        sequence = self._known.get(key)
        if sequence is not None:
            sequence.is_paused = True
            self._queue.remove(sequence)
            self._steps.leave(key)

    def move(
        self,
        old: Key,
        new: Key,
        tokens: Sequence[int],
        computed: int,
        route: Sequence[str] = (),
    ) -> None:
        """Rename and pause a sequence; ``computed`` tokens were computed here."""
        self.pause(old)
        sequence = self._known.pop(old)
        sequence.key, sequence.tokens, sequence.route = new, list(tokens), tuple(route)
        sequence.computed = min(computed, sequence.computed)
        self._known[new] = sequence
        self._preempted = [new if key == old else key for key in self._preempted]

    def reserve(self, earlier: Iterable[Key], key: Key, tokens: int) -> bool:
        """Reserve blocks instead of those of ``earlier`` keys, if enough are free."""
        self._free += sum(self._reserved.pop(old, 0) for old in earlier)
        needed = self.blocks_of(tokens + 1)
        if needed > self._free - self.withheld or self._slots <= 0:
            return False
        self._free -= needed
        self._reserved[key] = needed
        return True

    def has_reserved(self, key: Key) -> bool:
        return key in self._reserved

    def take_over(
        self,
        old: Key,
        new: Key,
        tokens: Sequence[int],
        computed: int,
        share: Share,
        route: Sequence[str] = (),
        sample_rows: float = 0.0,
    ) -> None:
        """Add a paused sequence from another replica; ``old`` has its reservation."""
        sequence = self._enter(
            new,
            tokens,
            computed=computed,
            share=share,
            route=tuple(route),
            sample_rows=sample_rows,
        )
        sequence.is_paused, sequence.blocks = True, self._reserved.pop(old)
        self._run(sequence)

    def rewind(self, key: Key, computed: int) -> None:
        """Recompute a paused sequence from a token on."""
        sequence = self._known[key]
        sequence.computed = min(computed, sequence.computed)

    def resume(self, key: Key, token: int | None) -> None:
        """Continue a paused sequence; ``token`` is its next one, if already sampled."""
        sequence = self._known.get(key)
        if sequence is None or not sequence.is_paused:
            return
        sequence.is_paused = sequence.is_in_flight = False
        if token is not None:
            sequence.tokens.append(token)
            self._trust(sequence)
        if sequence.number not in self._running:
            self._wait(sequence)

    def evict(self, key: Key, replica: str, now: float) -> bool:
        """Preempt a sequence for which a replica of a later stage had no KV blocks.

        That replica receives nothing for a while. Returns whether the gateway must
        decide how the sequence continues, because one of its tokens may be in flight,
        or a stage waits for what was dropped.
        """
        until, pause_s = self._full.get(replica, (now, 0.0))
        if now >= until:  # otherwise the message concerns what was sent earlier
            pause_s = min(LONGEST_FULL_S, max(FULL_S, 2 * pause_s))
            self._full[replica] = now + pause_s, pause_s
        self._update_full(now)
        sequence = self._known.get(key)
        if sequence is None:
            return False
        is_elsewhere = sequence.is_paused or key in self._steps
        self._steps.leave(key)
        sequence.computed = sequence.rebuild = 0
        sequence.is_in_flight = False
        self._rebuilt.pop(sequence.number, None)
        if sequence.number in self._running:
            self.preemptions += 1
            self._free += self._leave(sequence)
            self._wait(sequence)
        return is_elsewhere

    # Steps.

    def sampled(self, step: int, tokens: Iterable[tuple[Key, int | None]]) -> None:
        """Record the next token of each sequence of a step.

        It is None if the prompt is not complete yet, or the sequence has ended.
        """
        came = dict(tokens)
        routes = {self._known[key].route for key in came if key in self._known}
        for key, token in came.items():
            sequence = self._known.get(key)
            if sequence is not None and self._steps.is_waited_for(step, key):
                if token is not None:
                    sequence.tokens.append(token)
                    sequence.is_in_flight = False
                    self._trust(sequence)
                elif self._steps.samples(step, key):
                    self._end(key)
            self._steps.came_back(step, key)
        self._steps.left_out(step, routes, lambda key: self._known[key].route)

    def _end(self, key: Key) -> None:
        """Stop computing a sequence; reserve its blocks until its gateway knows."""
        self._reserved[key] = self._forget(key)

    def overdue(self, now: float, max_s: float) -> list[Key]:
        """Return sequences whose steps do not return; see ``StepsInFlight``."""
        return self._steps.overdue(now, max_s)

    def excuse(self, now: float) -> None:
        """Restart the timers of the steps in flight: this process was paused."""
        self._steps.excuse(now)

    @property
    def has_full(self) -> bool:
        """True while some replica receives nothing because it lacks KV blocks."""
        return bool(self._shunned)

    def _update_full(self, now: float) -> None:
        """Forget replicas that have had memory for as long as they were avoided."""
        full = self._full.items()
        self._full = {name: (t, p) for name, (t, p) in full if now < t + p}
        self._shunned = {name for name, (until, _) in self._full.items() if now < until}

    def next_step(self, now: float = 0.0) -> PlannedStep | None:
        self._update_full(now)
        if len(self._steps) >= self.steps:
            return None
        self._planned.clear()
        self._shrink()
        parts: list[StepPart] = []
        if self._was_alone and len(self._steps):
            return None  # a suspect runs alone
        suspects = self._ready_suspects()
        # Steps of suspects and of the others take turns.
        is_alone = False
        if suspects and not (self._was_alone and self._plan(parts, now)):
            if len(self._steps):
                return None  # a suspect must run alone
            is_alone = any(self._plan_chunk(parts, one) for one in suspects)
        if not parts and not self._plan(parts, now):
            return None
        self._was_alone = is_alone
        preempted, self._preempted = tuple(self._preempted), []
        number = self._steps.begin(parts, cost_of(sum(map(self._rows, parts))))
        return PlannedStep(number, tuple(parts), preempted, is_alone=is_alone)

    def _rows(self, part: StepPart) -> float:
        """Return the cost of a part, in rows."""
        sample_rows = self._known[part.key].sample_rows if part.samples else 0.0
        return rows_of(part.count, part.begin) + sample_rows

    def _plan(self, parts: list[StepPart], now: float) -> bool:
        """Add parts of sequences that are not suspects; return whether any exist."""
        self._admit_higher_priorities()
        max_tokens = self.limits.max_num_batched_tokens
        self._plan_probes(parts)
        demands = self._demands()
        is_shared = self._has_others(demands, now)
        if len(demands) > 1:
            is_limited = self.limits.is_prefill_chunked
            budget = StepBudget(
                demands, self._steps.cost, max_tokens, is_limited=is_limited
            )
            ready = {s.share for s in (*self._ready(), *self._heads())}
            rows = max(map(budget.left, ready), default=0)
            if len(self._steps) and rows < STEP_ROWS:
                return bool(parts)  # more would cost more than it computes
            self._share(parts, budget)
            return bool(parts)
        flying = self._steps.cost - STEP_ROWS * len(self._steps)
        self._decode(parts, SHARED_TOKENS - flying if is_shared else math.inf)
        left = max_tokens - sum(part.count for part in parts)
        self._prefill(parts, min(left, self._prompt_tokens(is_shared=is_shared)))
        return bool(parts)

    def _demands(self) -> dict[Share, float]:
        max_tokens = self.limits.max_num_batched_tokens
        found: dict[Share, float] = {**self._queue.tokens(max_tokens)}
        for sequence in self._running.values():
            if not sequence.is_paused and not sequence.is_suspect:
                rows = max(1, sequence.lacking)
                cost = rows_of(rows, sequence.computed) + sequence.sample_rows
                found[sequence.share] = found.get(sequence.share, 0.0) + cost
        return found

    def _has_others(self, demands: Iterable[Share], now: float) -> bool:
        self._seen.update((share.tenant, now) for share in demands)
        if len(self._seen) > 1:
            since = now - SHARED_S
            self._seen = {name: at for name, at in self._seen.items() if at >= since}
        return len(self._seen) > 1

    def _heads(self) -> Iterator[ScheduledSequence]:
        return self._queue.heads(self._shunned)

    def _shrink(self) -> None:
        """Preempt until the withheld blocks are free."""
        while self._free < self.withheld and len(self._running) > 1:
            victim = _last_of(self._idle())
            if victim is None:
                return
            self._preempt(victim)

    def _ready_suspects(self) -> list[ScheduledSequence]:
        """Return the suspects, least recently computed first."""
        found = [s for s in self._suspects.values() if not s.is_paused]
        return sorted(found, key=lambda s: (s.last_step, s.number))

    def _admit_higher_priorities(self) -> None:
        lowest = min((s.share.priority for s in self._running.values()), default=0)
        for sequence in sorted(self._queue.above(lowest), key=self._rank):
            if not self._admit(sequence):
                return

    def _plan_probes(self, parts: list[StepPart]) -> None:
        """Plan probes before all others, which cannot be preempted once planned."""
        for probe in (*self._ready(is_probe=True), *self._queue.probes()):
            self._plan_chunk(parts, probe)

    def _plan_chunk(self, parts: list[StepPart], sequence: ScheduledSequence) -> bool:
        """Add as much of a sequence as the step holds; return whether there is room."""
        if sequence.number not in self._running and not self._admit(sequence):
            return False
        left = self.limits.max_num_batched_tokens - sum(part.count for part in parts)
        count = self._chunk(sequence, left, is_alone=not parts)
        if not count or not self._has_room(sequence, count):
            return False
        parts.append(self._take(sequence, count))
        return True

    # A step of several tenants.

    def _share(self, parts: list[StepPart], budget: StepBudget) -> None:
        """Fill the step with rows of all tenants, the least served one first.

        A tenant with only a few next tokens to compute is in every step: a newcomer's
        prompt does not delay it.
        """
        ready: dict[Share, list[ScheduledSequence]] = {}
        for sequence in self._ready():
            ready.setdefault(sequence.share, []).append(sequence)
        for those in ready.values():
            # Tokens are taken from the end: next ones first, then prompts in order.
            those.sort(key=lambda s: (s.lacking > 1, s.last_step, s.number))
            those.reverse()
        for share, those in ready.items():
            few = [s for s in those if s.lacking == 1]
            max_rows = budget.left(share) * share.weight / budget.weights
            for sequence in (
                few if len(few) <= min(STEP_ROWS, max(1.0, max_rows)) else ()
            ):
                if budget.is_spent:
                    break
                if sequence.number in self._running and self._has_room(sequence, 1):
                    parts.append(part := self._take(sequence, 1))
                    budget.take(1, self._rows(part))
            ready[share] = [s for s in those if not s.is_in_flight]
        is_open = True
        had = {self._known[part.key].share for part in parts}
        while not budget.is_spent:
            for those in ready.values():
                while those and those[-1].number not in self._running:
                    those.pop()  # it was preempted
            found = [those[-1] for those in ready.values() if those]
            heads = self._heads() if is_open else ()
            behind = {s.share for s in found if s.lacking <= 1}
            found += [s for s in heads if s.share not in behind]
            # Each tenant gets at least one row.
            found = [s for s in found if budget.left(s.share) or s.share not in had]
            head = min(found, key=self._rank, default=None)
            if head is None:
                return
            sequence = head
            rows = max(budget.left(sequence.share), int(sequence.share not in had))
            had.add(sequence.share)
            if sequence.number in self._running:
                ready[sequence.share].pop()
            elif not self._chunk(sequence, rows, is_alone=not parts):
                is_open = False
                continue
            elif not self._admit(sequence):
                is_open = False  # later ones would overtake it repeatedly
                continue
            count = self._chunk(sequence, rows, is_alone=not parts)
            is_left = sequence.number in self._running  # it was not preempted
            if is_left and count and self._has_room(sequence, count):
                parts.append(part := self._take(sequence, count))
                budget.take(count, self._rows(part))

    def _ready(self, *, is_probe: bool = False) -> list[ScheduledSequence]:
        """Return what runs and can be computed now: the probes, or all others."""
        return [
            s
            for s in self._running.values()
            if s.is_probe == is_probe
            and s.lacking
            and not (s.is_in_flight or s.is_paused or s.is_suspect)
        ]

    # A step of one tenant.

    def _decode(self, parts: list[StepPart], budget: float) -> None:
        """Add the next token of each running sequence that is ready, up to a share.

        ``budget`` is in rows without context.

        Fewer than a share wait until others return. There is no waiting during a KV
        rebuild: steps run all the time, and a few more rows cost little.
        """
        decoding = [
            s
            for s in self._running.values()
            if s.lacking <= 1 and not (s.is_paused or s.is_suspect or s.is_probe)
        ]
        if not decoding or budget <= 0:
            return
        groups = min(self.steps, max(1, round(len(decoding) / ROWS)))
        max_rows = math.ceil(len(decoding) / groups)
        each = sum(rows_of(1, s.computed) for s in decoding) / len(decoding)
        fits = max(1.0, min(budget / each, self.limits.max_num_batched_tokens))
        max_rows = min(max_rows, int(fits))
        ready = sum(not s.is_in_flight for s in decoding)
        if ready < min(max_rows, len(decoding)) and not self._is_rebuilding:
            return  # the others are in flight
        for sequence in by_route([s for s in decoding if not s.is_in_flight]):
            if len(parts) >= max_rows:
                return
            if sequence.number not in self._running:
                continue  # it was preempted for an earlier one
            if sequence.lacking == 1 and self._has_room(sequence, 1):
                parts.append(self._take(sequence, 1))

    def _prompt_tokens(self, *, is_shared: bool) -> int:
        """Return the maximum number of prefill tokens in the next step.

        All steps in flight together have as many as one may have: running sequences
        wait for no more, and a prompt is computed in several stages at once. If no
        sequence waits for them and there is more to compute, each step is full.
        Sequences whose KV blocks were just rebuilt wait for those still being rebuilt.
        """
        max_tokens = self.limits.max_num_batched_tokens
        if not self.limits.is_prefill_chunked:
            return max_tokens
        if is_shared:
            max_tokens = min(max_tokens, SHARED_TOKENS)
        if self.steps == 1:
            return max_tokens
        if not self._is_rebuilding:
            for sequence in self._rebuilt.values():
                sequence.rebuild = 0
            self._rebuilt.clear()
        running = self._running.values()
        waited_for = any(s.lacking <= 1 and not s.rebuild for s in running)
        lacking = [s for s in running if s.lacking > 1]
        tokens = sum(len(s.tokens) for s in lacking)
        tokens += sum(self._queue.tokens(max_tokens).values())
        if (
            not waited_for
            and not is_shared
            and (tokens > max_tokens or self._is_rebuilding)
        ):
            return max_tokens
        return max(MIN_CHUNK, math.ceil(min(tokens, max_tokens) / self.steps))

    def _prefill(self, parts: list[StepPart], budget: int) -> None:
        """Fill the step with prefill chunks, in order of arrival."""
        running = [s for s in self._ready() if s.lacking > 1]
        is_open = True
        while budget > 0:
            heads = self._heads() if is_open else ()
            sequence = min((*running, *heads), key=self._rank, default=None)
            if sequence is None:
                return
            if sequence in running:
                running.remove(sequence)  # it may have been preempted meanwhile
            else:
                fits = self._chunk(sequence, budget, is_alone=not parts) > 0
                if not fits or not self._admit(sequence):
                    is_open = False  # later ones would overtake it repeatedly
                    continue
            count = self._chunk(sequence, budget, is_alone=not parts)
            is_left = sequence.number in self._running
            if is_left and count and self._has_room(sequence, count):
                parts.append(self._take(sequence, count))
                budget -= count

    def _rank(self, sequence: ScheduledSequence) -> tuple[int, float, int]:
        priority, served = self._shares.rank(sequence.share)
        return priority, served, sequence.number

    def _admit(self, sequence: ScheduledSequence) -> bool:
        """Run a sequence if there is room for all of it; return whether there is."""
        victims = self._victims_for(sequence)
        if victims is None:
            return False
        for victim in victims:
            self._preempt(victim)
        self._run(sequence)
        return True

    def _victims_for(
        self, newcomer: ScheduledSequence
    ) -> list[ScheduledSequence] | None:
        """Return the sequences to preempt for a waiting one; None: it cannot run."""
        if newcomer.waits_for(self._shunned):
            return None
        needed = self.blocks_of(len(newcomer.tokens) + 1)
        found: list[ScheduledSequence] = []
        use, idle = self._use.copy(), self._idle()
        while not self._fits(newcomer, found):
            if newcomer.is_probe:
                victim = self._victim_for_probe(newcomer, found)
            else:
                victim = _victim_for(newcomer, needed, use, idle)
            if victim is None:
                return None
            if victim in idle:
                idle.remove(victim)
            found.append(victim)
            use.add(victim.share, slots=-1, blocks=-victim.blocks)
        return found

    def _fits(
        self, sequence: ScheduledSequence, gone: Sequence[ScheduledSequence] = ()
    ) -> bool:
        """Return whether a sequence may run, once those in ``gone`` are preempted."""
        if sequence.waits_for(self._shunned):
            return False
        # All of it must fit, or it would preempt what came before.
        needed = self.blocks_of(len(sequence.tokens) + 1)
        room = self._room(sequence, is_only=len(gone) == len(self._running))
        has_slot = sequence.is_probe or self._slots + len(gone) > 0
        return has_slot and needed <= room + sum(s.blocks for s in gone)

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
        sequence.is_in_flight = samples
        sequence.last_step = self._steps.last_number + 1
        self._planned.add(sequence.key)
        self._shares.charge(sequence.share, count + samples * sequence.sample_rows)
        return StepPart(sequence.key, begin, count, samples)

    # Blocks.

    def blocks_of(self, tokens: int) -> int:
        return self.limits.blocks_of(tokens, self.granule)

    def _has_room(self, sequence: ScheduledSequence, count: int) -> bool:
        """Allocate blocks for ``count`` more tokens, preempting others if necessary."""
        needed = self.blocks_of(sequence.computed + count) - sequence.blocks
        while needed > self._room(sequence, is_only=len(self._running) == 1):
            if sequence.is_probe:
                victim = self._victim_for_probe(sequence)
            else:
                victim = self._use.last(sequence, self._idle())
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        self._free -= needed
        sequence.blocks += needed
        self._use.add(sequence.share, blocks=needed)
        return True

    def _room(self, sequence: ScheduledSequence, *, is_only: bool) -> int:
        """Return the free blocks for a sequence; more if no other one runs."""
        may_use_all = is_only or sequence.is_probe
        return self._free if may_use_all else self._free - self.withheld

    def _idle(self) -> list[ScheduledSequence]:
        """Return the running sequences that may be preempted for any other."""
        found = self._unplanned()
        return [s for s in found if not (s.is_paused or s.is_probe)]

    def _unplanned(self) -> list[ScheduledSequence]:
        return [
            s
            for s in self._running.values()
            if s.key not in self._planned and s.key not in self._steps
        ]

    def _victim_for_probe(
        self, probe: ScheduledSequence, gone: Collection[ScheduledSequence] = ()
    ) -> ScheduledSequence | None:
        """Return the sequence to preempt for a probe: an idle, paused or later one.

        Paused sequences may wait for the very replica that the probe makes ready.
        """
        found = [s for s in self._unplanned() if s not in gone]
        for those in (
            [s for s in found if not (s.is_paused or s.is_probe)],
            [s for s in found if s.is_paused and not s.is_probe],
            [s for s in found if s.is_probe and s.number > probe.number],
        ):
            if those:
                return _last_of(those)
        return None

    def _preempt(self, sequence: ScheduledSequence) -> None:
        self.preemptions += 1
        self._free += self._leave(sequence)
        sequence.computed = sequence.rebuild = 0
        self._rebuilt.pop(sequence.number, None)
        self._preempted.append(sequence.key)
        self._wait(sequence)

    # State.

    @property
    def _is_rebuilding(self) -> bool:
        """True while a sequence lacks tokens here that the other stages have."""
        lacking = (s for s in self._rebuilt.values() if s.computed < s.rebuild)
        return any(
            not s.is_paused and (s.number in self._running or self._fits(s))
            for s in lacking
        )

    @property
    def _slots(self) -> int:
        taken = len(self._running) + len(self._reserved)
        return self.limits.max_num_seqs - taken

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._known) - len(self._running)

    @property
    def used_blocks(self) -> int:
        return self.limits.blocks - self._free

    @property
    def usage(self) -> float:
        """Share of its blocks that are in use, from 0 to 1."""
        return min(1.0, self.used_blocks / (self.limits.blocks - self.withheld))

    @property
    def is_idle(self) -> bool:
        return not self._known

    def tokens(self, key: Key) -> list[int]:
        return self._known[key].tokens


def _last_of(sequences: Iterable[ScheduledSequence]) -> ScheduledSequence | None:
    """Return the latest sequence of the lowest priority."""
    return max(sequences, key=lambda s: (-s.share.priority, s.number), default=None)


def _victim_for(
    newcomer: ScheduledSequence,
    blocks: int,
    use: TenantUse,
    idle: list[ScheduledSequence],
) -> ScheduledSequence | None:
    below = _last_of(s for s in idle if s.share.priority < newcomer.share.priority)
    if below is not None:
        return below
    level = [s for s in idle if s.share.priority == newcomer.share.priority]
    return use.victim_for(newcomer, blocks, level)
