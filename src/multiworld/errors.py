"""All errors that multiworld raises, in one tree. Pure.

::

    MultiWorldError
    ├ ConfigError(ValueError)            an invalid value, found before any I/O
    ├ WorldError                         .world .epoch
    │ ├ UnknownWorldError(ValueError)    no such world in this manager
    │ ├ WorldExistsError(ValueError)     the name is in use in this manager
    │ ├ WorldClosedError                 this process closed the world
    │ │ └ MemberLeftError                a member that is needed has left  .rank
    │ ├ RankTakenError                   another live process holds the rank
    │ ├ UsedAfterForkError               a forked child may not use its parent's worlds
    │ ├ WorldBrokenError                 a fault ended it  .reason .evidence .lost
    │ │ ├ MemberLostError                .rank .silent_s
    │ │ └ StaleEpochError                .seen .expected
    │ └ WorldTimeoutError(TimeoutError)
    │   └ JoinTimeoutError               .present .missing
    ├ RendezvousError
    │ ├ StoreUnreachableError            .address
    │ ├ WrongSecretError
    │ ├ ProtocolVersionError             .ours .theirs
    │ └ JoinMismatchError                the members asked for different worlds
    ├ BackendError
    │ ├ UnsupportedOperationError
    │ ├ TorchVersionError                .missing .installed .works
    │ └ TensorMismatchError              the two sides disagree about a message
    ├ ServeError                         .status, the HTTP status of the response
    │ ├ SpecError(ValueError)            .problems: line, field and remedy of each
    │ ├ InvalidRequestError        400   the request is malformed
    │ ├ UnknownModelError          404
    │ ├ UnknownStreamError         404
    │ ├ UnauthorizedError          401   no API key, or an unknown one
    │ ├ OverloadedError            429   .retry_after_s
    │ ├ QuarantinedError           429   a tenant's requests killed replicas
    │ ├ ModelFailedError           500   the model raised an exception  .stage
    │ ├ RequestCancelledError      409   an operator cancelled the request
    │ ├ RequestPoisonedError       500   the request killed two replicas
    │ ├ NoReplicaError             503   .retry_after_s
    │ ├ KeeperLostError            503   .retry_after_s
    │ ├ DeadlineExceededError      504
    │ ├ LaunchError                      a process could not be started
    │ └ PlacementError             409   the machines lack the resources  .short
    └ InternalError                      a bug in multiworld

*Closed* means that this process left the world; *broken* means that a fault outside
this process ended it. Every error survives pickling with all its fields.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

__all__ = [
    "BackendError",
    "BrokenWorldException",
    "ConfigError",
    "DeadlineExceededError",
    "InternalError",
    "InvalidRequestError",
    "JoinMismatchError",
    "JoinTimeoutError",
    "KeeperLostError",
    "LaunchError",
    "MemberLeftError",
    "MemberLostError",
    "ModelFailedError",
    "MultiWorldError",
    "NoReplicaError",
    "OverloadedError",
    "PlacementError",
    "ProtocolVersionError",
    "QuarantinedError",
    "RankTakenError",
    "RendezvousError",
    "RequestPoisonedError",
    "ServeError",
    "SpecError",
    "StaleEpochError",
    "StoreUnreachableError",
    "TensorMismatchError",
    "TorchVersionError",
    "UnauthorizedError",
    "UnknownModelError",
    "UnknownStreamError",
    "UnknownWorldError",
    "UnsupportedOperationError",
    "UsedAfterForkError",
    "WorldBrokenError",
    "WorldClosedError",
    "WorldError",
    "WorldExistsError",
    "WorldTimeoutError",
    "WrongSecretError",
]


def _restore(
    kind: type[MultiWorldError], args: tuple[Any, ...], fields: dict[str, Any]
) -> MultiWorldError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class MultiWorldError(Exception):
    """Base of all errors of this package."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self), self.args, dict(self.__dict__))


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 20


