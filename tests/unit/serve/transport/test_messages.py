"""Messages on worlds: headers, bundles of many requests, and what cannot be read."""

from __future__ import annotations

import asyncio

import pytest
import torch

from multiworld.backends.base import Bundle
from multiworld.errors import MemberLeftError, WorldBrokenError
from multiworld.serve.transport.messages import (
    HEADER,
    pack,
    receive,
    receive_bundle,
    unpack,
)
from multiworld.serve.transport.protocol import (
    ANSWERS,
    CANCELS,
    NOTES,
    AnswerItem,
    Answers,
    Cancel,
    MessageError,
    Stuck,
)
from multiworld.testing import Arena
from tests.unit.serve.edges import break_world, settle

CANCEL = Cancel(("g", 1, 1))


def bundle(*names: str) -> Bundle:
    """Return a bundle with tensors of these names."""
    return Bundle({name: torch.ones(1) for name in names}, {}, 0)


def test_tensors_of_many_requests_travel_in_one_bundle() -> None:
    """Whatever their names: only the first point counts."""
    contents = [
        {"x": torch.tensor([1.0]), "a.b": torch.tensor([2.0])},
        {},
        {"x": torch.tensor([3.0]), "": torch.tensor([4.0])},
    ]
    packed = pack(contents)
    assert list(packed) == ["0.x", "0.a.b", "2.x", "2."]
    found = unpack(Bundle(packed, {}, 0), 3)
    assert [sorted(tensors) for tensors in found] == [["a.b", "x"], [], ["", "x"]]
    assert found[2]["x"].item() == 3.0


@pytest.mark.parametrize("name", ["2.x", "x", ".x", "one.x"])
def test_tensor_of_no_item_is_refused(name: str) -> None:
    """It is given to no other request."""
    with pytest.raises((IndexError, ValueError)):
        unpack(bundle("0.x", name), 2)


async def test_kinds_of_messages_do_not_wait_for_each_other() -> None:
    """A cancellation overtakes what was sent before it."""
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        note = Stuck(((1, 1),), 1)
        await left.send_object(NOTES.encode(note), dst=1, tag=NOTES.tag)
        await left.send_object(CANCELS.encode(CANCEL), dst=1, tag=CANCELS.tag)
        assert await receive(right, CANCELS, src=0) == CANCEL
        assert await receive(right, NOTES, src=0) == note


async def test_cancelled_receive_leaves_the_message_for_the_next() -> None:
    """Nothing is lost."""
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        for _ in range(3):
            waiting = asyncio.ensure_future(receive(right, CANCELS, src=0))
            await settle()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await left.send_object(CANCELS.encode(CANCEL), dst=1, tag=CANCELS.tag)
        assert await receive(right, CANCELS, src=0) == CANCEL


@pytest.mark.parametrize(
    "meta", [{}, {HEADER: None}, {HEADER: "1 []"}, {HEADER: 7}, {"other": "x"}]
)
async def test_bundle_without_its_header_is_refused(meta: dict[str, object]) -> None:
    """The next one is read."""
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        good = {HEADER: ANSWERS.encode(Answers((AnswerItem((1, 1)),)))}
        for one in (meta, good):
            tensors = {"0.x": torch.ones(1)}
            await left.send_bundle(tensors, dst=1, meta=one, tag=ANSWERS.tag)
        with pytest.raises(MessageError):
            await receive_bundle(right, ANSWERS, src=0)
        header, found = await receive_bundle(right, ANSWERS, src=0)
        assert header.items == (AnswerItem((1, 1)),)
        assert unpack(found, 1)[0]["x"].item() == 1.0


@pytest.mark.parametrize("is_polite", [True, False])
async def test_end_of_the_peer_is_raised(is_polite: bool) -> None:
    """What it sent before it left, or was lost, is received first."""
    async with Arena("memory") as arena:
        left, right = await arena.world(2)
        await left.send_object(CANCELS.encode(CANCEL), dst=1, tag=CANCELS.tag)
        if is_polite:
            await left.close()
        else:
            await break_world(left)
        assert await receive(right, CANCELS, src=0) == CANCEL
        with pytest.raises(MemberLeftError if is_polite else WorldBrokenError):
            await receive(right, CANCELS, src=0)
