"""Usage metering: counts at a gateway, reported to the controller in batches. Pure.

The gateway repeats a batch until the controller confirms that the batch is stored, so
neither the loss of a controller nor a full disk loses usage.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from multiworld.serve.tenants.usage_rows import (
    FIELDS,
    MAX_UNCONFIRMED,
    MINUTE_S,
    UsageRow,
    UsageTotals,
)

RESEND_S = 5.0  # seconds until an unconfirmed batch is sent again


@dataclass(slots=True)
class _Batch:
    rows: tuple[UsageRow, ...]
    at: float


class UsageMeter:
    """Usage at one gateway that the controller has not yet confirmed."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, str], UsageTotals] = {}
        self._unconfirmed: OrderedDict[int, _Batch] = OrderedDict()
        self._number = 0

    def at(self, tenant: str, model: str, wall_s: float) -> UsageTotals:
        """Return the totals of the current minute, to which the caller may add."""
        minute = int(wall_s) // MINUTE_S * MINUTE_S
        return self._open.setdefault((minute, tenant, model), UsageTotals())

    def take_due(self, now: float) -> list[tuple[int, tuple[UsageRow, ...]]]:
        """Return the batches to send now (new and overdue ones), with their numbers."""
        if self._open and len(self._unconfirmed) < MAX_UNCONFIRMED:
            rows = tuple(
                UsageRow(*key, *(getattr(sums, name) for name in FIELDS))
                for key, sums in self._open.items()
            )
            self._open.clear()
            self._number += 1
            self._unconfirmed[self._number] = _Batch(rows, -math.inf)
        due = [(n, t) for n, t in self._unconfirmed.items() if now - t.at >= RESEND_S]
        for _, batch in due:
            batch.at = now
        return [(number, batch.rows) for number, batch in due]

    @property
    def is_all_confirmed(self) -> bool:
        return not self._unconfirmed and not self._open

    def resend_all(self) -> None:
        """Make all unconfirmed batches due, for example for a new controller."""
        for batch in self._unconfirmed.values():
            batch.at = -math.inf

    def confirmed(self, number: int) -> tuple[UsageRow, ...]:
        """Remove a batch that the controller has stored; return its rows."""
        batch = self._unconfirmed.pop(number, None)
        return () if batch is None else batch.rows
