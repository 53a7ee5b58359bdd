"""How many requests of each model came, were in time, and were not. Pure."""

from __future__ import annotations

from collections import Counter

from multiworld.errors import OverloadedError, ServeError

DEADLINES = (503, 504)
"""No replica came until the deadline, or no answer did."""


class Attainment:
    """Counts of requests, by model.

    Attributes:
        arrived: All, those that were refused too.
        attained: Answered within the model's objective; where it has none, answered.
        missed: Answered later, given up after the objective had passed, or refused as
            too many waited: what more replicas would have helped against. What was
            wrong with a request, or with the model, is none of it.
        refused: Refused as too many waited.
    """

    def __init__(self) -> None:
        self.arrived: Counter[str] = Counter()
        self.attained: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def ended(
        self,
        model: str,
        took_s: float,
        objective_s: float | None,
        error: BaseException | None,
    ) -> None:
        """Count one that is over.

        Args:
            error: Why it was not answered; None: it was. What is no ``ServeError`` is
                the end of who asked.
        """
        is_late = objective_s is not None and took_s > objective_s
        if error is None:
            (self.missed if is_late else self.attained)[model] += 1
        elif isinstance(error, OverloadedError):
            self.missed[model] += 1
            self.refused[model] += 1
        elif not isinstance(error, ServeError) or error.status in DEADLINES:
            self.missed[model] += is_late
