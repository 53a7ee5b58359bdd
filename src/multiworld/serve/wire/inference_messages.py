"""Messages on the edges of models that give one answer per request. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.wire.origin import NOWHERE, Origin
from multiworld.serve.wire.protocol import Key, Message, RemoteError

Attempt = tuple[int, int]  # number of a request at its gateway, and of the attempt


class BatchBegun(Message, frozen=True, tag="batch_begun"):
    """Replica → gateway: these attempts start; ``is_isolated``: one suspect, alone.

    If ``attempts`` is empty, the replica no longer computes any attempt that the
    gateway has given up.
    """

    attempts: tuple[Attempt, ...]
    is_isolated: bool


class WorkDropped(Message, frozen=True, tag="work_dropped"):
    """Replica → gateway: attempts that were lost with a replica of ``stage``."""

    attempts: tuple[Attempt, ...]
    stage: int


class WorkReturned(Message, frozen=True, tag="work_returned"):
    """Replica → gateway: attempts that no replica of ``stage`` accepts."""

    attempts: tuple[Attempt, ...]
    stage: int


class WorkStuck(Message, frozen=True, tag="work_stuck"):
    """Replica → gateway: attempts at a replica of ``stage`` that is silent."""

    attempts: tuple[Attempt, ...]
    stage: int


class WorkFailed(Message, frozen=True, tag="work_failed"):
    """Replica → gateway: the model raised an error for this attempt."""

    attempt: Attempt
    error: RemoteError


# Replica → gateway.
Note = BatchBegun | WorkDropped | WorkReturned | WorkStuck | WorkFailed


class CreditReleased(Message, frozen=True, tag="credit_released"):
    """Replica → previous stage: attempts that started, and so release their credit."""

    keys: tuple[Key, ...]


class CreditRefused(Message, frozen=True, tag="credit_refused"):
    """Replica → previous stage: attempts refused for lack of an edge to the gateway."""

    keys: tuple[Key, ...]


Credit = CreditReleased | CreditRefused  # replica → replica of the previous stage


class Cancel(Message, frozen=True, tag="cancel"):
    """Gateway → replica: the client no longer waits for this attempt."""

    key: Key


class Spent(NamedTuple):
    """Seconds at replicas so far; ``queued_s`` includes waiting for the next stage."""

    queued_s: float = 0.0
    computed_s: float = 0.0


NOTHING_SPENT = Spent()


class WorkItem(msgspec.Struct, frozen=True, array_like=True):
    """The header of one attempt."""

    key: Key
    remaining_s: float  # seconds until its deadline, at the time of sending
    is_isolated: bool = False  # a suspect, which is computed alone
    # Requests with the same session prefer the same replica of each stage.
    session: str | None = None
    via: dict[str, str] | None = None  # replicas that a probe must pass, by stage
    share: Share = DEFAULT_SHARE
    spent: Spent = NOTHING_SPENT
    origin: Origin = NOWHERE


class Work(Message, frozen=True, tag="work"):
    """Gateway or replica → next stage: attempts; the frame has the tensors of each."""

    items: tuple[WorkItem, ...]


class AnswerItem(msgspec.Struct, frozen=True, array_like=True):
    """The header of one answer; currently every answer is a single part."""

    attempt: Attempt
    is_last: bool = True
    spent: Spent = NOTHING_SPENT


class Answers(Message, frozen=True, tag="answers"):
    """Last stage → gateway: answers; the frame has the tensors of each."""

    items: tuple[AnswerItem, ...]
