"""Usage metering: counts at a gateway, reported to the controller in batches. Pure.

A batch is sent again until the controller confirms that it has stored it, so neither
the loss of a controller nor a full disk loses usage.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import NamedTuple

MINUTE_S = 60  # that one row covers
MAX_UNCONFIRMED = 16  # batches; at this number no new one is made
RESEND_S = 5.0  # until an unconfirmed batch is sent again


@dataclass(slots=True)
class UsageTotals:
    """Usage of one tenant and model in one minute."""

    requests: int = 0  # admitted, and ended
    answered: int = 0  # with status 200
    failed: int = 0
    refused: int = 0  # by a limit, a quarantine or for lack of permission
    rows: int = 0  # of answered requests
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0  # total duration of the answered requests
    prompt_tokens: int = 0
    generated_tokens: int = 0


# Names of the totals in a row, in order.
FIELDS = tuple(field.name for field in fields(UsageTotals))


class UsageRow(NamedTuple):
    """``UsageTotals`` of one tenant and model; ``minute`` is since the epoch."""

    minute: int
    tenant: str
    model: str
    requests: int
    answered: int
    failed: int
    refused: int
    rows: int
    bytes_in: int
    bytes_out: int
    seconds: float
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(slots=True)
class _Batch:
    rows: tuple[UsageRow, ...]
    at: float


class UsageMeter:
    """Usage at one gateway that the controller has not confirmed yet."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, str], UsageTotals] = {}
        self._unconfirmed: OrderedDict[int, _Batch] = OrderedDict()
        self._number = 0

    def at(self, tenant: str, model: str, wall_s: float) -> UsageTotals:
        """Return the totals of the current minute, to add to."""
        minute = int(wall_s) // MINUTE_S * MINUTE_S
        return self._open.setdefault((minute, tenant, model), UsageTotals())

    def take_due(self, now: float) -> list[tuple[int, tuple[UsageRow, ...]]]:
        """Return the batches to send now, new and overdue ones, with their numbers."""
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
        """Make all unconfirmed batches due: there is a new controller."""
        for batch in self._unconfirmed.values():
            batch.at = -math.inf

    def confirmed(self, number: int) -> tuple[UsageRow, ...]:
        """Remove a batch that the controller has stored; return its rows."""
        batch = self._unconfirmed.pop(number, None)
        return () if batch is None else batch.rows
