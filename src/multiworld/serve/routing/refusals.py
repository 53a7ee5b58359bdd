"""What a router says to those it does not answer. Pure."""

from __future__ import annotations

from multiworld.errors import (
    DeadlineExceededError,
    NoReplicaError,
    OverloadedError,
    QuarantinedError,
    RequestPoisonedError,
)
from multiworld.serve.routing.events import Submitted

RETRY_AFTER_S = 1.0


def overloaded(job: Submitted, own: int) -> OverloadedError:
    """Return the error of a request that finds ``own`` others of its tenant waiting."""
    return OverloadedError(
        f"model {job.model!r} has {own} requests of yours waiting, which is its "
        "max_queued_requests, or your share of it; try again later",
        retry_after_s=RETRY_AFTER_S,
    )


def poisoned(job: Submitted, isolated_losses: int) -> RequestPoisonedError:
    """Return the error of a request that killed so many replicas."""
    return RequestPoisonedError(
        f"request {job.number} to model {job.model!r} was alone in {isolated_losses} "
        "replicas when they died; it is not tried again"
    )


def without_replica(job: Submitted, stage: int) -> NoReplicaError:
    """Return the error of a request that a stage had nobody for until its deadline."""
    return NoReplicaError(
        f"model {job.model!r} has no replica of stage {stage} until the deadline of "
        "this request; it is being replaced, try again later",
        retry_after_s=RETRY_AFTER_S,
    )


def too_late(job: Submitted, at: str) -> DeadlineExceededError:
    """Return the error of a request whose deadline has passed while it was there."""
    return DeadlineExceededError(
        f"the deadline of this request to model {job.model!r} has passed (it was at "
        f"{at}); allow more time, or scale the model"
    )


def quarantined(job: Submitted) -> QuarantinedError:
    """Return the error of a request that waited when its tenant was quarantined."""
    return QuarantinedError(
        f"several of your requests to model {job.model!r} have killed the replicas "
        "that computed them; what waited is not tried any more",
        retry_after_s=RETRY_AFTER_S,
    )
