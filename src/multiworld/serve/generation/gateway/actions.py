"""Actions that a stream router asks its shell to carry out. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from multiworld.errors import ServeError
from multiworld.serve.transport.edge_messages import EdgeMessage
from multiworld.serve.transport.generation_messages import TokenItem
from multiworld.serve.transport.protocol import MessageError


@dataclass(frozen=True, slots=True)
class Send:
    replica: str
    message: EdgeMessage


@dataclass(frozen=True, slots=True)
class Deliver:
    number: int  # of the stream
    item: TokenItem | ServeError  # an error ends the stream


@dataclass(frozen=True, slots=True)
class RequestReplicas:
    model: str  # may be scaled to zero while a stream waits


@dataclass(frozen=True, slots=True)
class Log:
    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    error: MessageError  # its sender may not send such a message


Action = Send | Deliver | RequestReplicas | Log | Refuse
