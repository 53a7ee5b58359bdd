"""Errors with which a gateway refuses requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from multiworld import errors

RETRY_AFTER_S = 1.0  # for the client


class OutdatedError(errors.ServeError):
    """A request was checked against a version that is no longer active: check again."""


def unknown_model(
    model: str, known: Iterable[str] | None = None
) -> errors.UnknownModelError:
    """Refuse a request; ``known`` are the models that its tenant may use."""
    text = f"no model {model!r} is served here"
    if known is not None:
        text += f"; there are: {', '.join(known) or 'none'}"
    return errors.UnknownModelError(text)


def overloaded(model: str, own: int) -> errors.OverloadedError:
    """Refuse a request, shed while ``own`` others of its tenant wait."""
    return errors.OverloadedError(
        f"queue of model {model!r} is full: {own} of your requests wait, which is "
        "max_queued_requests or your fair share of it; retry later",
        retry_after_s=RETRY_AFTER_S,
    )


def poisoned(number: int, model: str, losses: int) -> errors.RequestPoisonedError:
    return errors.RequestPoisonedError(
        f"request {number} to model {model!r} is a poison request: "
        f"{losses} replicas died while they computed it; do not retry it"
    )


def without_replica(
    model: str, stage: int, *, is_refused: bool = False
) -> errors.NoReplicaError:
    """Refuse a request; ``is_refused``: files of the version have changed."""
    why = "retry later, a replacement is starting"
    if is_refused:
        why = (
            "files of this version have changed, so no replica of it can start until "
            "the operator updates the model"
        )
    return errors.NoReplicaError(
        f"model {model!r} had no replica of stage {stage} before the deadline of "
        f"this request; {why}",
        retry_after_s=RETRY_AFTER_S,
    )


def too_late(model: str, at: str) -> errors.DeadlineExceededError:
    """Refuse a request that was ``at`` there (in words) at its deadline."""
    return errors.DeadlineExceededError(
        f"request to model {model!r} missed its deadline (it was at "
        f"{at}); allow more time, or scale up the model"
    )


def quarantined(model: str) -> errors.QuarantinedError:
    """Refuse a request that waited when its tenant was quarantined."""
    return errors.QuarantinedError(
        f"your requests to model {model!r} are quarantined: several of them killed "
        "the replicas that computed them; retry later, without those requests",
        retry_after_s=RETRY_AFTER_S,
    )
