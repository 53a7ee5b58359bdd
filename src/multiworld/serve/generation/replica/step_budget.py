"""Limits of a step in which several tenants have sequences. Pure.

A step costs about as much as ``STEP_ROWS`` rows in addition to its rows. A tenant with
a share of one half completes a step in less than twice the time that it takes alone,
whatever others compute in it and in the steps before it. Its own rows do not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from multiworld.serve.tenants.fair_queue import Share

STEP_ROWS = 9.0
"""Fixed cost of a step, in rows: reading the weights. SmolLM2 on an EPYC, float32, one
thread: 55 ms with one row, 99 with eight, 136 with sixteen."""

BESIDE = 0.7
"""Usable fraction of the cost that a tenant's weight allows others in a step; a
newcomer also waits for the steps in flight, which were made before it came."""


CONTEXT_ROWS, CONTEXT_SHARE = 1 / 1024, 0.3
"""Cost of one token of context of a sequence in a step, in rows, and what each of its
rows adds to that. SmolLM2 on an EPYC, one thread: 16 rows take 6.6 ms more each with
1,024 tokens of context, a part of 64 rows 80 to 105 ms."""


def cost_of(rows: float) -> float:
    """Return the cost of a step, in rows."""
    return STEP_ROWS + rows


def rows_of(count: int, context: int) -> float:
    """Return the cost of ``count`` rows of a sequence with ``context`` tokens before.

    It is in rows without any context.
    """
    return count + CONTEXT_ROWS * context * (1 + CONTEXT_SHARE * count)


class StepBudget:
    """Rows that each tenant may have in the next step.

    Args:
        demands: Rows that each tenant would have in the next step if it were alone.
        in_flight: Cost of the steps in flight, in rows; their stages may share
            processors.
        max_rows: Maximum number of rows of any step.
        is_limited: Whether prefill is chunked; otherwise prompts are computed whole.
    """

    def __init__(
        self,
        demands: Mapping[Share, float],
        in_flight: float,
        max_rows: int,
        *,
        is_limited: bool = True,
    ) -> None:
        self.weights = sum(share.weight for share in demands)
        first = max((share.priority for share in demands), default=0)
        self._limits = {
            share: cost_of(demand) * (1 + BESIDE * (self.weights / share.weight - 1))
            for share, demand in demands.items()
            if share.priority == first and is_limited
        }
        # The tightest limit, whose own tenant is bound by the second one.
        self._tightest = sorted(self._limits, key=self._limits.__getitem__)[:2]
        self._cost, self._max_rows = in_flight + STEP_ROWS, max_rows
        self.rows, self.used = 0, 0.0

    def take(self, rows: int, cost: float) -> None:
        """Add rows to the step; ``cost`` is their cost, in rows without context."""
        self.rows += rows
        self.used += cost

    @property
    def is_spent(self) -> bool:
        return self.rows >= self._max_rows

    def left(self, share: Share) -> int:
        """Return the number of rows that a tenant may still have, 0 or more."""
        limits = (self._limits[other] for other in self._tightest if other != share)
        limit = next(limits, math.inf) - self._cost
        return max(0, math.floor(min(self._max_rows - self.rows, limit - self.used)))
