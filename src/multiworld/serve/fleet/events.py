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
    """A worker has loaded its weights, or a gateway listens."""

    name: str
    fingerprint: str = ""
    weights: str = ""


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe of a replica has ended; `error` is None if it succeeded."""

    name: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A process has applied the routing table with this number."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """A process has exited, or counts as lost.

    `cause` is the process's own words about its crash; equal crashes have equal causes.
    """

    name: str
    why: str
    is_clean: bool = False
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No machine has room for a process about to be launched; `why` is for people."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """Machines have changed, and with them the maximum number of concurrent starts."""

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
