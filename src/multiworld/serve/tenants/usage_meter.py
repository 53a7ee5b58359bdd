"""What tenants have used: counted at a gateway, told to the controller. Pure.

Every minute of a tenant and a model is one row of sums. What was told is kept, and told
again, until the controller says that it is written down: neither a controller that is
lost nor a disk that was full for a while loses any of it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

MINUTE_S = 60

MOST_TOLD = 16
"""Batches that nobody has confirmed before no other is made."""

RESEND_S = 5.0
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

Row = list[Any]
"""Minute (seconds since the epoch), tenant, model, and the sums in order."""


@dataclass(slots=True)
class _Batch:
    rows: list[Row]
    at: float


class UsageMeter:
    """The usage at one gateway that is not written down yet."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, str], UsageTotals] = {}
        self._unconfirmed: OrderedDict[int, _Batch] = OrderedDict()
        self._number = 0

    def at(self, tenant: str, model: str, wall_s: float) -> UsageTotals:
        """Return the sums of this minute, to add to."""
        minute = int(wall_s) // MINUTE_S * MINUTE_S
        return self._open.setdefault((minute, tenant, model), UsageTotals())

    def tell(self, now: float) -> list[tuple[int, list[Row]]]:
        """Return what is to be told now, each under its number."""
        if self._open and len(self._unconfirmed) < MOST_TOLD:
            rows = [
                [*post, *(getattr(sums, name) for name in FIELDS)]
                for post, sums in self._open.items()
            ]
            self._open.clear()
            self._number += 1
            self._unconfirmed[self._number] = _Batch(rows, -math.inf)
        due = [(n, t) for n, t in self._unconfirmed.items() if now - t.at >= RESEND_S]
        for _, batch in due:
            batch.at = now
        return [(number, batch.rows) for number, batch in due]

    @property
    def is_all_told(self) -> bool:
        """Whether nothing is left that is not written down."""
        return not self._unconfirmed and not self._open

    def tell_again(self) -> None:
        """Tell all that is not confirmed the next time: the controller is a new one."""
        for batch in self._unconfirmed.values():
            batch.at = -math.inf

    def confirmed(self, number: int) -> None:
        """Take note that what was told under a number is written down."""
        self._unconfirmed.pop(number, None)
