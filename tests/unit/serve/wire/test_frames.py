"""Frames: messages that are packed and unpacked, and damaged frames."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.backends.bundles import ALIGNMENT
from multiworld.backends.dtypes import memory_of
from multiworld.errors import ModelFailedError, TensorMismatchError
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.frames import Entry, lay_out, unpack
from multiworld.serve.wire.inference_messages import (
    AnswerItem,
    Answers,
    BatchBegun,
    Cancel,
    CreditRefused,
    CreditReleased,
    Work,
    WorkDropped,
    WorkFailed,
    WorkItem,
    WorkReturned,
    WorkStuck,
)
from multiworld.serve.wire.protocol import PROTOCOL, MessageError, RemoteError

FULL = WorkItem(
    ("gateway/1", 4, 1), 2.5, True, "s", {"0": "m/0/1"}, Share("acme", 2.0, -1)
)
MESSAGES: list[EdgeMessage] = [
    BatchBegun(((1, 2), (3, 1)), is_isolated=True),
    WorkDropped(((1, 2),), 1),
    WorkReturned((), 0),
    WorkStuck(((2**40, 1),), 3),
    WorkFailed((4, 1), RemoteError.of(ModelFailedError("no", stage="head"))),
    CreditReleased((("g", 1, 1),)),
    CreditRefused((("g", 1, 1), ("h", 2, 3))),
    Cancel(("gateway/1", 7, 2)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensors = st.builds(
    lambda shape, dtype: torch.randint(0, 2, shape).to(dtype),
    shapes,
    st.sampled_from(DTYPES),
)
contents = st.lists(st.dictionaries(st.text(max_size=5), tensors, max_size=3))


def work(items: list[Tensors]) -> Entry:
    return Work((FULL,) * len(items)), items


def answers(items: list[Tensors]) -> Entry:
    return Answers(tuple(AnswerItem((n, 1)) for n in range(len(items)))), items


entries = st.lists(
    st.one_of(
        st.sampled_from(MESSAGES).map(lambda message: (message, [])),
        contents.map(work),
        contents.map(answers),
    )
)


def packed(*given: Entry) -> torch.Tensor:
    return lay_out(given).pack()


@settings(deadline=None)
@given(entries)
def test_messages_and_their_tensors_come_out_as_they_went_in(
    given_entries: list[Entry],
) -> None:
    frame = packed(*given_entries)
    agrees(unpack(frame), given_entries)
    memory = bytearray(memory_of(frame))
    found = unpack(memoryview(memory))
    memory[:] = bytes(len(memory))  # the tensors were copied out of it
    agrees(found, given_entries)


def agrees(
    found: list[tuple[EdgeMessage, list[Tensors]]], given_entries: list[Entry]
) -> None:
    assert [message for message, _ in found] == [m for m, _ in given_entries]
    for (_, before), (_, after) in zip(given_entries, found, strict=True):
        assert [list(one) for one in before] == [list(one) for one in after]
        for one, other in zip(before, after, strict=True):
            for name, tensor in one.items():
                assert other[name].dtype == tensor.dtype
                assert torch.equal(other[name], tensor)


def test_tensors_are_aligned_and_share_the_memory_of_the_frame() -> None:
    frame = packed(work([{"a": torch.ones(3), "b": torch.ones(1, dtype=torch.bool)}]))
    ((_, (content,)),) = unpack(frame)
    for tensor in content.values():
        offset = tensor.data_ptr() - frame.data_ptr()
        assert offset % ALIGNMENT == 0
        assert 0 < offset < frame.numel()


def test_tensors_of_any_layout_are_packed() -> None:
    large, small = torch.randn(300, 200).T, torch.arange(10)[::2]
    ((_, (content,)),) = unpack(packed(work([{"l": large, "s": small}])))
    assert torch.equal(content["l"], large)
    assert torch.equal(content["s"], small)


def test_tensor_that_cannot_be_sent_is_refused() -> None:
    raw = torch.empty(2, dtype=torch.bits8)
    with pytest.raises(TensorMismatchError, match="bits8 cannot be sent"):
        lay_out([work([{"x": raw}])])


def test_other_version_is_refused_by_name() -> None:
    frame = packed((MESSAGES[0], []))
    for version in (PROTOCOL + 1, 999):
        changed = frame.clone()
        lead = struct.pack("<H", version)
        changed[:2] = torch.frombuffer(bytearray(lead), dtype=torch.uint8)
        with pytest.raises(MessageError, match=f"version {version} .* {PROTOCOL - 1} "):
            unpack(changed)


def test_frame_that_is_cut_short_is_refused() -> None:
    frame = packed((MESSAGES[0], []), work([{"x": torch.ones(100)}]))
    for length in range(0, frame.numel(), 7):
        with pytest.raises(MessageError, match="malformed"):
            unpack(frame[:length])
        with pytest.raises(MessageError, match="malformed"):
            unpack(memory_of(frame)[:length])


@pytest.mark.parametrize("count", [0, 2])
def test_tensors_of_no_item_and_items_without_tensors_are_refused(count: int) -> None:
    """Another request must not get them."""
    with pytest.raises(MessageError, match=f"{count} contents for 1 items"):
        unpack(packed((Work((FULL,)), [{"x": torch.ones(1)}] * count)))


def test_frame_of_another_kind_is_refused() -> None:
    with pytest.raises(MessageError):
        unpack(torch.ones(100))
