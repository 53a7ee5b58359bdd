"""Control messages and hellos of managers, valid and invalid."""

from __future__ import annotations

import json

import msgspec
import pytest

from multiworld.liveness.manager_messages import (
    Broken,
    Bye,
    ControlMessage,
    DatagramsAt,
    EndCollectives,
    HeartbeatHello,
    LaneHello,
    Left,
    LinkHello,
    ManagerHello,
    OpenLane,
    ProbeHello,
    Ready,
    control_messages,
)
from multiworld.net import frames
from multiworld.net.frames import FrameError

hellos = msgspec.json.Decoder[ManagerHello](ManagerHello)

BROKEN = {
    "op": "Broken",
    "nonce": 1,
    "rank": 2,
    "reason": "it died",
    "evidence": "the kernel",
    "silent_s": 0.5,
}
LANE = {"kind": "lane", "to_uid": "b", "nonce": 1, "rank": 2, "channel": "p2p"}


@pytest.mark.parametrize(
    "message",
    [
        Bye(),
        DatagramsAt(5, 1),
        Ready(1 << 62),
        Left(1, is_broken=True),
        Broken(1, 2, "it died", "the kernel", 0.5),
        Broken(1, None, "garbage", "", 0.0),
        OpenLane(1),
        EndCollectives(1, 7, 2),
    ],
)
def test_message_survives_its_frame(message: ControlMessage) -> None:
    body = frames.encode(message)[4:]
    assert frames.decode_body(body, control_messages) == message


@pytest.mark.parametrize(
    "hello",
    [
        LinkHello(uid="a", to_uid="b", host="h0", to_host="h1", seal="00"),
        HeartbeatHello(uid="a", to_uid="b", host="h0", to_host="h1", number=1),
        ProbeHello(to_uid="b"),
        LaneHello(to_uid="b", nonce=1, rank=2, channel="p2p"),
    ],
)
def test_hello_survives_its_frame(hello: ManagerHello) -> None:
    assert frames.decode_body(frames.encode(hello)[4:], hellos) == hello


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"op": None},
        {"op": ["Ready"], "nonce": 1},
        {"op": "new in a later release", "nonce": 1},
        {"op": "Ready"},
        {"op": "Ready", "nonce": None},
        {"op": "Ready", "nonce": "1"},
        {"op": "Left", "nonce": 1},
        {"op": "Left", "nonce": 1, "is_broken": 0},
        {"op": "Broken", "nonce": 1},
        {"op": "Broken", "nonce": 1, "rank": 2},
        {**BROKEN, "nonce": [1]},
        {**BROKEN, "rank": "x"},
        {**BROKEN, "rank": float("inf")},
        {**BROKEN, "reason": None},
        {**BROKEN, "evidence": {}},
        {**BROKEN, "silent_s": "0.5"},
        {**BROKEN, "silent_s": float("nan")},
        {"op": "OpenLane"},
        {"op": "EndCollectives", "nonce": 1},
        {"op": "EndCollectives", "nonce": 1, "number": [], "left": 1},
        {"op": "EndCollectives", "nonce": 1, "number": 1, "left": None},
        {"op": "DatagramsAt"},
        *(
            {"op": "DatagramsAt", "port": port, "number": 1}
            for port in (None, "5", 1.5, [1], True)
        ),
    ],
    ids=str,
)
def test_message_with_a_missing_or_wrong_field_is_refused(
    message: dict[str, object],
) -> None:
    """The link of the sender ends with this error; nothing else happens."""
    with pytest.raises(FrameError):
        frames.decode_body(json.dumps(message).encode(), control_messages)


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"kind": None},
        {"kind": ["lane"]},
        {"kind": "new in a later release"},
        {"kind": "link"},
        {"kind": "beat", "uid": "a", "to_uid": "b", "host": "h0"},
        {"kind": "probe", "to_uid": 1},
        {**LANE, "nonce": "x"},
        {**LANE, "nonce": float("inf")},
        {**LANE, "rank": None},
        {**LANE, "channel": 5},
        {name: value for name, value in LANE.items() if name != "rank"},
    ],
    ids=str,
)
def test_hello_with_a_missing_or_wrong_field_is_refused(
    hello: dict[str, object],
) -> None:
    """The connection ends, and nothing else happens."""
    with pytest.raises(FrameError):
        frames.decode_body(json.dumps(hello).encode(), hellos)


def test_field_that_is_not_known_is_ignored() -> None:
    """A later release may send more fields."""
    body = json.dumps({**BROKEN, "since_s": 3.0}).encode()
    found = frames.decode_body(body, control_messages)
    assert found == Broken(1, 2, "it died", "the kernel", 0.5)
    lane = json.dumps({**LANE, "width": 4}).encode()
    assert frames.decode_body(lane, hellos) == LaneHello(
        to_uid="b", nonce=1, rank=2, channel="p2p"
    )
