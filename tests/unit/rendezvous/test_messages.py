"""Messages that a store and its members accept from each other, or refuse."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from multiworld.config import MAX_WAIT_S
from multiworld.net import frames
from multiworld.rendezvous import store_messages
from multiworld.rendezvous.store_messages import (
    MAX_EPOCH,
    MAX_SIZE,
    AddAmount,
    Admitted,
    Announce,
    AskHolds,
    CheckKeys,
    Claim,
    ClaimOutcome,
    ClaimReceived,
    CompareSet,
    GetValues,
    HoldsAnswer,
    JoinTimedOut,
    Leave,
    MemberGaveUp,
    NewcomerWaits,
    NoValue,
    RankTaken,
    Reply,
    Result,
    SealedMember,
    SetValue,
    Stale,
    SurvivorClaim,
    TermsDiffer,
    VersionDiffers,
    Withdraw,
)
from tests.unit.rendezvous.sessions import (
    claim_of,
    member_of,
    sealed_of,
    survivor_of,
    values_of,
)

CLAIM = claim_of(1, 0, 2)
SURVIVOR = survivor_of(1, 0, 2, lost=frozenset({1}))
LEAVE = Leave("w", 1, 0)
ANNOUNCE = Announce("w", 1, 0, "a")
GET = GetValues(1, ("k",), 1.0)


def body_of(message: msgspec.Struct) -> bytes:
    return frames.encode(message)[4:]


@pytest.mark.parametrize(
    "message",
    [
        CLAIM,
        claim_of(1, MAX_SIZE - 1, MAX_SIZE, seen=MAX_EPOCH - 1, deadline_s=MAX_WAIT_S),
        SURVIVOR,
        Withdraw(1),
        ANNOUNCE,
        LEAVE,
        Leave("w", 1, 0, (2, 3)),
        HoldsAnswer(1, True),
        SetValue(1, "k", bytes(range(256)).decode("latin-1")),
        GET,
        CheckKeys(1, ()),
        AddAmount(1, "n", -(1 << 62)),
        CompareSet(1, "k", "", "new"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_store_reads_what_a_member_sent(message: msgspec.Struct) -> None:
    assert frames.decode_body(body_of(message), store_messages.requests) == message


OUTCOMES: list[ClaimOutcome | Result | NoValue] = [
    Admitted(1, (1 << 63) - 1, (sealed_of(0), SealedMember(member_of(1), "proof"))),
    JoinTimedOut((0,), (1, 2)),
    Stale(7),
    RankTaken(),
    TermsDiffer("rank 0 asked for less"),
    VersionDiffers(9, "it is new"),
    *(Result(value) for value in (True, 3, "v", ["v", ""], None)),
    NoValue(),
]


@pytest.mark.parametrize(
    "message",
    [
        ClaimReceived(1),
        AskHolds(1, "w", 2, 0),
        NewcomerWaits("w", 1, 2, 3, True),
        MemberGaveUp("w", 1, 2),
        *(Reply(1, outcome) for outcome in OUTCOMES),
    ],
    ids=lambda message: type(getattr(message, "outcome", message)).__name__,
)
def test_member_reads_what_a_store_sent(message: msgspec.Struct) -> None:
    found = frames.decode_body(body_of(message), store_messages.replies)
    assert found == message
    if isinstance(found, Reply) and isinstance(found.outcome, Result):
        assert isinstance(message, Reply)
        assert isinstance(message.outcome, Result)
        assert type(found.outcome.value) is type(message.outcome.value)


WRONG_FIELDS: list[dict[str, Any]] = [
    {"request": None},
    {"rank": -1},
    {"rank": 0.5},
    {"size": 0},
    {"size": 10**6},
    {"size": None},
    {"deadline_s": -1},
    {"deadline_s": "soon"},
    {"seen": -1},
    {"seen": MAX_EPOCH},
    {"member": "text"},
    {"member": 5},
    {"member": {"member": {}}},
    {"place": [0]},
    {"place": [0, 1, 2]},
    {"place": 7},
]

GARBAGE: list[Any] = [
    [],
    None,
    "Claim",
    {},
    {"op": "unknown", "request": 1},
    {"op": None, "request": 1},
    {"op": ["Claim"], "request": 1},
    {"op": "Claim"},
    {"op": "Withdraw"},
    values_of(AskHolds(1, "w", 1, 0)),  # the store's own message
    values_of(SetValue(1, "k", "v"), request="x"),
    values_of(SetValue(1, "k", "v"), key=5),
    values_of(GET, keys=5),
    values_of(GET, keys=[5]),
    values_of(GET, deadline_s=None),
    values_of(GET, deadline_s=-1),
    values_of(GET, deadline_s=2 * MAX_WAIT_S),
    values_of(AddAmount(1, "k", 1), amount="many"),
    values_of(AddAmount(1, "k", 1), amount=0.5),
    values_of(LEAVE, lost=3),
    values_of(LEAVE, lost=[-1]),
    values_of(LEAVE, epoch=None),
    values_of(HoldsAnswer(1, True), ask=[]),
    values_of(HoldsAnswer(1, True), holds="yes"),
    values_of(ANNOUNCE, epoch="x"),
    values_of(ANNOUNCE, rank=MAX_SIZE),
    *({**values_of(CLAIM), **fields} for fields in WRONG_FIELDS),
    values_of(SURVIVOR, lost=[-1]),
    values_of(SURVIVOR, epoch=MAX_EPOCH),
]


@pytest.mark.parametrize("value", GARBAGE, ids=lambda v: json.dumps(v)[:60])
def test_garbage_is_no_request(value: object) -> None:
    with pytest.raises(frames.FrameError):
        frames.decode_body(json.dumps(value).encode(), store_messages.requests)


def test_incomplete_claim_is_a_frame_error() -> None:
    for claim in (CLAIM, SURVIVOR):
        for name in values_of(claim):
            rest = {
                key: value for key, value in values_of(claim).items() if key != name
            }
            with pytest.raises(frames.FrameError):
                frames.decode_body(json.dumps(rest).encode(), store_messages.requests)


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "1e999", "-1e999", "1" + 400 * "0", 5000 * "9"]
)
@pytest.mark.parametrize(
    ("message", "field"),
    [
        (CLAIM, "rank"),
        (CLAIM, "seen"),
        (CLAIM, "deadline_s"),
        (LEAVE, "epoch"),
        (GET, "deadline_s"),
    ],
)
def test_number_beyond_a_float_is_no_request(
    message: msgspec.Struct, field: str, number: str
) -> None:
    """JSON can contain 1e999 and integers of any length; a timer at NaN never rests."""
    body = json.dumps(values_of(message, **{field: "here"}))
    wrong = body.replace('"here"', number).encode()
    with pytest.raises(frames.FrameError):
        frames.decode_body(wrong, store_messages.requests)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"op":"AddAmount","request":1,"key":"\xff","amount":1}',
        b'{"op":"AddAmount","request":1,"key":"\\ud800","amount":1}',
        b'{"op":"Withdraw","request":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_is_no_json_is_no_message(body: bytes) -> None:
    with pytest.raises(frames.FrameError):
        frames.decode_body(body, store_messages.requests)
    with pytest.raises(frames.FrameError):
        frames.decode_body(body, store_messages.replies)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"op": "unknown", "request": 1},
        {"op": "AskHolds"},
        {"op": "AskHolds", "world": "w", "epoch": 1, "rank": 0},
        {"op": "AskHolds", "world": "w", "rank": 0, "ask": 1},
        {"op": "Reply", "request": 1},
        values_of(Reply(1, RankTaken()), outcome={}),
        values_of(Reply(1, RankTaken()), outcome={"op": "ClaimReceived", "request": 1}),
        values_of(Reply(1, Result(1)), outcome={"op": "Result", "value": 0.5}),
        values_of(CLAIM),  # the member's own message
    ],
    ids=lambda v: json.dumps(v)[:60],
)
def test_garbage_is_no_reply(value: object) -> None:
    with pytest.raises(frames.FrameError):
        frames.decode_body(json.dumps(value).encode(), store_messages.replies)


def test_sealed_member_keeps_its_proof_at_another_rank() -> None:
    """The store assigns the rank, so the proof does not cover it."""
    sealed = SealedMember(member_of(3, "u"), "proof")
    assert sealed.at(1) == SealedMember(member_of(1, "u"), "proof")


def test_both_claims_are_distinguished() -> None:
    """The tag decides, not the fields."""
    for claim in (CLAIM, SURVIVOR):
        found = frames.decode_body(body_of(claim), store_messages.requests)
        assert type(found) is type(claim)
    assert {type(CLAIM), type(SURVIVOR)} == {Claim, SurvivorClaim}
