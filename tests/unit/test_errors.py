"""The error tree: pickling, fields, and what COMPATIBILITY promises."""

from __future__ import annotations

import pickle

import pytest

from multiworld import errors

MADE = [
    errors.ConfigError("rank", 7, "0 to 3"),
    errors.UnknownWorldError("no", world="w"),
    errors.WorldExistsError("yes", world="w", epoch=3),
    errors.WorldClosedError("closed", world="w", epoch=1),
    errors.MemberLeftError("left", world="w", epoch=1, rank=2),
    errors.RankTakenError("taken", world="w"),
    errors.UsedAfterForkError("fork", world="w"),
    errors.WorldBrokenError("w", "why", epoch=2, evidence="seen", lost=frozenset({1})),
    errors.MemberLostError("w", "why", rank=1, silent_s=2.5, epoch=2),
    errors.StaleEpochError("w", "old", seen=1, expected=2),
    errors.WorldTimeoutError("late", world="w"),
    errors.JoinTimeoutError("late", world="w", present=(0,), missing=(1, 2)),
    errors.RendezvousError("r"),
    errors.StoreUnreachableError("gone", address="tcp://h:1"),
    errors.WrongSecretError("secret"),
    errors.ProtocolVersionError("version", ours=1, theirs=2),
    errors.JoinMismatchError("sizes", world="w"),
    errors.BackendError("b"),
    errors.UnsupportedOperationError("u"),
    errors.TensorMismatchError("t"),
    errors.TorchVersionError("old", missing=("a.b",), installed="2.0", works=">=2"),
    errors.ServeError("s"),
    errors.SpecError("two", problems=("line 1: a", "line 2: b")),
    errors.InvalidRequestError("bad"),
    errors.UnknownModelError("none"),
    errors.UnknownStreamError("none"),
    errors.OverloadedError("full", retry_after_s=2.0),
    errors.UnauthorizedError("no key"),
    errors.QuarantinedError("poison", retry_after_s=30.0),
    errors.ModelFailedError("raised", stage="embed"),
    errors.RequestPoisonedError("poison"),
    errors.NoReplicaError("nobody", retry_after_s=3.0),
    errors.KeeperLostError("replaced", retry_after_s=4.0),
    errors.DeadlineExceededError("late"),
    errors.LaunchError("no"),
    errors.PlacementError("full", short={"a": "2 cpus short"}),
    errors.InternalError("i"),
]


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_error_when_pickled_then_keeps_every_field(
    error: errors.MultiWorldError,
) -> None:
    """Errors cross process boundaries, where no field may be lost."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
    assert isinstance(copy, errors.MultiWorldError)


def test_every_exported_error_is_made_here() -> None:
    """Otherwise an error could escape the test of pickling."""
    made = {type(error).__name__ for error in MADE}
    abstract = {"MultiWorldError", "WorldError", "BrokenWorldException"}
    assert made == set(errors.__all__) - abstract


def test_broken_world_exception_takes_two_positional_arguments() -> None:
    """Programs for pymultiworld create it like this."""
    error = errors.BrokenWorldException("world1", "gone")
    assert str(error) == "world1 broken: gone"
    assert isinstance(error, errors.WorldBrokenError)


def test_errors_are_also_what_python_programs_expect() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.WorldExistsError, ValueError)
    assert issubclass(errors.UnknownWorldError, ValueError)
    assert issubclass(errors.JoinTimeoutError, TimeoutError)
    assert issubclass(errors.MemberLeftError, errors.WorldClosedError)
