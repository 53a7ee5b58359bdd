"""Actions that a replica's recovery asks its shell to carry out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.generation_messages import SequenceStart
from multiworld.serve.wire.protocol import Key, StreamId


@dataclass(frozen=True, slots=True)
class Send:
    peer: str
    message: EdgeMessage
    is_urgent: bool = False  # if True, it is sent at once, before anything is computed


@dataclass(frozen=True, slots=True)
class SendLogged:
    """Send rows of the activation log to the next stage, or to a prepared replica."""

    peer: str
    key: Key
    begin: int  # position of the first row
    end: int  # position after the last row; equal to ``begin`` if there are none
    is_end: bool  # True if no rows follow


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Compute tokens of a sequence again in stage 0, for stages that lack them."""

    key: Key
    begin: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Open:
    """Register an attempt with the engine; report once its grammar is compiled."""

    start: SequenceStart


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove a sequence, with all its state."""

    stream: StreamId


@dataclass(frozen=True, slots=True)
class DropComputed:
    """Drop the KV blocks and the activation log of a sequence, but keep its state."""

    stream: StreamId


@dataclass(frozen=True, slots=True)
class Warn:
    text: str


Action = Warn | Send | SendLogged | Rebuild | Open | Forget | DropComputed
