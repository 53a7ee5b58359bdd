"""Actions that a stream router asks its shell to carry out. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from multiworld.errors import ServeError
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.generation_messages import (
    BeginSequences,
    EndSequences,
    PauseSequences,
    TokenItem,
)
from multiworld.serve.wire.protocol import MessageError


@dataclass(frozen=True, slots=True)
class Send:
    replica: str
    message: EdgeMessage


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a stream at its deadline, with the tokens generated so far."""

    error: ServeError  # to raise if the whole request has no token


Item = TokenItem | Cut | ServeError


@dataclass(frozen=True, slots=True)
class Deliver:
    number: int  # of the stream
    item: Item  # an error or a cut ends the stream


@dataclass(frozen=True, slots=True)
class RequestReplicas:
    model: str  # model that a stream waits for, and that may have scaled to zero


@dataclass(frozen=True, slots=True)
class Log:
    text: str
    number: int = 0  # of the stream
    request: str = ""  # id of the stream's request
    is_warning: bool = False
    is_loss: bool = False  # the stream's attempt has failed, and another one follows


@dataclass(frozen=True, slots=True)
class Refuse:
    error: MessageError  # about a message that its sender was not authorised to send


Action = Send | Deliver | RequestReplicas | Log | Refuse


# Messages about several sequences, and the maximum number of sequences in one message,
# because the size of a frame is limited.
Several = BeginSequences | EndSequences | PauseSequences
MAX_MERGED = 64


def merged(actions: list[Action]) -> list[Action]:
    """Merge consecutive messages of the same kind to the same replica."""
    found: list[Action | tuple[str, type[Several], list[Any]]] = []
    latest: dict[str, tuple[str, type[Several], list[Any]]] = {}
    for action in actions:
        if not isinstance(action, Send):
            found.append(action)
            continue
        message = action.message
        if not isinstance(message, Several):
            latest.pop(action.replica, None)
            found.append(action)
            continue
        items = message.starts if isinstance(message, BeginSequences) else message.keys
        group = latest.get(action.replica)
        if (
            group is None
            or group[1] is not type(message)
            or len(group[2]) >= MAX_MERGED
        ):
            group = latest[action.replica] = action.replica, type(message), []
            found.append(group)
        group[2].extend(items)
    return [
        Send(each[0], each[1](tuple(each[2]))) if isinstance(each, tuple) else each
        for each in found
    ]
