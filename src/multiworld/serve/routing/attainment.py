"""SLO attainment: counts of requests answered in time and late, by model. Pure."""

from __future__ import annotations

from collections import Counter

from multiworld.errors import OverloadedError, ServeError

# Statuses of a missed deadline: no replica was ready, or no answer arrived.
DEADLINES = (503, 504)


class Attainment:
    """Counts of requests, by model."""

    def __init__(self) -> None:
        self.arrived: Counter[str] = Counter()  # all requests, including refused ones
        # Requests answered within the objective; all answered ones if there is none.
        self.attained: Counter[str] = Counter()
        # Requests that more replicas might have answered in time: answered late, given
        # up after the objective, or refused by a full queue. Invalid requests and
        # failures of the model are neither attained nor missed.
        self.missed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # requests refused by a full queue

    def count(self, model: str, error: BaseException | None, *, is_late: bool) -> None:
        """Count a finished request; if abandoned, ``error`` is not a ``ServeError``."""
        if error is None:
            (self.missed if is_late else self.attained)[model] += 1
        elif isinstance(error, OverloadedError):
            self.missed[model] += 1
            self.refused[model] += 1
        elif not isinstance(error, ServeError) or error.status in DEADLINES:
            self.missed[model] += is_late
