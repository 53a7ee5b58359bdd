"""What tenants have used: counted at a gateway, told to the controller. Pure.

Every minute of a tenant and a model is one row of sums. What was told is kept until the
controller says that it is written down: a controller that is lost meanwhile loses none.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MINUTE_S = 60

MOST_TOLD = 16
"""Batches that nobody has confirmed before no more is told."""

FIELDS = (
    "requests",
    "answered",
    "failed",
    "refused",
    "rows",
    "bytes_in",
    "bytes_out",
    "seconds",
)
"""Of a row. ``seconds``: how long the answered ones took, together."""


@dataclass(slots=True)
class Sums:
    """What was used in a minute."""

    requests: int = 0
    answered: int = 0
    failed: int = 0
    refused: int = 0
    rows: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0


Row = list[Any]
"""Minute (seconds since the epoch), tenant, model, and the sums in order."""


class Meter:
    """The usage at one gateway that is not written down yet."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, str], Sums] = {}
        self._told: OrderedDict[int, list[Row]] = OrderedDict()
        self._number = 0

    def at(self, tenant: str, model: str, wall_s: float) -> Sums:
        """Return the sums of this minute, to add to."""
        minute = int(wall_s) // MINUTE_S * MINUTE_S
        return self._open.setdefault((minute, tenant, model), Sums())

    def tell(self) -> tuple[int, list[Row]] | None:
        """Return what is new, under a number; None if nothing is."""
        if not self._open or len(self._told) >= MOST_TOLD:
            return None
        rows = [
            [*post, *(getattr(sums, name) for name in FIELDS)]
            for post, sums in self._open.items()
        ]
        self._open.clear()
        self._number += 1
        self._told[self._number] = rows
        return self._number, rows

    def untold(self) -> list[tuple[int, list[Row]]]:
        """Return what was told and is not confirmed, for a controller that is new."""
        return list(self._told.items())

    def confirmed(self, number: int) -> None:
        """Take note that what was told under a number is written down."""
        self._told.pop(number, None)
