"""Events that the reconciler handles. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.serve.controller.fleet.state import DesiredState, Process


@dataclass(frozen=True, slots=True)
class DesiredStateChanged:
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
    noise: str = ""


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe of a replica has ended; ``error`` None: it succeeded."""

    name: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A process has applied the routing table with this number."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """A process has exited, or counts as lost."""

    name: str
    why: str
    # The process's last message, or how it exited; crashes for one reason have equal
    # causes.
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A process cannot be placed; ``why`` is for people."""

    name: str
    why: str
    is_for_now: bool = False  # nothing can start at all for a moment


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    starts_at_once: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """Deadlines may have passed."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The controller was paused, and has handled no event in this time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """A drain was requested; it starts once a replacement is ready."""

    name: str


@dataclass(frozen=True, slots=True)
class ModelNeeded:
    """A request waits for a model that may be scaled to zero."""

    model: str


Event = (
    DrainRequested
    | ModelNeeded
    | DesiredStateChanged
    | Adopted
    | Joined
    | Loaded
    | Probed
    | Applied
    | ProcessGone
    | Unplaced
    | CapacityChanged
    | Paused
    | Ticked
)
