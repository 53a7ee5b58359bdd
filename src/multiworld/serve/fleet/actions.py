"""What the controller does about what has happened. Pure."""

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
    """End a process now, whatever it does; it may be gone already."""

    name: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Send one request through a replica."""

    name: str
    gateway: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Tell a process to end when it has nothing left to do."""

    name: str


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell everybody the new table."""

    table: RoutingTable


@dataclass(frozen=True, slots=True)
class LogEvent:
    """Something that people want to know."""

    kind: str
    text: str
    name: str = ""


Action = Launch | Kill | Probe | Finish | Announce | LogEvent
