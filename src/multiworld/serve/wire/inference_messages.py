"""Messages on the edges of models with one answer a request, between gateways and
replicas, and between neighbouring stages. Pure."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.wire.protocol import Key, Message, RemoteError

Attempt = tuple[int, int]  # numbers of a request at its gateway, and of the attempt


class BatchBegun(Message, frozen=True, tag="batch_begun"):
    """Replica → gateway: these attempts start computing; ``is_isolated``: a suspect.

    Without attempts: a batch has ended, and the gateway gave up some of its requests.
    """

    attempts: tuple[Attempt, ...]
    is_isolated: bool


class WorkDropped(Message, frozen=True, tag="work_dropped"):
    """Replica → gateway: attempts at a replica of ``stage``, maybe lost with it."""

    attempts: tuple[Attempt, ...]
    stage: int


class WorkReturned(Message, frozen=True, tag="work_returned"):
    """Replica → gateway: attempts that no replica of ``stage`` accepts."""

    attempts: tuple[Attempt, ...]
    stage: int


class WorkStuck(Message, frozen=True, tag="work_stuck"):
    """Replica → gateway: attempts at a replica of ``stage`` that has fallen silent."""

    attempts: tuple[Attempt, ...]
    stage: int


class WorkFailed(Message, frozen=True, tag="work_failed"):
    """Replica → gateway: the model raised an error for this attempt."""

    attempt: Attempt
    error: RemoteError


# Replica → gateway.
Note = BatchBegun | WorkDropped | WorkReturned | WorkStuck | WorkFailed


class CreditReleased(Message, frozen=True, tag="credit_released"):
    """Replica → previous stage: attempts that have started; their credit is free."""

    keys: tuple[Key, ...]


class CreditRefused(Message, frozen=True, tag="credit_refused"):
    """Replica → previous stage: attempts whose gateway is not connected here."""

    keys: tuple[Key, ...]


Credit = CreditReleased | CreditRefused  # replica → replica of the previous stage


class Cancel(Message, frozen=True, tag="cancel"):
    """Gateway → replica: the client no longer waits for this attempt."""

    key: Key


class Spent(NamedTuple):
    """Seconds at replicas so far; ``queued_s`` includes waits for the next stage."""

    queued_s: float = 0.0
    computed_s: float = 0.0


NOTHING_SPENT = Spent()


class WorkItem(msgspec.Struct, frozen=True, array_like=True):
    """The header of one attempt."""

    key: Key
    remaining_s: float  # until its deadline, at the time of sending
    is_isolated: bool = False  # a suspect, which is computed alone
    # Its requests go to the same replica of a stateful stage.
    session: str | None = None
    via: dict[str, str] | None = None  # replicas that a probe must pass, by stage
    share: Share = DEFAULT_SHARE
    spent: Spent = NOTHING_SPENT


class Work(Message, frozen=True, tag="work"):
    """Gateway or replica → next stage: attempts; the frame has the tensors of each."""

    items: tuple[WorkItem, ...]


class AnswerItem(msgspec.Struct, frozen=True, array_like=True):
    """The header of one answer; today an answer is one part, which is the last."""

    attempt: Attempt
    is_last: bool = True
    spent: Spent = NOTHING_SPENT


class Answers(Message, frozen=True, tag="answers"):
    """Last stage → gateway: answers; the frame has the tensors of each."""

    items: tuple[AnswerItem, ...]