class ConfigError(MultiWorldError, ValueError):
    """An invalid value, found before any I/O.

    Attributes:
        field: Name of the parameter.
        value: The value given, as ``repr`` shows it, shortened if it is long or deep.
        rule: What to give instead.
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        try:
            self.value = _SHORT.repr(value)
        except Exception:  # e.g. an int of 5,000 digits
            self.value = f"a {type(value).__name__}"
        self.field, self.rule = field, rule
        super().__init__(f"{field} is {self.value}; {rule}")


class WorldError(MultiWorldError):
    """An error that concerns one world.

    Attributes:
        world: The world's name.
        epoch: The incarnation's epoch; 0 if there was none yet.
    """

    def __init__(self, message: str = "", *, world: str = "", epoch: int = 0) -> None:
        self.world, self.epoch = world, epoch
        super().__init__(message)


class UnknownWorldError(WorldError, ValueError):
    """This manager has no world of that name."""


class WorldExistsError(WorldError, ValueError):
    """This manager already has a world of that name."""


class WorldClosedError(WorldError):
    """This process has left the world."""


class MemberLeftError(WorldClosedError):
    """The member needed for the operation has left the world gracefully.

    Attributes:
        rank: The member that left.
    """

    def __init__(
        self, message: str = "", *, world: str = "", epoch: int = 0, rank: int = -1
    ) -> None:
        self.rank = rank
        super().__init__(message, world=world, epoch=epoch)


class RankTakenError(WorldError):
    """Another live process holds the rank; the attempt did not disturb it."""


class UsedAfterForkError(WorldError):
    """A forked child tried to use a world of its parent."""


class WorldBrokenError(WorldError):
    """A fault outside this process ended the world, which stays unusable.

    Attributes:
        reason: What happened, in words.
        evidence: The observation that led to the verdict.
        lost: Ranks that were known to be lost when this error was raised.
    """

    def __init__(
        self,
        world: str = "",
        reason: str = "",
        *,
        epoch: int = 0,
        evidence: str = "",
        lost: frozenset[int] = frozenset(),
    ) -> None:
        self.reason, self.evidence, self.lost = reason, evidence, lost
        message = f"{world} broken: {reason}"
        if evidence:
            message += f" ({evidence})"
        super().__init__(message, world=world, epoch=epoch)


BrokenWorldException = WorldBrokenError
"""Alias of ``WorldBrokenError``, which programs for pymultiworld catch."""


class MemberLostError(WorldBrokenError):
    """A member died, hung or was cut off by a network partition, which broke the world.

    Attributes:
        rank: The member that was lost first.
        silent_s: Seconds from its last sign of life to the verdict.
        has_ended: Whether its connection ended, as when a process exits; False if it
            fell silent.
    """

    def __init__(
        self,
        world: str = "",
        reason: str = "",
        *,
        rank: int = -1,
        silent_s: float = 0.0,
        has_ended: bool = False,
        epoch: int = 0,
        evidence: str = "",
        lost: frozenset[int] = frozenset(),
    ) -> None:
        self.rank, self.silent_s, self.has_ended = rank, silent_s, has_ended
        super().__init__(
            world, reason, epoch=epoch, evidence=evidence, lost=lost | {rank}
        )


class StaleEpochError(WorldBrokenError):
    """The other members continue without this process.

    The other members declared this process lost, because it was stopped for too long or
    cut off by a network partition. It is fenced: the other members ignore everything
    that it sends. Join again to come back.

    Attributes:
        seen: The epoch that this process considered current.
        expected: The lowest epoch that can be current.
    """

    def __init__(
        self,
        world: str = "",
        reason: str = "",
        *,
        seen: int = 0,
        expected: int = 0,
        evidence: str = "",
        lost: frozenset[int] = frozenset(),
    ) -> None:
        self.seen, self.expected = seen, expected
        super().__init__(world, reason, epoch=seen, evidence=evidence, lost=lost)


class WorldTimeoutError(WorldError, TimeoutError):
    """A deadline from the world's configuration has passed."""


class JoinTimeoutError(WorldTimeoutError):
    """Some members did not join in time.

    Attributes:
        present: Ranks that had joined, including this process's own.
        missing: Ranks that had not joined.
    """

    def __init__(
        self,
        message: str = "",
        *,
        world: str = "",
        epoch: int = 0,
        present: tuple[int, ...] = (),
        missing: tuple[int, ...] = (),
    ) -> None:
        self.present, self.missing = present, missing
        super().__init__(message, world=world, epoch=epoch)


class RendezvousError(MultiWorldError):
    """The members could not meet."""


class StoreUnreachableError(RendezvousError):
    """No store answered.

    Attributes:
        address: The address or addresses that were tried.
    """

    def __init__(self, message: str = "", *, address: str = "") -> None:
        self.address = address
        super().__init__(message)


class WrongSecretError(RendezvousError):
    """The two sides do not hold the same secret."""


class ProtocolVersionError(RendezvousError):
    """The two sides speak different versions of the protocol.

    Attributes:
        ours: The version that this process speaks.
        theirs: The version that the other side speaks; 0 for another protocol.
    """

    def __init__(self, message: str = "", *, ours: int = 0, theirs: int = 0) -> None:
        self.ours, self.theirs = ours, theirs
        super().__init__(message)


