"""Limits of a step in which several tenants have sequences. Pure.

A tenant with a share of one half completes a step in less than twice the time that it
takes alone, whatever other tenants compute in this step and in the steps before it. A
tenant's limit bounds the rows of the other tenants, not its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from multiworld.serve.queueing.fair_queue import Share

# Fixed cost of a step, in rows: it reads the weights. SmolLM2 on an EPYC, float32, one
# thread: 55 ms with one row, 99 with eight, 136 with sixteen.
STEP_ROWS = 9.0
# Usable fraction of the cost that a tenant's weight allows other tenants in a step. The
# rest is for steps in flight that were planned before a newcomer arrived.
BESIDE = 0.7
# Cost in rows of each token of a sequence's context in a step, and the fraction of this
# cost that each row of the sequence adds. SmolLM2 on an EPYC, one thread, with 1,024
# tokens of context: each of 16 rows takes 6.6 ms more, and a part of 64 rows takes 80
# to 105 ms more.
CONTEXT_ROWS, CONTEXT_SHARE = 1 / 1024, 0.3


def cost_of(rows: float) -> float:
    return STEP_ROWS + rows


def rows_of(count: int, context: int) -> float:
    """Return the cost of ``count`` rows after ``context`` tokens."""
    # The unit is the cost of a row without context.
    return count + CONTEXT_ROWS * context * (1 + CONTEXT_SHARE * count)


class StepBudget:
    """Rows that each tenant may have in the next step."""

    def __init__(
        self,
        # Rows of the next step of each tenant if it were the only one.
        demands: Mapping[Share, float],
        in_flight: float,  # cost of the steps in flight, in rows: stages may share CPUs
        max_rows: int,
    ) -> None:
        self.weights = sum(share.weight for share in demands)
        first = max((share.priority for share in demands), default=0)
        self._limits = {
            share: cost_of(demand) * (1 + BESIDE * (self.weights / share.weight - 1))
            for share, demand in demands.items()
            if share.priority == first
        }
        # The tenants with the two tightest limits: the first tenant's limit applies to
        # all others, the second tenant's to the first.
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
        limits = (self._limits[other] for other in self._tightest if other != share)
        limit = next(limits, math.inf) - self._cost
        return max(0, math.floor(min(self._max_rows - self.rows, limit - self.used)))
