"""Autoscaling policy of models that generate text, based on tokens. Pure.

1. Learn the duration of a step of each stage (``step_costs``), and the mean length of
   prompts and completions.
2. Estimate the demand, now and when a new replica would be ready (``demand``), and the
   number of concurrent sequences (Little's law).
3. Find the smallest fleet that meets three conditions: a round of the pipeline (one
   token for each sequence) takes at most ``tpot_ms``, a prompt is computed within
   ``ttft_ms``, and the KV blocks suffice.
4. Apply the stabilization windows.

Until the durations are known, the queue length alone decides, as in Ray Serve.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from multiworld.serve.controller.scaling import rules
from multiworld.serve.controller.scaling.demand import demand_of, envelope, sample_at
from multiworld.serve.controller.scaling.snapshot import (
    Decision,
    Sample,
    Snapshot,
    TextObjectives,
)
from multiworld.serve.controller.scaling.stabilization import PendingChange
from multiworld.serve.controller.scaling.step_costs import (
    StepCost,
    StepSums,
    measured,
    prompt_seconds,
)
from multiworld.serve.replica.scheduling.step_planner import ROWS

BUSY = 0.85  # maximum planned utilization of a stage

KV_SHARE = 0.9  # maximum planned share of the KV blocks
MIN_TOKENS = 100  # minimum recent output tokens before a measured round counts

# Limits of the correction factor: the measured round as a multiple of the predicted
# one. They are narrow, because sequences that still wait for their first token make
# rounds look slow.
MAX_FACTOR = 1.5
MIN_FACTOR = 0.85

MIN_COMPLETIONS = 5  # minimum finished sequences before their mean length counts

# OVERLAP: share of the prefill time that delays a round whose steps run one after the
# other. SPLIT_COST: slowdown of a round of several steps, or of stages with different
# numbers of replicas, because its steps wait for each other. Both are fitted to the
# simulation.
OVERLAP, SPLIT_COST = 0.75, 1.4

SETTLING = 50  # maximum iterations until the number of sequences converges
# Maximum time of a round if ``tpot_ms`` is not set, as a multiple of the time of a
# round with a single sequence.
GUESSED_ROUND = 4.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean tokens of a sequence's prompt and output."""

    prompt: float
    answer: float


@dataclass(frozen=True, slots=True)
class Load:
    """Work that a fleet has to carry."""

    rate: float  # requests per second
    burst: float  # requests per second in the worst recent burst
    sequences: float  # sequences that run now; longer rounds cause more of them
    lengths: Lengths
    factor: float = 1.0  # measured round, as a multiple of the predicted one
    # Additional prompts per second, to clear the waiting ones soon.
    backlog: float = 0.0

    def times(self, factor: float) -> Load:
        rate, burst, sequences = self.rate, self.burst, self.sequences
        return replace(
            self, rate=rate * factor, burst=burst * factor, sequences=sequences * factor
        )


@dataclass(frozen=True, slots=True)
class TokenState:
    sums: tuple[StepSums, ...] = ()
    lengths: Lengths | None = None
    factor: float = 1.0
    pending: tuple[tuple[PendingChange, ...], ...] = ()


def decide(snapshot: Snapshot) -> Decision:
    """Return the replicas of each stage; at least one stage must have limits."""
    old = snapshot.memory if isinstance(snapshot.memory, TokenState) else TokenState()
    sums = measured(snapshot, old.sums)
    lengths = _lengths(snapshot.samples, old.lengths)
    costs = [each.cost() for each in sums]
    known = [cost for cost in costs if cost is not None]
    needs, why = _queue_needs(snapshot)
    is_urgent, factor = False, old.factor
    if len(known) == len(costs) and lengths is not None:
        factor = _factor(snapshot, known, lengths, factor)
        needs, why = _token_needs(snapshot, known, lengths, factor)
        before, last = snapshot.samples[-2:][0], snapshot.samples[-1]
        is_urgent = last.missed > before.missed
    replicas, pending = rules.settled(snapshot, needs, old.pending, is_urgent=is_urgent)
    now = [stage.replicas for stage in snapshot.stages]
    text = why if replicas == now else f"{now} → {replicas}: {why}"
    return Decision(
        replicas=tuple(replicas),
        why=text,
        facts={
            "needs": [list(need) for need in needs],
            "step_s": [None if c is None else c.step_s for c in costs],
            "row_s": [None if c is None else c.row_s for c in costs],
            "prompt": None if lengths is None else lengths.prompt,
            "factor": factor,
            "answer": None if lengths is None else lengths.answer,
            "ongoing": [seen.ongoing for seen in snapshot.samples[-1].stages],
        },
        memory=TokenState(sums, lengths, factor, pending),
    )


