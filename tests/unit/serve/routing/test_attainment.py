"""SLO attainment: requests that count as attained, as missed, and as neither."""

from __future__ import annotations

import asyncio

import pytest

from multiworld.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelFailedError,
    NoReplicaError,
    OverloadedError,
    QuarantinedError,
    RequestPoisonedError,
)
from multiworld.serve.routing.attainment import Attainment


@pytest.mark.parametrize(
    ("took_s", "error", "counted"),
    [
        (0.5, None, "attained"),
        (1.5, None, "missed"),
        (0.0, OverloadedError("full"), "missed"),
        (1.5, DeadlineExceededError("late"), "missed"),
        (1.5, NoReplicaError("none"), "missed"),
        (1.5, asyncio.CancelledError(), "missed"),
        (1.5, GeneratorExit(), "missed"),
        # A deadline shorter than the objective is not promised.
        (0.5, DeadlineExceededError("late"), None),
        (0.5, NoReplicaError("none"), None),
        (0.5, asyncio.CancelledError(), None),
        # More replicas would help none of these.
        (1.5, InvalidRequestError("shape"), None),
        (1.5, ModelFailedError("raised"), None),
        (1.5, RequestPoisonedError("kills"), None),
        (1.5, QuarantinedError("again"), None),
    ],
)
def test_requests_are_counted_by_how_they_end(
    took_s: float, error: BaseException | None, counted: str | None
) -> None:
    """A request is missed if more replicas would have helped it."""
    found = Attainment()
    found.count("m", error, is_late=took_s > 1.0)
    assert found.attained["m"] == (counted == "attained")
    assert found.missed["m"] == (counted == "missed")
    assert found.refused["m"] == isinstance(error, OverloadedError)


def test_without_an_objective_every_answer_is_in_time() -> None:
    found = Attainment()
    found.count("m", None, is_late=False)
    found.count("m", DeadlineExceededError("late"), is_late=False)
    found.count("m", OverloadedError("full"), is_late=False)
    assert (found.attained["m"], found.missed["m"]) == (1, 1)
