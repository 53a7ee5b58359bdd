"""Stabilization windows, which are Ray Serve's delays. Pure.

A stage that has needed more replicas throughout ``upscale_delay_s`` scales up to the
minimum need in that window. A stage that has needed fewer throughout
``downscale_delay_s`` scales down to the maximum need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from multiworld.serve.controller.scaling.snapshot import StageLimits

EPSILON_S = 1e-6  # tolerance for comparing times


@dataclass(frozen=True, slots=True)
class PendingChange:
    """Replicas that one stage needed at one moment."""

    at: float
    low: int  # without the margin: the number to scale up to
    high: int  # with the margin: the number to scale down to


def remember(
    needs: tuple[PendingChange, ...], need: PendingChange, limits: StageLimits
) -> tuple[PendingChange, ...]:
    """Return ``needs``, oldest first, with ``need`` added and expired ones dropped."""
    if len(needs) > 1 and all(
        (w.low, w.high) == (need.low, need.high) for w in needs[-2:]
    ):
        needs = needs[:-1]  # the first and last of equal needs are enough
    longest = max(limits.upscale_delay_s, limits.downscale_delay_s, limits.to_zero_s)
    kept = [w for w in needs if w.at > need.at - longest - EPSILON_S]
    # Keep one older need, to show that the needs cover the whole window.
    older = [w for w in needs if w.at <= need.at - longest - EPSILON_S][-1:]
    return (*older, *kept, need)


def stabilized(
    needs: tuple[PendingChange, ...],
    replicas: int,
    limits: StageLimits,
    *,
    is_urgent: bool,
) -> int:
    """Return the replicas that a stage should have; ``needs`` are oldest first."""
    up = _lasting(needs, 0.0 if is_urgent else limits.upscale_delay_s)
    if up is not None:
        lowest = min(need.low for need in up)
        if replicas == 0 and needs[-1].low:
            lowest = needs[-1].low  # scale up from zero at once
        if lowest > replicas:
            missing = lowest - replicas
            more = math.ceil(limits.upscaling_factor * missing) if replicas else missing
            return min(replicas + more, limits.max_replicas)
    elif replicas == 0 and needs[-1].low:
        return needs[-1].low
    delay_s = limits.to_zero_s if replicas == 1 else limits.downscale_delay_s
    down = _lasting(needs, delay_s)
    if down is None:
        return replicas
    highest = max(need.high for need in down)
    if highest >= replicas:
        return replicas
    # As in Ray Serve, the last replica is drained alone, after its own delay.
    highest = max(highest, 1 if replicas > 1 else 0)
    fewer = max(1, math.floor(limits.downscaling_factor * (replicas - highest)))
    return max(replicas - fewer, limits.min_replicas)


def _lasting(
    needs: tuple[PendingChange, ...], delay_s: float
) -> list[PendingChange] | None:
    begin = needs[-1].at - delay_s
    if needs[0].at > begin + EPSILON_S:
        return None
    return [need for need in needs if need.at >= begin - EPSILON_S]
