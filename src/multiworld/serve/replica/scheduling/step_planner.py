"""Choice of the tokens that the next step computes. Pure.

Every step computes one token of each running sequence whose previous token is known,
and fills the rest of the token budget with prefill chunks. Up to one step per stage is
in flight, each with an equal part of the running sequences. But a step of one row takes
almost as long as a step of eight, so if there are only a few sequences, they share one
step and wait for each other.

The tenant that has received the fewest tokens is first in a step, and
``tenant_step_limits`` limits how much a step may delay each tenant. A probe is always
in the next step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.replica.scheduling.scheduled_sequence import (
    ScheduledSequence,
    by_route,
)
from multiworld.serve.replica.scheduling.sequence_pool import SequencePool
from multiworld.serve.replica.scheduling.steps_in_flight import StepsInFlight
from multiworld.serve.replica.scheduling.tenant_step_limits import (
    STEP_ROWS,
    StepBudget,
    cost_of,
    rows_of,
)
from multiworld.serve.wire.generation_messages import StepPart

# Minimum tokens of a prefill chunk when a prompt is divided over the pipeline. A step's
# fixed cost equals the cost of about nine tokens, so chunks of 32 take 28 % more time
# in all.
MIN_CHUNK = 32
# Number of sequences in a step below which smaller steps save hardly any time, because
# most of it is spent on reading the weights (SmolLM2 on an EPYC, fp32, one thread: 55
# ms with one row, 99 with eight, 136 with sixteen).
ROWS = 8
# A tenant counts as present until ``SHARED_S`` seconds after its last sequence. While
# several tenants are present, the tokens in flight cost at most about ``SHARED_TOKENS``
# rows, so that a newcomer waits for no more than these. Steps this small take 20 % more
# time in all than full ones.
SHARED_S, SHARED_TOKENS = 60.0, 32


@dataclass(frozen=True, slots=True)
class PlannedStep:
    number: int
    parts: tuple[StepPart, ...]
    is_alone: bool = False  # if True, nothing else may be in flight


class StepPlanner:
    """Plans steps of the sequences in a pool."""

    def __init__(self, pool: SequencePool, steps: StepsInFlight) -> None:
        self._limits, self._pool, self._steps = pool.limits, pool, steps
        self._seen: dict[str, float] = {}
        # Tenants charged for the step that is being planned.
        self._charged: set[Share] = set()
        self._was_alone = False

    def next_step(self, now: float) -> PlannedStep | None:
        """Begin the next step; return None if there is none to compute now."""
        self._pool.full.update(now)
        self._steps.update(now)
        if self._steps.unpassed_count >= self._steps.max_steps:
            return None
        self._pool.planned.clear()
        self._charged.clear()
        self._pool.shrink()
        parts: list[StepPart] = []
        if self._was_alone and len(self._steps):
            return None  # the suspects' step in flight must run alone
        # A step that is passed may take long to return. Suspects wait for it, because
        # they must run alone; other sequences do not.
        is_stuck = len(self._steps) > self._steps.unpassed_count
        suspects = [] if is_stuck else self._ready_suspects()
        # Steps of suspects alternate with steps of other sequences.
        is_alone = False
        if suspects and not (self._was_alone and self._plan(parts, now)):
            if len(self._steps):
                return None  # the suspects must wait, because they run alone
            is_alone = self._plan_suspects(parts, suspects)
        if not parts and not self._plan(parts, now):
            return None
        self._was_alone = is_alone
        number = self._steps.begin(parts, cost_of(sum(map(self._rows, parts))))
        return PlannedStep(number, tuple(parts), is_alone=is_alone)

    def _plan(self, parts: list[StepPart], now: float) -> bool:
        """Add parts of sequences that are not suspects; return whether any exist."""
        self._admit_higher_priorities()
        max_tokens = self._limits.max_num_batched_tokens
        self._plan_probes(parts)
        demands = self._demands()
        is_shared = self._has_others(demands, now)
        if len(demands) > 1:
            budget = StepBudget(demands, self._steps.cost, max_tokens)
            ready = {s.share for s in (*self._ready(), *self._heads())}
            rows = max(map(budget.left, ready), default=0)
            if self._steps.unpassed_count and rows < STEP_ROWS:
                # The fixed cost of the step would exceed the cost of its rows.
                return bool(parts)
            self._share(parts, budget)
            return bool(parts)
        for share in demands:
            self._pool.shares.reach(share)
        flying = self._steps.cost - STEP_ROWS * self._steps.unpassed_count
        # Sequences that decode may always add STEP_ROWS rows, however much is in
        # flight, so that prompts do not delay them.
        decoded = max(STEP_ROWS, SHARED_TOKENS - flying) if is_shared else math.inf
        self._decode(parts, decoded)
        left = max_tokens - sum(part.count for part in parts)
        self._prefill(parts, min(left, self._prompt_tokens(is_shared=is_shared)))
        return bool(parts)

    def _demands(self) -> dict[Share, float]:
        max_tokens = self._limits.max_num_batched_tokens
        found: dict[Share, float] = {**self._pool.queue.tokens(max_tokens)}
        for sequence in self._pool.running.values():
            if not sequence.is_paused and not sequence.is_suspect:
                rows = max(1, sequence.lacking)
                begin = sequence.computed
                cost = rows_of(rows, begin) + sequence.costs.of(
                    begin, rows, samples=True
                )
                found[sequence.share] = found.get(sequence.share, 0.0) + cost
        return found

    def _has_others(self, demands: Iterable[Share], now: float) -> bool:
        for share in demands:
            self._seen.pop(share.tenant, None)
            # Moved to the end of the dict, as the latest.
            self._seen[share.tenant] = now
        while len(self._seen) > 1:
            first = next(iter(self._seen))
            if self._seen[first] >= now - SHARED_S:
                break
            del self._seen[first]
        return len(self._seen) > 1

    def _heads(self) -> Iterator[ScheduledSequence]:
        return self._pool.queue.heads(self._pool.full.names)

    def _ready(self, *, is_probe: bool = False) -> list[ScheduledSequence]:
        """Return the running sequences to compute now: probes, or all others."""
        # Sequences whose next chunk must wait until the passed step returns.
        passed = self._steps.passed()
        return [
            s
            for s in self._pool.running.values()
            if s.is_probe == is_probe
            and s.lacking
            and not (s.is_in_flight or s.is_paused or s.is_suspect)
            and s.key not in passed
        ]

    def _ready_suspects(self) -> list[ScheduledSequence]:
        """Return the suspects that run or may run, least recently computed first."""
        found = [
            s
            for s in self._pool.suspects.values()
            if not s.is_paused and self._pool.may_run(s)
        ]
        return sorted(found, key=lambda s: (s.last_step, s.number))

    def _plan_suspects(
        self, parts: list[StepPart], suspects: Iterable[ScheduledSequence]
    ) -> bool:
        """Plan the first suspect that has room, and its group."""
        group: tuple[str, int] | None = None
        for one in suspects:
            if parts and (group is None or one.group != group):
                continue
            if self._plan_chunk(parts, one):
                group = one.group
        return bool(parts)

    def _admit_higher_priorities(self) -> None:
        lowest = min((s.share.priority for s in self._pool.running.values()), default=0)
        waiting, before = self._pool.queue.above(lowest), len(self._pool.preempted)
        for sequence in heapq.merge(*waiting, key=self._rank):
            if sequence.key in self._pool.preempted[before:]:
                continue  # an iteration of this loop has preempted it
            if not self._pool.admit(sequence):
                return

    def _plan_probes(self, parts: list[StepPart]) -> None:
        """Plan probes first: sequences that are already planned cannot be preempted."""
        for probe in (*self._ready(is_probe=True), *self._pool.queue.probes()):
            self._plan_chunk(parts, probe)

    def _plan_chunk(self, parts: list[StepPart], sequence: ScheduledSequence) -> bool:
        """Add as much of a sequence as the step holds; return whether there is room."""
        if sequence.number not in self._pool.running and not self._pool.admit(sequence):
            return False
        left = self._limits.max_num_batched_tokens - sum(part.count for part in parts)
        return self._add(parts, sequence, left) is not None

    # A step of several tenants.

    def _share(self, parts: list[StepPart], budget: StepBudget) -> None:
        """Fill the step with rows of all tenants, the least served one first."""
        ready: dict[Share, list[ScheduledSequence]] = {}
        for sequence in self._ready():
            ready.setdefault(sequence.share, []).append(sequence)
        for those in ready.values():
            # ``_next_of`` takes from the end of the list: first sequences that decode,
            # then prompts in order.
            those.sort(key=lambda s: (s.lacking > 1, s.last_step, s.number))
            those.reverse()
        # A tenant with few tokens to decode is in every step, so that a newcomer's
        # prompt does not delay it.
        for share, those in ready.items():
            few = [s for s in those if s.lacking == 1]
            max_rows = budget.left(share) * share.weight / budget.weights
            for sequence in (
                few if len(few) <= min(STEP_ROWS, max(1.0, max_rows)) else ()
            ):
                if budget.is_spent:
                    break
                part = self._add(parts, sequence, 1)
                if part is not None:
                    budget.take(1, self._rows(part))
            ready[share] = [s for s in those if not s.is_in_flight]
        is_open = True
        had = {self._pool.known[part.key].share for part in parts}
        contenders = self._contenders(ready, is_open=is_open)
        reached: set[int] = set()
        while contenders and not budget.is_spent:
            rank, share = heapq.heappop(contenders)
            if share.priority not in reached:
                reached.add(share.priority)
                self._pool.shares.reach(share)
            head = self._next_of(share, ready, is_open=is_open)
            left = budget.left(share)
            if head is None or (not left and share in had):
                continue  # the tenant has had its guaranteed row, and has no more left
            preemptions = self._pool.preemptions
            if self._rank(head) == rank:
                rows = max(left, int(share not in had))
                had.add(share)
                if not self._take_next(parts, budget, head, rows, ready):
                    # Do not admit others, because they would overtake this sequence
                    # again and again.
                    is_open = False
                head = self._next_of(share, ready, is_open=is_open)
            if self._pool.preemptions != preemptions:
                contenders = self._contenders(ready, is_open=is_open)
            elif head is not None:
                heapq.heappush(contenders, (self._rank(head), share))

    def _contenders(
        self, ready: dict[Share, list[ScheduledSequence]], *, is_open: bool
    ) -> list[tuple[tuple[int, float, int], Share]]:
        """Return a heap of the tenants, ordered by the rank of their next sequence."""
        shares = {*ready, *(self._pool.queue.shares() if is_open else ())}
        nexts = ((s, self._next_of(s, ready, is_open=is_open)) for s in shares)
        found = [(self._rank(one), share) for share, one in nexts if one is not None]
        heapq.heapify(found)
        return found

    def _next_of(
        self,
        share: Share,
        ready: dict[Share, list[ScheduledSequence]],
        *,
        is_open: bool,
    ) -> ScheduledSequence | None:
        """Return a tenant's next sequence: a ready one, or the first in its queue."""
        those = ready.get(share, [])
        while those and those[-1].number not in self._pool.running:
            those.pop()  # the sequence was preempted
        if not is_open or (those and those[-1].lacking <= 1):
            return those[-1] if those else None
        head = self._pool.queue.head(share, self._pool.full.names)
        found = (*those[-1:], *(() if head is None else (head,)))
        return min(found, key=self._rank, default=None)

    def _take_next(
        self,
        parts: list[StepPart],
        budget: StepBudget,
        sequence: ScheduledSequence,
        rows: int,
        ready: dict[Share, list[ScheduledSequence]],
    ) -> bool:
        """Add at most ``rows`` of a sequence; return False if it must keep waiting."""
        if sequence.number in self._pool.running:
            ready[sequence.share].pop()
        else:
            fits = min(sequence.lacking, rows) > 0
            if not fits or not self._pool.admit(sequence):
                return False
        part = self._add(parts, sequence, rows)
        if part is not None:
            budget.take(part.count, self._rows(part))
        return True

    # A step of one tenant.

    def _decode(self, parts: list[StepPart], budget: float) -> None:
        """Add the next token of ready sequences, up to one step's share of them."""
        # ``budget`` is the maximum cost of the rows, in rows without context.
        late = self._steps.late()
        decoding = [
            s
            for s in self._pool.running.values()
            if s.lacking <= 1
            and not (s.is_paused or s.is_suspect or s.is_probe)
            and not (s.is_in_flight and s.key in late)
        ]
        if not decoding or budget <= 0:
            return
        groups = min(self._steps.max_steps, max(1, round(len(decoding) / ROWS)))
        max_rows = math.ceil(len(decoding) / groups)
        each = sum(rows_of(1, s.computed) for s in decoding) / len(decoding)
        fits = max(1.0, min(budget / each, self._limits.max_num_batched_tokens))
        max_rows = min(max_rows, int(fits))
        ready = sum(not s.is_in_flight for s in decoding)
        # If fewer sequences are ready than one step's share, let them wait until others
        # return. During a KV rebuild they need not wait: steps run anyway, and a few
        # more rows cost little.
        if ready < min(max_rows, len(decoding)) and not self._pool.is_rebuilding:
            return  # wait for the sequences in flight
        for sequence in by_route([s for s in decoding if not s.is_in_flight]):
            if len(parts) >= max_rows:
                return
            if sequence.lacking == 1:
                self._add(parts, sequence, 1)

    def _prompt_tokens(self, *, is_shared: bool) -> int:
        """Return the maximum number of prefill tokens in the next step."""
        # Together, the steps in flight have as many prefill tokens as one full step:
        # running sequences wait for no more than that, and several stages can compute a
        # prompt at the same time. But if no sequence waits for the steps, and one step
        # cannot hold all prompts, each step is full. A sequence whose KV was just
        # rebuilt does not count as waiting: it waits for those still being rebuilt.
        max_tokens = self._limits.max_num_batched_tokens
        if is_shared:
            max_tokens = min(max_tokens, SHARED_TOKENS)
        if self._steps.max_steps == 1:
            return max_tokens
        if not self._pool.is_rebuilding:
            for sequence in self._pool.rebuilt.values():
                sequence.rebuild = 0
            self._pool.rebuilt.clear()
        running = self._pool.running.values()
        waited_for = any(s.lacking <= 1 and not s.rebuild for s in running)
        lacking = [s for s in running if s.lacking > 1]
        tokens = sum(len(s.tokens) for s in lacking)
        tokens += sum(self._pool.queue.tokens(max_tokens).values())
        if (
            not waited_for
            and not is_shared
            and (tokens > max_tokens or self._pool.is_rebuilding)
        ):
            return max_tokens
        return max(
            MIN_CHUNK, math.ceil(min(tokens, max_tokens) / self._steps.max_steps)
        )

    def _prefill(self, parts: list[StepPart], budget: int) -> None:
        """Fill the step with prefill chunks, in order of arrival."""
        running = [s for s in self._ready() if s.lacking > 1]
        # All are of one tenant, so this sorts them by their order of arrival, latest
        # first.
        running.sort(key=self._rank, reverse=True)
        is_open = True
        while budget > 0:
            heads = self._heads() if is_open else ()
            sequence = min((*running[-1:], *heads), key=self._rank, default=None)
            if sequence is None:
                return
            if running and sequence is running[-1]:
                running.pop()  # admitting another sequence may have preempted this one
            else:
                fits = min(sequence.lacking, budget) > 0
                if not fits or not self._pool.admit(sequence):
                    # Do not admit others, because they would overtake this sequence
                    # again and again.
                    is_open = False
                    continue
            part = self._add(parts, sequence, budget)
            if part is not None:
                budget -= part.count

    # Parts of a step.

    def _add(
        self, parts: list[StepPart], sequence: ScheduledSequence, rows: int
    ) -> StepPart | None:
        """Add at most ``rows`` of a sequence that runs; None if it has no room."""
        count = min(sequence.lacking, rows)
        # The sequence may have been preempted for an earlier part of this step.
        is_running = sequence.number in self._pool.running
        if not is_running or not count or not self._pool.has_room(sequence, count):
            return None
        parts.append(part := self._take(sequence, count))
        return part

    def _take(self, sequence: ScheduledSequence, count: int) -> StepPart:
        begin = sequence.computed
        sequence.computed += count
        samples = sequence.lacking == 0
        sequence.is_in_flight = samples
        sequence.last_step = self._steps.last_number + 1
        self._pool.planned.add(sequence.key)
        cost = sequence.costs.of(begin, count, samples=samples)
        share = sequence.share
        if share not in self._charged and not self._pool.queue.has(share):
            # Nothing else of this tenant waits, so the tenant keeps no credit.
            self._pool.shares.lift(share, self._steps.cost + STEP_ROWS)
        self._charged.add(share)
        self._pool.shares.charge(share, count + cost)
        return StepPart(sequence.key, begin, count, samples)

    def _rows(self, part: StepPart) -> float:
        costs = self._pool.known[part.key].costs
        extra = costs.of(part.begin, part.count, samples=part.samples)
        return rows_of(part.count, part.begin) + extra

    def _rank(self, sequence: ScheduledSequence) -> tuple[int, float, int]:
        priority, served = self._pool.shares.rank(sequence.share)
        return priority, served, sequence.number
