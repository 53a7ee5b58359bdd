"""What tenants have used: counted at a gateway, told to the controller. Pure.

Every minute of a tenant and a model is one row of sums. What was told is kept, and told
again, until the controller says that it is written down: neither a controller that is
lost nor a disk that was full for a while loses any of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import NamedTuple

MINUTE_S = 60

MOST_TOLD = 16
"""Batches that nobody has confirmed before no other is made."""

AGAIN_S = 5.0
"""What is not confirmed in so long is told again."""


@dataclass(slots=True)
class UsageTotals:
    """What was used in a minute.

    Attributes:
        seconds: How long the answered requests took, together.
    """

    requests: int = 0
    answered: int = 0
    failed: int = 0
    refused: int = 0
    rows: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0


FIELDS = tuple(field.name for field in fields(UsageTotals))
"""Of a row, in order."""


class UsageRow(NamedTuple):
    """What a tenant used of a model in one minute (seconds since the epoch)."""

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


@dataclass(slots=True)
class _Told:
    rows: tuple[UsageRow, ...]
    at: float


class UsageMeter:
    """The usage at one gateway that is not written down yet."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, str], UsageTotals] = {}
        self._told: OrderedDict[int, _Told] = OrderedDict()
        self._number = 0

    def at(self, tenant: str, model: str, wall_s: float) -> UsageTotals:
        """Return the sums of this minute, to add to."""
        minute = int(wall_s) // MINUTE_S * MINUTE_S
        return self._open.setdefault((minute, tenant, model), UsageTotals())

    def tell(self, now: float) -> list[tuple[int, tuple[UsageRow, ...]]]:
        """Return what is to be told now, each under its number."""
        if self._open and len(self._told) < MOST_TOLD:
            rows = tuple(
                UsageRow(*post, *(getattr(sums, name) for name in FIELDS))
                for post, sums in self._open.items()
            )
            self._open.clear()
            self._number += 1
            self._told[self._number] = _Told(rows, -math.inf)
        due = [(n, t) for n, t in self._told.items() if now - t.at >= AGAIN_S]
        for _, told in due:
            told.at = now
        return [(number, told.rows) for number, told in due]

    @property
    def is_all_told(self) -> bool:
        """Whether nothing is left that is not written down."""
        return not self._told and not self._open

    def tell_again(self) -> None:
        """Tell all that is not confirmed the next time: the controller is a new one."""
        for told in self._told.values():
            told.at = -math.inf

    def confirmed(self, number: int) -> None:
        """Take note that what was told under a number is written down."""
        self._told.pop(number, None)
