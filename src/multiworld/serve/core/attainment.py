"""SLO attainment: counts of requests answered in time and late, by model. Pure."""

from __future__ import annotations

from collections import Counter

from multiworld.errors import OverloadedError, ServeError

DEADLINES = (503, 504)
"""Statuses of a missed deadline: no replica was ready, or no answer arrived."""


class Attainment:
    """Counts of requests, by model.

    Attributes:
        arrived: All requests, refused ones included.
        attained: Requests answered within the model's objective; without an objective,
            all answered ones.
        missed: Requests that more replicas would have helped: answered late, given up
            after the objective had passed, or refused by a full queue. Invalid
            requests and failures of the model count as neither attained nor missed.
        refused: Requests refused by a full queue.
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
        """Count a finished request.

        Args:
            model: Name of the model.
            took_s: Seconds from the request to its end.
            objective_s: The model's latency objective in seconds; None: it has none.
            error: Reason why it was not answered; None: it was. An exception other
                than ``ServeError`` means that the caller gave up.
        """
        is_late = objective_s is not None and took_s > objective_s
        self.count(model, error, is_late=is_late)

    def count(self, model: str, error: BaseException | None, *, is_late: bool) -> None:
        """Count a finished request.

        Args:
            model: Name of the model.
            error: See ``ended``.
            is_late: Whether its objective has passed.
        """
        if error is None:
            (self.missed if is_late else self.attained)[model] += 1
        elif isinstance(error, OverloadedError):
            self.missed[model] += 1
            self.refused[model] += 1
        elif not isinstance(error, ServeError) or error.status in DEADLINES:
            self.missed[model] += is_late
