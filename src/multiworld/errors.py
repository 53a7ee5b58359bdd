"""Every error that multiworld raises, in one tree.

::

    MultiWorldError
    ├ ConfigError(ValueError)            a bad value, found before any I/O
    ├ WorldError                         .world .epoch
    │ ├ UnknownWorldError(ValueError)    no such world in this manager
    │ ├ WorldExistsError(ValueError)     the name is in use in this manager
    │ ├ WorldClosedError                 we closed it
    │ │ └ MemberLeftError                the member we need has left  .rank
    │ ├ RankTakenError                   another live process holds the rank
    │ ├ UsedAfterForkError               a forked child may not use its parent's worlds
    │ ├ WorldBrokenError                 the outside broke it  .reason .evidence .lost
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
    │ └ TensorMismatchError              the two sides disagree about a message
    ├ ServeError                         .status, the HTTP status it is answered with
    │ ├ SpecError(ValueError)            .problems: line, field and remedy of each
    │ ├ InvalidRequestError        400   the request cannot be understood
    │ ├ UnknownModelError          404
    │ ├ UnauthorizedError          401   no key, or none that is known
    │ ├ OverloadedError            429   .retry_after_s
    │ ├ QuarantinedError           429   a tenant's requests killed replicas
    │ ├ ModelFailedError           500   the model raised for this request  .stage
    │ ├ RequestPoisonedError       500   it was alone in two replicas that died
    │ ├ NoReplicaError             503   .retry_after_s
    │ ├ DeadlineExceededError      504
    │ ├ LaunchError                      a process could not be started
    │ └ PlacementError           409   no machine has what is needed  .short
    └ InternalError                      our bug, with the object's story

*Closed* means that this process ended the world, *broken* that something outside did.
Every error survives pickling with all its fields.
"""

from __future__ import annotations

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
    "UnauthorizedError",
    "UnknownModelError",
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


class ConfigError(MultiWorldError, ValueError):
    """A value that cannot work, found before any I/O.

    Attributes:
        field: Name of the parameter.
        value: What was given, as ``repr`` shows it.
        rule: What is allowed.
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        self.field, self.value, self.rule = field, repr(value), rule
        super().__init__(f"{field}={value!r} is not allowed: {rule}")


class WorldError(MultiWorldError):
    """Something about one world.

    Attributes:
        world: The world's name.
        epoch: The incarnation it happened in; 0 where there was none yet.
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
    """The member needed for the operation has left the world politely.

    Attributes:
        rank: The member that left.
    """

    def __init__(
        self, message: str = "", *, world: str = "", epoch: int = 0, rank: int = -1
    ) -> None:
        self.rank = rank
        super().__init__(message, world=world, epoch=epoch)


class RankTakenError(WorldError):
    """Another live process holds the rank; it was not disturbed."""


class UsedAfterForkError(WorldError):
    """A forked child tried to use worlds of its parent."""


class WorldBrokenError(WorldError):
    """Something outside this process ended the world; it is unusable from now on.

    Attributes:
        reason: What happened, in words.
        evidence: What was observed that led to the verdict.
        lost: Ranks known to be lost when this error was made.
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
"""The name that programs written for pymultiworld catch."""


class MemberLostError(WorldBrokenError):
    """A member died, hung or was cut off, and the world broke with it.

    Attributes:
        rank: The member that was lost first.
        silent_s: Seconds since it was last heard of, when it was declared lost.
    """

    def __init__(
        self,
        world: str = "",
        reason: str = "",
        *,
        rank: int = -1,
        silent_s: float = 0.0,
        epoch: int = 0,
        evidence: str = "",
        lost: frozenset[int] = frozenset(),
    ) -> None:
        self.rank, self.silent_s = rank, silent_s
        super().__init__(
            world, reason, epoch=epoch, evidence=evidence, lost=lost | {rank}
        )


class StaleEpochError(WorldBrokenError):
    """This process speaks for an incarnation that goes on, or went on, without it.

    It was declared lost (stopped too long, cut off) and lives after all. It is fenced:
    nothing it sends counts any more. Join again to be back.

    Attributes:
        seen: The epoch this process believed in.
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
    """A deadline of the world's configuration has passed."""


class JoinTimeoutError(WorldTimeoutError):
    """Not every member came in time.

    Attributes:
        present: Ranks that had come, this process's own among them.
        missing: Ranks that had not.
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
        address: Where it was looked for.
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
        theirs: The other side's, or 0 if it speaks another protocol altogether.
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
    """The backend cannot do this; the message names one that can, or another way."""


class TensorMismatchError(BackendError):
    """The two sides of an operation disagree about kind, dtype, size or device."""


class ServeError(MultiWorldError):
    """Something about a served model.

    Attributes:
        status: The HTTP status that the gateway answers with.
    """

    status = 500


class SpecError(ServeError, ValueError):
    """A spec that cannot work, found before anything is started.

    Attributes:
        problems: What is wrong, one line each: where, what, and what to do.
    """

    def __init__(self, message: str = "", *, problems: tuple[str, ...] = ()) -> None:
        self.problems = problems
        super().__init__(message)


class InvalidRequestError(ServeError):
    """The request cannot be understood or does not fit the model.

    A model's stage may raise it, too: the message is the answer.
    """

    status = 400


class UnknownModelError(ServeError):
    """No such model, or no such version of it, is served here."""

    status = 404


class _RetryLaterError(ServeError):
    """Attributes:
    retry_after_s: When another try has a chance, in seconds.
    """

    def __init__(self, message: str = "", *, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class OverloadedError(_RetryLaterError):
    """The queue is full; the request was not accepted."""

    status = 429


class UnauthorizedError(ServeError):
    """The request has no API key, or none that is known, and one is needed."""

    status = 401


class QuarantinedError(_RetryLaterError):
    """Requests of this tenant have killed replicas of this model, again and again."""

    status = 429


class NoReplicaError(_RetryLaterError):
    """A stage had no replica until the request's deadline."""

    status = 503


class DeadlineExceededError(ServeError):
    """The request was accepted, and its deadline passed before it was answered."""

    status = 504


class ModelFailedError(ServeError):
    """The model raised for this request, and for no other of its batch.

    Attributes:
        stage: Where.
    """

    def __init__(self, message: str = "", *, stage: str = "") -> None:
        self.stage = stage
        super().__init__(message)


class RequestPoisonedError(ServeError):
    """Two replicas died while they computed this request and no other."""


class LaunchError(ServeError):
    """A process of the service could not be started."""


class PlacementError(ServeError):
    """Replicas have no place: what was asked for is not started.

    Attributes:
        short: What is short, by machine.
    """

    status = 409

    def __init__(
        self, message: str = "", *, short: Mapping[str, str] | None = None
    ) -> None:
        self.short = dict(short or {})
        super().__init__(message)


class InternalError(MultiWorldError):
    """A bug in multiworld; the message tells the object's story. Please report it."""
