"""When a need is believed: only after it has lasted. Pure.

Ray Serve's delays. More replicas are started when more were needed during the whole of
``upscale_delay_s``: as many as were needed at every moment of it; some are drained
when fewer did during the whole of ``downscale_delay_s``: down to the most that were
needed at any moment of it. So a need that comes and goes changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from multiworld.serve.scaling.snapshot import StageLimits

EPSILON_S = 1e-6


@dataclass(frozen=True, slots=True)
class PendingChange:
    """What one stage was found to need at one moment.

    Attributes:
        low: Of replicas, that are needed; more are started to have them.
        high: Of replicas, with a margin; some are drained only if there are more.
    """

    at: float
    low: int
    high: int


def remember(
    needs: tuple[PendingChange, ...], need: PendingChange, limits: StageLimits
) -> tuple[PendingChange, ...]:
    """Return the wishes that still count, with one more."""
    if len(needs) > 1 and all(
        (w.low, w.high) == (need.low, need.high) for w in needs[-2:]
    ):
        needs = needs[:-1]  # of a run of equal ones its ends say all
    longest = max(limits.upscale_delay_s, limits.downscale_delay_s, limits.to_zero_s)
    kept = [w for w in needs if w.at > need.at - longest - EPSILON_S]
    # One that is older says how far back the others reach.
    older = [w for w in needs if w.at <= need.at - longest - EPSILON_S][-1:]
    return (*older, *kept, need)


def stabilized(
    needs: tuple[PendingChange, ...],
    replicas: int,
    limits: StageLimits,
    *,
    is_urgent: bool,
) -> int:
    """Return how many replicas a stage gets now.

    Args:
        replicas: It has now.
        is_urgent: Nothing is waited for before more are started.
    """
    up = _lasting(needs, 0.0 if is_urgent else limits.upscale_delay_s)
    if up is not None:
        least = min(need.low for need in up)
        if replicas == 0 and needs[-1].low:
            least = needs[-1].low  # somebody waits, and nothing is there
        if least > replicas:
            missing = least - replicas
            more = math.ceil(limits.upscaling_factor * missing) if replicas else missing
            return min(replicas + more, limits.max_replicas)
    elif replicas == 0 and needs[-1].low:
        return needs[-1].low
    delay_s = limits.to_zero_s if replicas == 1 else limits.downscale_delay_s
    down = _lasting(needs, delay_s)
    if down is None:
        return replicas
    most = max(need.high for need in down)
    if most >= replicas:
        return replicas
    # As with Ray Serve, the last one goes by itself: after a delay of its own.
    most = max(most, 1 if replicas > 1 else 0)
    fewer = max(1, math.floor(limits.downscaling_factor * (replicas - most)))
    return max(replicas - fewer, limits.min_replicas)


def _lasting(
    needs: tuple[PendingChange, ...], delay_s: float
) -> list[PendingChange] | None:
    """Return the wishes of the last ``delay_s``; None if they do not reach so far."""
    begin = needs[-1].at - delay_s
    if needs[0].at > begin + EPSILON_S:
        return None
    return [need for need in needs if need.at >= begin - EPSILON_S]
