"""Frames between keeper and gateways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.keeper.frames import (
    MAX_FRAME,
    Entry,
    FrameError,
    FrameReader,
    Kind,
    entry,
    frame,
)

ENTRIES = st.builds(
    Entry,
    st.sampled_from(Kind),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=50),
)


def packed(said: Entry) -> bytes:
    return entry(said.kind, said.connection, said.value, said.payload)


@given(st.lists(st.lists(ENTRIES, max_size=4), max_size=4), st.data())
def test_frames_come_whole_however_they_are_cut(
    frames: list[list[Entry]], data: st.DataObject
) -> None:
    sent = b"".join(frame(map(packed, each)) for each in frames)
    reader, found = FrameReader(), []
    while sent:
        size = data.draw(st.integers(1, len(sent)))
        found += list(reader.feed(sent[:size]))
        sent = sent[size:]
    assert found == frames


@given(st.lists(ENTRIES, min_size=1, max_size=4), st.data())
def test_frame_that_was_cut_off_is_not_applied(
    entries: list[Entry], data: st.DataObject
) -> None:
    sent = frame(map(packed, entries))
    size = data.draw(st.integers(0, len(sent) - 1))
    assert list(FrameReader().feed(sent[:size])) == []


@pytest.mark.parametrize(
    "data",
    [
        (MAX_FRAME + 1).to_bytes(4, "little"),
        frame([b"\x00" * 21]),  # a kind that does not exist
        frame([entry(Kind.BEAT)[:-1]]),
        frame([entry(Kind.INPUT, payload=b"1234")[:-1]]),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        list(FrameReader().feed(data))
