"""Actions that the reconciler asks the controller to carry out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.serve.transport.routing_table import RoutingTable


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a process."""

    name: str
    model: str
    version: str
    stage: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill a process now; it may have exited already."""

    name: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Send one request through a replica.

    Attributes:
        name: Name of the replica.
        gateway: Name of the gateway that sends the request.
    """

    name: str
    gateway: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell a process to exit once it has no work left."""

    name: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Send a new routing table to every process."""

    table: RoutingTable


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Add an entry to the event log.

    Attributes:
        kind: Kind of the event, such as "ready" or "rolled back".
        text: One line for people.
        name: Name of the process; empty if the event is about no single process.
    """

    kind: str
    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report that a stage cannot be started: it failed the same way every time.

    Attributes:
        model: Name of the model.
        stage: Number of the stage.
        failures: Number of attempts.
        cause: Why the last one failed.
    """

    model: str
    stage: int
    failures: int
    cause: str


Action = GiveUp | Launch | Kill | Probe | Finish | Announce | LogEvent
