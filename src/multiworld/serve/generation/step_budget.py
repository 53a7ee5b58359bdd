"""Limits of a step beside other tenants' sequences. Pure.

A step costs about as much as ``STEP_ROWS`` rows besides its rows. A tenant with a share
of one half gets a step in at most twice the time that it takes alone, whatever others
compute in it and in the steps before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from multiworld.serve.tenants.fair_queue import Share

STEP_ROWS = 9.0
"""Cost of a step besides its rows, in rows: the reading of the weights (SmolLM2 on an
EPYC, float32, one thread: 55 ms with one row, 99 with eight, 136 with sixteen)."""


def cost_of(rows: float) -> float:
    """Return what a step costs, in rows."""
    return STEP_ROWS + rows


def rows_beside(demands: Mapping[Share, float], in_flight: float, most: int) -> int:
    """Return the maximum number of rows of the next step.

    All steps in flight count: their stages may share processors.

    Args:
        demands: Rows that each tenant would have in the next step, if it were alone.
        in_flight: What the steps in flight cost, in rows.
        most: Maximum number of rows of any step.
    """
    weights = sum(share.weight for share in demands)
    first = max((share.priority for share in demands), default=0)
    limit = min(
        (
            cost_of(demand) * weights / share.weight
            for share, demand in demands.items()
            if share.priority == first
        ),
        default=math.inf,
    )
    return max(0, math.floor(min(most, limit - in_flight - STEP_ROWS)))
