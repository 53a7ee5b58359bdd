"""Actions that the reconciler requests from the controller. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.serve.wire.routing_table import RoutingTable


@dataclass(frozen=True, slots=True)
class Launch:
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
    """Send one request through the replica `name`, from `gateway`."""

    name: str
    gateway: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """Order a process to exit once it has no work left."""

    name: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Send a new routing table to every process."""

    table: RoutingTable


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Add an entry to the history; `name` may be empty."""

    kind: str
    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Report that a stage cannot start: every attempt failed in the same way."""

    model: str
    stage: int
    failures: int
    cause: str


Action = GiveUp | Launch | Kill | Probe | Finish | Announce | LogEvent
