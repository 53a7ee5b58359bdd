"""JSON frames: what is encoded comes back, and garbage is named."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.net import frames

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


def reader_of(data: bytes) -> asyncio.StreamReader:
    """Return a stream that brings these bytes and ends."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(max_size=5), plain, max_size=3))
def test_message_survives_encoding(message: dict[str, Any]) -> None:
    """The prefix gives the length of the body, and the body is the message."""
    frame = frames.encode(message)
    assert frames.decode_length(frame[:4]) == len(frame) - 4
    assert frames.decode_body(frame[4:]) == message


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_body_is_a_message_or_a_frame_error(body: bytes) -> None:
    """No bytes from outside raise anything else."""
    try:
        found = frames.decode_body(body)
    except frames.FrameError:
        return
    assert isinstance(found, dict)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"7", "not a JSON object"),
        (b"null", "not a JSON object"),
    ],
)
def test_wrong_body_is_refused(body: bytes, said: str) -> None:
    """The error tells broken JSON from JSON of the wrong kind."""
    with pytest.raises(frames.FrameError, match=said):
        frames.decode_body(body)


@pytest.mark.parametrize("prefix", [b"HTTP", b"GET ", b"\x16\x03\x01\x02", b"\xff" * 4])
def test_another_protocol_is_recognized_by_its_first_bytes(prefix: bytes) -> None:
    """HTTP and TLS announce absurd lengths, so nothing is allocated for them."""
    with pytest.raises(
        frames.FrameError, match="may not speak the multiworld protocol"
    ):
        frames.decode_length(prefix)


def test_limit_is_the_longest_body_allowed() -> None:
    """A body of exactly the limit passes, one byte more does not."""
    assert frames.decode_length(struct.pack(">I", 10), 10) == 10
    with pytest.raises(frames.FrameError):
        frames.decode_length(struct.pack(">I", 11), 10)


def test_too_long_message_is_not_sent() -> None:
    """The sender refuses what every receiver would refuse."""
    text = "x" * frames.MAX_FRAME_BYTES
    with pytest.raises(frames.FrameError, match="exceeds"):
        frames.encode({"text": text})


async def test_frames_are_read_one_after_the_other() -> None:
    """A read takes one frame and leaves the next in the stream."""
    reader = reader_of(frames.encode({"a": 1}) + frames.encode({"b": 2}))
    assert await frames.read(reader) == {"a": 1}
    assert await frames.read(reader) == {"b": 2}


@pytest.mark.parametrize("kept", [0, 3, 4, 8])
async def test_torn_frame_is_an_incomplete_read(kept: int) -> None:
    """The end of the stream within a frame is not a message."""
    reader = reader_of(frames.encode({"key": "value"})[:kept])
    with pytest.raises(asyncio.IncompleteReadError):
        await frames.read(reader)


async def test_read_refuses_a_frame_beyond_its_limit() -> None:
    """A stranger's frame is refused by its length, before its body arrives."""
    reader = asyncio.StreamReader()
    reader.feed_data(struct.pack(">I", 101))
    with pytest.raises(frames.FrameError):
        await frames.read(reader, limit=100)