# Measurements.


def _lengths(samples: Sequence[Sample], before: Lengths | None) -> Lengths | None:
    first, last = samples[0], samples[-1]
    ended = last.completions - first.completions
    if ended < MIN_COMPLETIONS:
        return before
    return Lengths(
        (last.prompt_tokens - first.prompt_tokens) / ended,
        (last.generated_tokens - first.generated_tokens) / ended,
    )


def _factor(
    snapshot: Snapshot, costs: Sequence[StepCost], lengths: Lengths, before: float
) -> float:
    """Return the measured round as a multiple of the predicted one."""
    begin = snapshot.now - rules.look_back_s(snapshot)
    lately = [sample for sample in snapshot.samples if sample.at >= begin - 1e-9]
    first, last = lately[0], lately[-1]
    tokens, seconds = last.tokens - first.tokens, last.at - first.at
    sequences = statistics.fmean(s.stages[-1].ongoing for s in lately)
    if tokens < MIN_TOKENS or seconds <= 0 or sequences <= 0:
        return before
    rate = (last.arrived - first.arrived) / seconds
    load = Load(rate, rate, sequences, lengths)
    ready = [max(1, seen.ready) for seen in last.stages]
    wanted_s = _round_with(sequences, ready, costs, load)
    if math.isinf(wanted_s):
        return before
    found = min(MAX_FACTOR, max(MIN_FACTOR, sequences * seconds / tokens / wanted_s))
    step = min(1.0, snapshot.interval_s / rules.look_back_s(snapshot))
    return before + step * (found - before)


def _queue_needs(snapshot: Snapshot) -> tuple[list[tuple[int, int]], str]:
    period_s = rules.look_back_s(snapshot)
    minimum = int(not rules.is_idle(snapshot, 0.0))
    found = [
        max(minimum, rules.for_queue(snapshot.samples, k, stage, period_s))
        for k, stage in enumerate(snapshot.stages)
    ]
    why = "by queued sequences (times of steps are not known yet)"
    return [(count, count) for count in found], why


# Needs.


def _token_needs(
    snapshot: Snapshot, costs: Sequence[StepCost], lengths: Lengths, factor: float
) -> tuple[list[tuple[int, int]], str]:
    text = snapshot.text or TextObjectives()
    period_s = rules.look_back_s(snapshot)
    demand = demand_of(
        snapshot.samples, period_s, snapshot.start_s, snapshot.interval_s
    )
    if rules.is_idle(snapshot, demand.rate):
        return [(0, 0) for _ in costs], "idle"
    ttft_s = text.ttft_s or period_s
    ongoing = max(seen.ongoing for seen in snapshot.samples[-1].stages)
    begin = sample_at(snapshot.samples, snapshot.now - period_s)
    arrived = snapshot.samples[-1].arrived - begin.arrived
    # ``usual``: sequences that would run if every round took as long as allowed. If
    # there are more, some are waiting.
    usual = arrived / period_s * lengths.answer * longest_round_s(text, costs)
    load = Load(
        rate=demand.expected,
        burst=envelope(snapshot.samples, period_s, ttft_s) if arrived > 1 else 0.0,
        sequences=ongoing,
        lengths=lengths,
        factor=factor,
        backlog=max(0.0, ongoing - usual) / (2 * ttft_s),
    )
    low = fleet(snapshot, costs, load, text)
    high = fleet(snapshot, costs, load.times(rules.MARGIN), text)
    why = (
        f"{demand.rate:.2f} sequences/s of {lengths.prompt:.0f} + {lengths.answer:.0f} "
        f"tokens, {ongoing:.0f} at once; a round with {list(low)} takes "
        f"{1000 * round_of(low, costs, load):.0f} ms"
    )
    return list(zip(low, high, strict=True)), why


def longest_round_s(text: TextObjectives, costs: Sequence[StepCost]) -> float:
    alone_s = sum(cost.seconds(1) for cost in costs)
    if text.tpot_s is None:
        return GUESSED_ROUND * alone_s
    # No number of replicas makes a round shorter than ``alone_s``.
    return max(text.tpot_s, 1.05 * alone_s)


