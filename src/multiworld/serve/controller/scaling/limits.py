"""Scaling limits and intervals, read from a spec. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace

from multiworld.serve.controller.scaling.snapshot import (
    Decision,
    StageLimits,
    StageNow,
    TextObjectives,
)
from multiworld.serve.spec.schema import ModelSpec, StageSpec


def limits_of(stage: StageSpec) -> StageLimits | None:
    """Return the scaling limits of a stage; None if it is not autoscaled."""
    config = stage.autoscaling_config
    if config is None:
        return None
    options = config.model_dump(exclude={"initial_replicas", "metrics_interval_s"})
    return StageLimits(**options)


def text_of(spec: ModelSpec) -> TextObjectives | None:
    """Return the objectives of a model that generates text; None for others."""
    own = spec.generation
    if own is None:
        return None
    return TextObjectives(
        ttft_s=own.ttft_ms / 1000 if own.ttft_ms else None,
        tpot_s=own.tpot_ms / 1000 if own.tpot_ms else None,
        step_tokens=own.max_num_batched_tokens,
        max_num_seqs=own.max_num_seqs,
    )


def is_scaled(spec: ModelSpec) -> bool:
    return any(stage.autoscaling_config is not None for stage in spec.stages)


def interval_s(spec: ModelSpec) -> float:
    configs = [stage.autoscaling_config for stage in spec.stages]
    return min((c.metrics_interval_s for c in configs if c is not None), default=1.0)


def within(decision: Decision, stages: Sequence[StageNow]) -> Decision:
    """Return a policy's decision, clamped to the limits of the stages."""
    counts = tuple(decision.replicas)
    if len(counts) != len(stages) or any(type(count) is not int for count in counts):
        raise ValueError(
            f"the policy returned replicas={counts!r}; return {len(stages)} whole "
            "numbers, one for each stage"
        )
    replicas = tuple(
        stage.replicas if (limits := stage.limits) is None else limits.within(count)
        for count, stage in zip(counts, stages, strict=True)
    )
    # A policy is a user's code: other types in these fields would reach all readers.
    why, facts = str(decision.why), dict(decision.facts)
    return replace(decision, replicas=replicas, why=why, facts=facts)


def largest_that_fits(
    before: Sequence[int], after: Sequence[int], fits: Callable[[Sequence[int]], bool]
) -> list[int]:
    """Return ``after``, with increases reduced evenly to what fits.

    Where a stage would still have no replica, nothing grows: half a pipeline answers
    nothing, and would take the room of one that could.
    """
    least = [min(one, other) for one, other in zip(before, after, strict=True)]
    counts = least
    growing = [k for k, count in enumerate(after) if count > counts[k]]

    def with_more(more: int) -> list[int]:
        return [
            min(after[k], count + more) if k in growing else count
            for k, count in enumerate(counts)
        ]

    while growing:
        top = max(after[k] - counts[k] for k in growing)
        steps = range(1, top + 1)
        counts = with_more(
            bisect.bisect_left(steps, True, key=lambda more: not fits(with_more(more)))
        )
        for k in list(growing):
            more = [count + (j == k) for j, count in enumerate(counts)]
            if counts[k] < after[k] and fits(more):
                counts = more
            else:
                growing.remove(k)
    if 0 in counts and 0 not in after:
        return least
    return counts


def keep_starting(
    wanted: Sequence[int],
    before: Sequence[int],
    starting: Sequence[int],
    there: Sequence[int],
) -> tuple[int, ...]:
    """Raise ``wanted`` where it would drain a replica that is still starting."""
    # Most of a start's cost is spent before the replica is ready. ``before``, the
    # previous desired number, limits the result; ``there`` is the number of starting
    # and ready replicas.
    return tuple(
        max(want, min(previous, known)) if starts else want
        for want, previous, starts, known in zip(
            wanted, before, starting, there, strict=True
        )
    )


def stages_now(spec: ModelSpec, replicas: Sequence[int]) -> tuple[StageNow, ...]:
    return tuple(
        StageNow(
            name=stage.name or str(k),
            replicas=count,
            limits=limits_of(stage),
            item_s=stage.item_ms / 1000 if stage.item_ms else None,
        )
        for k, (stage, count) in enumerate(zip(spec.stages, replicas, strict=True))
    )
