"""Events that a replica's recovery handles. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.protocol import Key


@dataclass(frozen=True, slots=True)
class Received:
    """A message without rows from a peer that may send it."""

    peer: str
    message: EdgeMessage


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar of an attempt is compiled, or the attempt has no grammar."""

    key: Key


@dataclass(frozen=True, slots=True)
class Connected:
    peer: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    peer: str


@dataclass(frozen=True, slots=True)
class GatewaysChanged:
    names: Collection[str]  # gateways that are in the routing table or connected


@dataclass(frozen=True, slots=True)
class Ticked:
    was_paused: bool  # True if this process was stopped since the last tick


Event = Received | Compiled | Connected | Disconnected | GatewaysChanged | Ticked