def fleet(
    snapshot: Snapshot, costs: Sequence[StepCost], load: Load, text: TextObjectives
) -> tuple[int, ...]:
    """Return the smallest fleet that meets the objectives, or else the largest."""
    limits = [rules.limits_now(stage) for stage in snapshot.stages]
    minimum = max(
        _for_memory(snapshot, load), math.ceil(load.sequences / text.max_num_seqs)
    )
    longest_s = BUSY * longest_round_s(text, costs)
    lowest = [max(1, limit.within(1)) for limit in limits]
    lowest[0] = max(lowest[0], limits[0].within(minimum))

    def is_enough(counts: Sequence[int]) -> bool:
        is_quick = round_of(counts, costs, load) <= longest_s
        return is_quick and _is_first_in_time(counts, costs, load, text)

    largest = max(limit.max_replicas for limit in limits)
    # All stages grow together and are then trimmed: stages of different sizes split
    # steps, which costs time, so an even fleet is often better than a smaller one.
    counts = list(lowest)
    for size in range(1, largest + 1):
        counts = [
            max(low, limit.within(size))
            for low, limit in zip(lowest, limits, strict=True)
        ]
        if is_enough(counts):
            return tuple(_trimmed(counts, lowest, is_enough))
    return tuple(counts)


def _trimmed(
    counts: list[int], lowest: Sequence[int], is_enough: Callable[[list[int]], bool]
) -> list[int]:
    for k in range(len(counts)):
        while counts[k] > lowest[k]:
            fewer = [count - (number == k) for number, count in enumerate(counts)]
            if not is_enough(fewer):
                break
            counts = fewer
    return counts


def round_of(counts: Sequence[int], costs: Sequence[StepCost], load: Load) -> float:
    """Return the seconds of a round; infinite if the fleet does not carry the load."""
    # The number of sequences follows from the round (Little's law: a sequence lives for
    # one round per token), and the round from their number: iterate until both agree.
    sequences = load.sequences
    for _ in range(SETTLING):
        found = load.factor * _round_with(sequences, counts, costs, load)
        grown = max(load.sequences, load.rate * load.lengths.answer * found)
        if math.isinf(found) or abs(grown - sequences) <= 0.002 * sequences:
            return found
        sequences = grown
    return math.inf


def _round_with(
    number: float, counts: Sequence[int], costs: Sequence[StepCost], load: Load
) -> float:
    """Return the seconds of a round with ``number`` running sequences."""
    # Each replica computes a token of each of its sequences and its share of prompts.
    # Few sequences pass the stages one by one; many are split into as many steps as
    # there are stages. If a stage has fewer replicas than stage 0, each of them serves
    # several replicas of stage 0.
    prompts = (load.rate + load.backlog) * load.lengths.prompt
    groups = min(len(counts), max(1.0, number / counts[0] / ROWS))
    fixed, shares = [], []
    for cost, count in zip(costs, counts, strict=True):
        steps = groups * max(1.0, counts[0] / count)
        fixed.append(steps * cost.step_s + cost.row_s * max(1.0, number / count))
        shares.append(cost.row_s * prompts / count)
    in_turn = OVERLAP * sum(shares) / groups
    if max(*shares, in_turn) >= BUSY:
        return math.inf
    latency_s = sum(fixed) / groups / (1 - in_turn)
    slowest_s = max(f / (1 - s) for f, s in zip(fixed, shares, strict=True))
    is_split = groups > 1 or len(set(counts)) > 1
    return (SPLIT_COST if is_split else 1.0) * max(latency_s, slowest_s)


def _is_first_in_time(
    counts: Sequence[int], costs: Sequence[StepCost], load: Load, text: TextObjectives
) -> bool:
    """Return whether first tokens are in time, as far as replicas affect that."""
    if text.ttft_s is None:
        return True
    prompt = load.lengths.prompt
    alone_s = prompt_seconds(prompt, costs, text.step_tokens)
    left_s = max(text.ttft_s - alone_s, text.ttft_s / 4)
    running, round_s = load.sequences, round_of(counts, costs, load)
    for cost, count in zip(costs, counts, strict=True):
        # Running sequences take ``share`` of the stage's time; the prompts of a burst
        # must fit into the rest.
        rounds = cost.step_s + cost.row_s * running / count
        share = rounds / max(rounds, round_s)
        work_s = load.burst * prompt * cost.row_s / count * (text.ttft_s + left_s)
        if work_s > max(0.1, 1 - min(share, 0.9)) * (text.ttft_s + left_s):
            return False
        ahead = load.rate * prompt * cost.row_s / count
        wait_s = ahead / max(1e-3, 1 - ahead) * prompt * cost.row_s / 2
        if wait_s > left_s:
            return False
    return True


def _for_memory(snapshot: Snapshot, load: Load) -> int:
    """Return the replicas of stage 0 needed for its KV blocks."""
    last = snapshot.samples[-1]
    seen = last.stages[0]
    if not seen.ongoing or not seen.ready:
        return 1
    more = load.sequences / seen.ongoing
    return math.ceil(seen.ready * last.kv_usage * more / KV_SHARE - 1e-9)
