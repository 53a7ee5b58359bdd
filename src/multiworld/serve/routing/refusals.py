"""Errors with which a gateway refuses requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from multiworld import errors

RETRY_AFTER_S = 1.0  # seconds after which the client may retry


class OutdatedError(errors.ServeError):
    """A request's model version is no longer active; check the request again."""


def unknown_model(
    model: str, known: Iterable[str] | None = None
) -> errors.UnknownModelError:
    """Return the error; ``known`` are the models that the tenant may use."""
    text = f"unknown model {model!r}"
    if known is not None:
        text += f"; available models: {', '.join(known) or 'none'}"
    return errors.UnknownModelError(text)


def overloaded(model: str, own: int) -> errors.OverloadedError:
    """Return the error of a shed request; ``own`` requests of its tenant wait."""
    return errors.OverloadedError(
        f"queue of model {model!r} is full: {own} of your requests are waiting, "
        "which reaches max_queued_requests or your fair share of it; retry later",
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
    """Return the error; ``is_refused``: files of the model version have changed."""
    why = "a replacement is starting; retry later"
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
    """Return the error; ``at`` describes where the request was at its deadline."""
    return errors.DeadlineExceededError(
        f"request to model {model!r} missed its deadline (it was at "
        f"{at}); allow more time, or scale up the model"
    )


def quarantined(model: str) -> errors.QuarantinedError:
    """Return the error of a request that waited when its tenant was quarantined."""
    return errors.QuarantinedError(
        f"your requests to model {model!r} are quarantined: several of them killed "
        "the replicas that computed them; retry later, without those requests",
        retry_after_s=RETRY_AFTER_S,
    )
