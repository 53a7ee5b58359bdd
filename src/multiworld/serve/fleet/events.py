"""Events that the reconciler handles. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.serve.fleet.state import DesiredState, Process


@dataclass(frozen=True, slots=True)
class DesiredStateChanged:
    """The desired state has changed."""

    desired: DesiredState


@dataclass(frozen=True, slots=True)
class Adopted:
    """A process of an earlier controller is still alive; it is expected to join."""

    process: Process


@dataclass(frozen=True, slots=True)
class Joined:
    """The control world with a process is ready."""

    name: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker has loaded its weights, or a gateway listens.

    Attributes:
        name: Name of the process.
        fingerprint: Kind of machine that its results depend on; empty if they may
            differ.
        weights: Name of its weights, if it has any.
    """

    name: str
    fingerprint: str = ""
    weights: str = ""


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe of a replica has ended.

    Attributes:
        name: Name of the replica.
        error: Cause of the failure; None if the probe succeeded.
    """

    name: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A process has applied the routing table of a number."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """A process has exited, or counts as lost.

    Attributes:
        name: Name of the process.
        why: Cause, for people.
        is_clean: True if the process exited because it was told to.
        cause: What crashed it, in its own words; tells equal crashes apart from others.
    """

    name: str
    why: str
    is_clean: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No machine has room for a process that was to be launched.

    Attributes:
        name: Name of the process.
        why: Missing resources, for people.
    """

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """Machines have changed; there may be room for unplaced replicas.

    Attributes:
        starts_at_once: Most replicas that start at once now.
    """

    starts_at_once: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """A clock tick: deadlines may have passed."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A process is to be drained once a replacement is ready."""

    name: str


Event = (
    DrainRequested
    | DesiredStateChanged
    | Adopted
    | Joined
    | Loaded
    | Probed
    | Applied
    | ProcessGone
    | Unplaced
    | CapacityChanged
    | Ticked
)
