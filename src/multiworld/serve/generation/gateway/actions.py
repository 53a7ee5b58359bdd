"""Actions that a stream router asks its shell to carry out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.errors import ServeError
from multiworld.serve.transport.edge_messages import EdgeMessage
from multiworld.serve.transport.generation_messages import TokenItem
from multiworld.serve.transport.protocol import MessageError


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a connected replica."""

    replica: str
    message: EdgeMessage


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver a token to a stream's client, or the error that ends the stream."""

    number: int
    item: TokenItem | ServeError


@dataclass(frozen=True, slots=True)
class RequestReplicas:
    """Ask for replicas of a model that may be scaled to zero: a stream waits."""

    model: str


@dataclass(frozen=True, slots=True)
class Log:
    """Write a line to the log."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Reject a message that its sender is not authorised to send."""

    error: MessageError


Action = Send | Deliver | RequestReplicas | Log | Refuse