class JoinMismatchError(RendezvousError):
    """Members of one world asked for different sizes, backends or options.

    Attributes:
        world: The world's name.
    """

    def __init__(self, message: str = "", *, world: str = "") -> None:
        self.world = world
        super().__init__(message)


class BackendError(MultiWorldError):
    """A backend refused or failed an operation; the message says what to do."""


class UnsupportedOperationError(BackendError):
    """The backend lacks this operation; the message names an alternative."""


class TorchVersionError(BackendError):
    """The installed torch lacks names that multiworld needs.

    Attributes:
        missing: The names that it lacks.
        installed: Its version.
        works: The versions that have them, as a version specifier.
    """

    def __init__(
        self,
        message: str = "",
        *,
        missing: tuple[str, ...] = (),
        installed: str = "",
        works: str = "",
    ) -> None:
        self.missing, self.installed, self.works = missing, installed, works
        super().__init__(message)


class TensorMismatchError(BackendError):
    """The two sides of an operation disagree about kind, dtype, size or device."""


class ServeError(MultiWorldError):
    """An error that concerns a served model.

    Attributes:
        status: The HTTP status of the gateway's response.
    """

    status = 500


class SpecError(ServeError, ValueError):
    """An invalid spec, found before any process is started.

    Attributes:
        problems: One line for each problem: where it is, what it is, what to do.
    """

    def __init__(self, message: str = "", *, problems: tuple[str, ...] = ()) -> None:
        self.problems = problems
        super().__init__(message)


class InvalidRequestError(ServeError):
    """The request is malformed or does not fit the model.

    A stage of a model may raise this, too; the response then has the error's message.

    Attributes:
        param: The invalid field of the request, or "".
        code: Kind of the error as OpenAI's API names it, or "".
    """

    status = 400

    def __init__(self, message: str = "", *, param: str = "", code: str = "") -> None:
        self.param, self.code = param, code
        super().__init__(message)


class UnknownModelError(ServeError):
    """This service does not serve that model, or not that version of it."""

    status = 404


class UnknownStreamError(ServeError):
    """There is no stream of that id, or it is no longer kept."""

    status = 404


class _RetryLaterError(ServeError):
    """An error after which a later attempt may succeed.

    Attributes:
        retry_after_s: Seconds to wait before the next attempt.
    """

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class OverloadedError(_RetryLaterError):
    """The queue is full, or a limit is reached, so the request was not accepted.

    Attributes:
        limit: Name of the tenant's limit; empty if the queue is full.
    """

    status = 429

    def __init__(
        self, message: str = "", *, retry_after_s: float = 1.0, limit: str = ""
    ) -> None:
        self.limit = limit
        super().__init__(message, retry_after_s=retry_after_s)


class UnauthorizedError(ServeError):
    """The service needs an API key, and the request has none or an unknown one."""

    status = 401


class QuarantinedError(_RetryLaterError):
    """The tenant is quarantined: its requests have killed several replicas."""

    status = 429


class NoReplicaError(_RetryLaterError):
    """A stage had no replica until the request's deadline."""

    status = 503


class KeeperLostError(_RetryLaterError):
    """The stream keeper is being replaced, so it cannot tell where a stream is kept."""

    status = 503


class DeadlineExceededError(ServeError):
    """The service accepted the request but did not answer it before its deadline."""

    status = 504


class ModelFailedError(ServeError):
    """The model raised an error for this request only, not for others of its batch.

    Attributes:
        stage: The stage that raised it.
    """

    def __init__(self, message: str = "", *, stage: str = "") -> None:
        self.stage = stage
        super().__init__(message)


class RequestCancelledError(ServeError):
    """An operator has cancelled the request."""

    status = 409


class RequestPoisonedError(ServeError):
    """A poison request: two replicas in a row died while they computed it alone."""


class LaunchError(ServeError):
    """A process of the service could not be started."""


class PlacementError(ServeError):
    """No machine has the resources that a replica needs; the replica is not started.

    Attributes:
        short: The missing resources, by machine.
    """

    status = 409

    def __init__(
        self, message: str = "", *, short: Mapping[str, str] | None = None
    ) -> None:
        self.short = dict(short or {})
        super().__init__(message)


class InternalError(MultiWorldError):
    """A bug in multiworld; please report it with the message and the traceback."""


def wrong_field(
    param: str, rule: str, code: str = "invalid_value"
) -> InvalidRequestError:
    """Return the error about a field of a request.

    Args:
        param, rule, code: Name of the field, what is wrong with it, and the code.
    """
    return InvalidRequestError(f'"{param}" {rule}', param=param, code=code)
