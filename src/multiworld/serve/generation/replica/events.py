"""Events that a replica's recovery handles. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from multiworld.serve.transport.edge_messages import EdgeMessage
from multiworld.serve.transport.protocol import Key


@dataclass(frozen=True, slots=True)
class Received:
    """A message without rows from a peer that may send it."""

    peer: str
    message: EdgeMessage


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar of an attempt is compiled, or it has none."""

    key: Key


@dataclass(frozen=True, slots=True)
class Connected:
    """An edge is up."""

    peer: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """An edge is down."""

    peer: str


@dataclass(frozen=True, slots=True)
class GatewaysChanged:
    """The gateways that are in the routing table or connected."""

    names: Collection[str]


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed.

    Attributes:
        was_paused: This process was stopped since the last tick.
    """

    was_paused: bool


Event = Received | Compiled | Connected | Disconnected | GatewaysChanged | Ticked
