"""Validation of the messages that replicas send about requests."""

from __future__ import annotations

import pytest
import torch

from multiworld.serve.gateway.requests.events import Submitted
from multiworld.serve.gateway.requests.reply_validation import check
from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.wire import inference_messages
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.inference_messages import AnswerItem
from multiworld.serve.wire.protocol import MessageError, RemoteError
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)

READY, DRAINING = ReplicaState.READY, ReplicaState.DRAINING
TABLE = RoutingTable(
    1,
    ("g",),
    {"m": Route("1", {"1": 2}, 10, 10), "other": Route("1", {"1": 1}, 10, 10)},
    {
        "first": Replica("first", "m", "1", 0, READY),
        "last": Replica("last", "m", "1", 1, READY),
        "other": Replica("other", "other", "1", 0, READY),
        "old": Replica("old", "m", "0", 1, DRAINING),
        "removed": Replica("removed", "removed", "1", 1, DRAINING),
    },
)
JOB = Submitted(
    number=7, model="m", deadline_at=9.0, share=DEFAULT_SHARE, rows=2, via=None
)
ERROR = RemoteError("ModelFailedError", "no")


def hear(
    peer: str,
    message: EdgeMessage,
    tensors: Tensors | None = None,
) -> None:
    """Check a message; request 7 was sent twice."""
    contents = [{"x": torch.zeros(2)} if tensors is None else tensors]
    check(
        message, contents, peer, TABLE, lambda number: (JOB, 2) if number == 7 else None
    )


@pytest.mark.parametrize("attempt", [(7, 1), (7, 2), (8, 99)])
@pytest.mark.parametrize(
    ("peer", "kind"),
    [
        ("last", lambda a: inference_messages.Answers((AnswerItem(a),))),
        ("first", lambda a: inference_messages.BatchBegun((a,), False)),
        ("last", lambda a: inference_messages.BatchBegun((a,), True)),
        ("first", lambda a: inference_messages.WorkDropped((a,), 1)),
        ("first", lambda a: inference_messages.WorkReturned((a,), 1)),
        ("first", lambda a: inference_messages.WorkStuck((a,), 1)),
        ("first", lambda a: inference_messages.WorkFailed(a, ERROR)),
        ("gone", lambda a: inference_messages.WorkFailed(a, ERROR)),
        ("old", lambda a: inference_messages.Answers((AnswerItem(a),))),
    ],
)
def test_messages_about_requests_sent_to_a_replica_are_accepted(
    peer: str, kind: object, attempt: tuple[int, int]
) -> None:
    """Requests that have ended are forgotten, so messages about them pass."""
    assert callable(kind)
    hear(peer, kind(attempt))


def test_replica_of_a_model_that_was_removed_still_answers() -> None:
    """It was sent requests before."""
    item = AnswerItem((7, 1))
    removed = Submitted(
        number=7, model="removed", deadline_at=9.0, share=DEFAULT_SHARE, rows=2
    )
    tensors = [{"x": torch.zeros(2)}]
    check(
        inference_messages.Answers((item,)),
        tensors,
        "removed",
        TABLE,
        lambda _: (removed, 1),
    )


@pytest.mark.parametrize(
    ("peer", "message"),
    [
        ("first", inference_messages.Answers((AnswerItem((7, 1)),))),
        ("other", inference_messages.Answers((AnswerItem((7, 1)),))),
        ("last", inference_messages.Answers((AnswerItem((7, 3)),))),
        ("last", inference_messages.Answers((AnswerItem((7, 0)),))),
        ("other", inference_messages.BatchBegun(((7, 1),), True)),
        ("other", inference_messages.WorkFailed((7, 1), ERROR)),
        ("first", inference_messages.WorkFailed((7, 77), ERROR)),
        ("first", inference_messages.WorkDropped(((7, 1),), 10**6)),
        ("first", inference_messages.WorkReturned(((7, 1),), 0)),
        ("other", inference_messages.WorkStuck(((7, 1),), 1)),
    ],
)
def test_messages_of_unauthorised_replicas_are_refused(
    peer: str, message: EdgeMessage
) -> None:
    """Refuse replicas of another model or stage, and attempts that were never made."""
    with pytest.raises(MessageError):
        hear(peer, message)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"x": torch.zeros(1)},
        {"x": torch.zeros(500)},
        {"x": torch.tensor(1.0)},
        {"x": torch.zeros(2), "y": torch.zeros(3)},
    ],
    ids=str,
)
def test_answer_has_a_row_for_each_row(tensors: Tensors) -> None:
    with pytest.raises(MessageError):
        hear("last", inference_messages.Answers((AnswerItem((7, 1)),)), tensors)
