"""Frames: encoding, decoding, and garbage."""

from __future__ import annotations

import json
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.net import frames
from multiworld.net.handshake_messages import Message


class Parcel(Message, frozen=True):
    number: int
    weight: float
    text: str
    ranks: tuple[int, ...]
    lost: int | None = None
    is_open: bool = False


class Receipt(Message, frozen=True):
    number: int


decoder = msgspec.json.Decoder[Parcel | Receipt](Parcel | Receipt)

parcels = st.builds(
    Parcel,
    number=st.integers(),
    weight=st.floats(allow_nan=False, allow_infinity=False),
    text=st.text(max_size=5),
    ranks=st.lists(st.integers(), max_size=3).map(tuple),
    lost=st.none() | st.integers(),
    is_open=st.booleans(),
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)

fields = st.fixed_dictionaries(
    {},
    optional={
        "op": st.sampled_from(["Parcel", "Receipt"]) | plain,
        "number": plain,
        "weight": plain,
        "text": plain,
        "ranks": plain,
    },
)


@settings(max_examples=30, deadline=None)
@given(parcels)
def test_message_survives_encoding(message: Parcel) -> None:
    frame = frames.encode(message)
    assert frames.decode_length(frame[:4]) == len(frame) - 4
    assert frames.decode_body(frame[4:], decoder) == message


@settings(deadline=None)
@given(st.binary(max_size=200) | fields.map(json.dumps).map(str.encode))
def test_random_body_is_a_message_or_a_frame_error(body: bytes) -> None:
    try:
        found = frames.decode_body(body, decoder)
    except frames.FrameError:
        return
    assert isinstance(found, Parcel | Receipt)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"\xff\xfe\x00", "malformed"),
        (b'{"op":"Receipt","number":1} trailing', "malformed"),
        (b"[" * 200_000, "Expected `object`"),
        (b'{"op":"Receipt","number":1,"x":' + b"[" * 200_000, "recursion"),
        (b"[]", "Expected `object`, got `array`"),
        (b'"text"', "Expected `object`, got `str`"),
        (b"7", "Expected `object`, got `int`"),
        (b"null", "Expected `object`, got `null`"),
        (b"{}", "missing required field `op`"),
        (b'{"op":["Receipt"]}', "Expected `str` - at `$.op`"),
        (b'{"op":"Letter"}', "Invalid value 'Letter'"),
        (b'{"op":"Receipt"}', "missing required field `number`"),
        (b'{"op":"Receipt","number":null}', "Expected `int`, got `null`"),
        (b'{"op":"Receipt","number":"1"}', "Expected `int`, got `str`"),
        (b'{"op":"Receipt","number":true}', "Expected `int`, got `bool`"),
        (b'{"op":"Receipt","number":1.5}', "Expected `int`, got `float`"),
        (b'{"op":"Receipt","number":1e999}', "out of range"),
        (b'{"op":"Receipt","number":' + b"9" * 10_000 + b"}", "out of range"),
        (b'{"op":"Receipt","number":NaN}', "malformed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_body_is_refused(body: bytes, said: str) -> None:
    """The error tells broken JSON from JSON of the wrong kind."""
    with pytest.raises(frames.FrameError, match="not a valid message") as refused:
        frames.decode_body(body, decoder)
    assert said in str(refused.value)


def test_field_that_is_not_known_is_ignored() -> None:
    """A later release may send more fields."""
    body = b'{"op":"Receipt","number":1,"signed":true}'
    assert frames.decode_body(body, decoder) == Receipt(1)


@pytest.mark.parametrize("prefix", [b"HTTP", b"GET ", b"\x16\x03\x01\x02", b"\xff" * 4])
def test_another_protocol_is_recognized_by_its_first_bytes(prefix: bytes) -> None:
    """HTTP and TLS announce absurd lengths, so nothing is allocated for them."""
    with pytest.raises(
        frames.FrameError, match="may not speak the multiworld protocol"
    ):
        frames.decode_length(prefix)


def test_limit_is_the_longest_body_allowed() -> None:
    assert frames.decode_length(struct.pack(">I", 10), 10) == 10
    with pytest.raises(frames.FrameError):
        frames.decode_length(struct.pack(">I", 11), 10)


def test_too_long_message_is_not_sent() -> None:
    """The sender refuses what every receiver would refuse."""
    text = "x" * frames.MAX_FRAME_BYTES
    with pytest.raises(frames.FrameError, match="exceeds"):
        frames.encode(Parcel(1, 1.0, text, ()))
