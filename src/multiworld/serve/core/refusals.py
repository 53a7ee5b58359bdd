"""Errors with which a gateway refuses requests. Pure."""

from __future__ import annotations

from multiworld.errors import (
    DeadlineExceededError,
    NoReplicaError,
    OverloadedError,
    QuarantinedError,
    RequestPoisonedError,
)

RETRY_AFTER_S = 1.0  # for the client


def overloaded(model: str, own: int) -> OverloadedError:
    """Refuse a request, shed while ``own`` others of its tenant wait."""
    return OverloadedError(
        f"queue of model {model!r} is full: {own} of your requests wait, which is "
        "max_queued_requests or your fair share of it; retry later",
        retry_after_s=RETRY_AFTER_S,
    )


def poisoned(number: int, model: str, isolated_losses: int) -> RequestPoisonedError:
    return RequestPoisonedError(
        f"request {number} to model {model!r} is a poison request: "
        f"{isolated_losses} replicas died while they computed it alone; do not retry it"
    )


def without_replica(model: str, stage: int) -> NoReplicaError:
    return NoReplicaError(
        f"model {model!r} had no replica of stage {stage} before the deadline of "
        "this request; retry later, a replacement is starting",
        retry_after_s=RETRY_AFTER_S,
    )


def too_late(model: str, at: str) -> DeadlineExceededError:
    """Refuse a request that was ``at`` there (in words) at its deadline."""
    return DeadlineExceededError(
        f"request to model {model!r} missed its deadline (it was at "
        f"{at}); allow more time, or scale up the model"
    )


def quarantined(model: str) -> QuarantinedError:
    """Refuse a request that waited when its tenant was quarantined."""
    return QuarantinedError(
        f"your requests to model {model!r} are quarantined: several of them killed "
        "the replicas that computed them; retry later, without those",
        retry_after_s=RETRY_AFTER_S,
    )
