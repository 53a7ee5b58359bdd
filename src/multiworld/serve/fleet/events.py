"""What can happen to a service, as the controller sees it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.serve.fleet.state import DesiredState, Process


@dataclass(frozen=True, slots=True)
class DesiredStateChanged:
    """Somebody wants something else."""

    desired: DesiredState


@dataclass(frozen=True, slots=True)
class Adopted:
    """A process of an earlier controller lives; it will join."""

    process: Process


@dataclass(frozen=True, slots=True)
class Joined:
    """The control world with a process is up."""

    name: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker has its weights, or a gateway listens."""

    name: str


@dataclass(frozen=True, slots=True)
class Probed:
    """A probe came back, or did not: ``error`` says why."""

    name: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Applied:
    """A process goes by the table of this number."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """A process has ended, or is given up.

    Attributes:
        is_clean: It did what it was told.
    """

    name: str
    why: str
    is_clean: bool = False


@dataclass(frozen=True, slots=True)
class Unplaced:
    """No machine has room for a process that was to be launched."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """There may be room again for what had no place."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time to look at deadlines."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Somebody wants this process out; it will be replaced."""

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
