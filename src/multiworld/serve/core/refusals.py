"""Errors with which a gateway refuses requests. Pure."""

from __future__ import annotations

from multiworld.errors import (
    DeadlineExceededError,
    NoReplicaError,
    OverloadedError,
    QuarantinedError,
    RequestPoisonedError,
)

RETRY_AFTER_S = 1.0
"""Seconds after which the client should try again."""


def overloaded(model: str, own: int) -> OverloadedError:
    """Return the error for a request shed while ``own`` others of its tenant wait."""
    return OverloadedError(
        f"queue of model {model!r} is full: {own} of your requests wait, which is "
        "max_queued_requests or your fair share of it; retry later",
        retry_after_s=RETRY_AFTER_S,
    )


def poisoned(number: int, model: str, isolated_losses: int) -> RequestPoisonedError:
    """Return the error for a poison request.

    Args:
        number: Number of the request.
        model: Name of its model.
        isolated_losses: Replicas that died while they computed it in isolation.
    """
    return RequestPoisonedError(
        f"request {number} to model {model!r} is a poison request: "
        f"{isolated_losses} replicas died while they computed it alone; do not retry it"
    )


def without_replica(model: str, stage: int) -> NoReplicaError:
    """Return the error for a request whose stage had no replica until its deadline."""
    return NoReplicaError(
        f"model {model!r} had no replica of stage {stage} before the deadline of "
        "this request; retry later, a replacement is starting",
        retry_after_s=RETRY_AFTER_S,
    )


def too_late(model: str, at: str) -> DeadlineExceededError:
    """Return the error for a request that missed its deadline.

    Args:
        model: Name of its model.
        at: Where the request was at its deadline, in words.
    """
    return DeadlineExceededError(
        f"request to model {model!r} missed its deadline (it was at "
        f"{at}); allow more time, or scale up the model"
    )


def quarantined(model: str) -> QuarantinedError:
    """Return the error for a request that waited when its tenant was quarantined."""
    return QuarantinedError(
        f"your requests to model {model!r} are quarantined: several of them killed "
        "the replicas that computed them; retry later, without those",
        retry_after_s=RETRY_AFTER_S,
    )
