"""Limits of a step in which several tenants have sequences. Pure.

A tenant with a share of one half completes a step in less than twice the time that it
takes alone, whatever others compute in it and in the steps before it. Its own rows do
not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from multiworld.serve.queueing.fair_queue import Share

# Fixed cost of a step, in rows: reading the weights. SmolLM2 on an EPYC, float32, one
# thread: 55 ms with one row, 99 with eight, 136 with sixteen.
STEP_ROWS = 9.0
# Usable fraction of the cost that a tenant's weight allows others in a step; a newcomer
# also waits for the steps in flight, which were made before it came.
BESIDE = 0.7
# Cost of one token of context of a sequence in a step, in rows, and what each of its
# rows adds to that. SmolLM2 on an EPYC, one thread: 16 rows take 6.6 ms more each with
# 1,024 tokens of context, a part of 64 rows 80 to 105 ms.
CONTEXT_ROWS, CONTEXT_SHARE = 1 / 1024, 0.3


def cost_of(rows: float) -> float:
    return STEP_ROWS + rows


def rows_of(count: int, context: int) -> float:
    """Return the cost of ``count`` rows, in rows without tokens before them."""
    return count + CONTEXT_ROWS * context * (1 + CONTEXT_SHARE * count)


class StepBudget:
    """Rows that each tenant may have in the next step."""

    def __init__(
        self,
        demands: Mapping[Share, float],  # rows in the next step if it were alone
        in_flight: float,  # cost, in rows; stages may share processors
        max_rows: int,
    ) -> None:
        self.weights = sum(share.weight for share in demands)
        first = max((share.priority for share in demands), default=0)
        self._limits = {
            share: cost_of(demand) * (1 + BESIDE * (self.weights / share.weight - 1))
            for share, demand in demands.items()
            if share.priority == first
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
        limits = (self._limits[other] for other in self._tightest if other != share)
        limit = next(limits, math.inf) - self._cost
        return max(0, math.floor(min(self._max_rows - self.rows, limit - self.used)))
