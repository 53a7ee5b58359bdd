"""Messages over lanes: bundles and objects, misfits, order, and cancelled callers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld import (
    ConfigError,
    MemberLeftError,
    TensorMismatchError,
    UnsupportedOperationError,
    World,
)
from multiworld.backends.bundles import (
    ALIGNMENT,
    decode_object,
    encode_object,
    lay_out,
    unpack_bundle,
)
from multiworld.backends.dtypes import CODES
from multiworld.testing import Arena
from tests.unit.waiting import turns

FLOAT = CODES[torch.float32]

tensors = st.builds(
    lambda shape, dtype: (
        torch.arange(int(torch.tensor(shape).prod()) or 0).to(dtype).view(shape)
        if shape
        else torch.tensor(3).to(dtype)
    ),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bfloat16]),
)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(st.text(max_size=5), tensors, max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(), max_size=3),
)
def test_bundle_survives_packing(
    given: dict[str, torch.Tensor], meta: dict[str, Any]
) -> None:
    layout = lay_out(given, meta)
    packed = layout.pack()
    found = unpack_bundle(packed, len(layout.manifest), 3)
    assert (found.meta, found.source) == (meta, 3)
    assert list(found.tensors) == list(given)
    for name, tensor in given.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
        offset = found.tensors[name].storage_offset() * tensor.element_size()
        assert offset % ALIGNMENT == 0


def test_strided_tensor_is_packed_as_its_values() -> None:
    for tensor in (torch.arange(6).view(2, 3).t(), torch.ones(1).expand(4)):
        layout = lay_out({"a": tensor}, {})
        found = unpack_bundle(layout.pack(), len(layout.manifest), 0)
        assert torch.equal(found.tensors["a"], tensor)


@pytest.mark.parametrize(
    ("given", "meta", "kind"),
    [
        ({5: torch.ones(1)}, {}, ConfigError),
        ({}, {"a": object()}, ConfigError),
        ({}, {"a": {1, 2}}, ConfigError),
        ({"a": torch.ones(1, device="meta")}, {}, TensorMismatchError),
        ({"a": [1.0]}, {}, (TensorMismatchError, ConfigError)),
    ],
)
def test_bundle_that_cannot_be_sent_is_refused(
    given: Any, meta: Any, kind: Any
) -> None:
    with pytest.raises(kind):
        lay_out(given, meta)


def unpacked(manifest: object, size: int = 256) -> object:
    text = json.dumps(manifest).encode()
    packed = torch.zeros(-(-len(text) // ALIGNMENT) * ALIGNMENT + size).to(torch.uint8)
    packed[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    return unpack_bundle(packed, len(text), 1)


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        [],
        [[], {}, 1],
        [1, {}],
        [[], 7],
        [[["a", FLOAT, [1]]], {}],
        [[["a", 255, [1], 0]], {}],
        [[["a", "x", [1], 0]], {}],
        [[["a", FLOAT, [-1], 0]], {}],
        [[["a", FLOAT, [1 << 40], 0]], {}],
        [[["a", FLOAT, [1 << 80], 0]], {}],
        [[["a", FLOAT, [1.5], 0]], {}],
        [[["a", FLOAT, "text", 0]], {}],
        [[["a", FLOAT, [1], -128]], {}],
        [[["a", FLOAT, [1], 1 << 70]], {}],
        [[["a", FLOAT, [1], 256]], {}],
        [[["a", FLOAT, [1], 1]], {}],
        [[["a", FLOAT, [1], None]], {}],
        [{"a": 1}, {}],
    ],
    ids=lambda m: json.dumps(m)[:40],
)
def test_manifest_that_does_not_fit_its_bytes_is_refused(manifest: object) -> None:
    """No tensor reaches beyond the message."""
    with pytest.raises(TensorMismatchError, match="whose manifest cannot be read"):
        unpacked(manifest)


@pytest.mark.parametrize(
    "manifest",
    [
        [[["a", FLOAT, [1], float("inf")]], {}],
        [[["a", float("inf"), [1], 0]], {}],
    ],
    ids=str,
)
def test_manifest_with_an_infinite_number_is_refused(manifest: object) -> None:
    """JSON may contain 1e999."""
    with pytest.raises(TensorMismatchError, match="whose manifest cannot be read"):
        unpacked(manifest)


entries = st.lists(
    st.tuples(
        st.text(max_size=2),
        st.integers(-1, 20),
        st.lists(st.integers(-2, 70) | st.integers(), max_size=3),
        st.integers(-70, 300),
    ),
    max_size=3,
)


@settings(deadline=None)
@given(entries)
def test_random_manifest_stays_within_its_message(entries: list[Any]) -> None:
    try:
        found: Any = unpacked([entries, {}])
    except TensorMismatchError:
        return
    for tensor in found.tensors.values():
        begin = tensor.storage_offset() * tensor.element_size()
        assert begin + tensor.nbytes <= tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"nope"])
def test_object_that_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(TensorMismatchError, match="not JSON"):
        decode_object(body)


def test_object_that_json_cannot_say_is_refused() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    for wrong in (object(), {1, 2}, b"bytes", cycle, {(1, 2): 3}):
        with pytest.raises(ConfigError):
            encode_object(wrong, "it")
    assert decode_object(encode_object({"a": [1, None, "é"]}, "it")) == {
        "a": [1, None, "é"]
    }


def test_object_that_is_too_deep_is_refused() -> None:
    """The error text must not fail for the same reason as the encoding."""
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError):
        encode_object(deep, "it")


# Over a world.


@pytest.fixture
async def worlds() -> AsyncIterator[list[World]]:
    async with Arena("memory") as arena:
        yield await arena.world(2)


async def test_misfit_stays_until_it_is_received_rightly(worlds: list[World]) -> None:
    left, right = worlds
    await left.send(torch.ones(3), dst=1)
    await left.send_bundle({"a": torch.ones(1)}, dst=1)
    await left.send_object([1], dst=1)
    with pytest.raises(TensorMismatchError, match=r"\[3\] of torch.float32"):
        await right.recv(torch.zeros(4), src=0)
    with pytest.raises(TensorMismatchError, match=r"receive it with recv$"):
        await right.recv_bundle(src=0)
    assert (await right.recv(src=0)).tolist() == [1.0] * 3
    with pytest.raises(TensorMismatchError, match="recv_bundle"):
        await right.recv(src=0)
    assert list((await right.recv_bundle(src=0)).tensors) == ["a"]
    with pytest.raises(TensorMismatchError, match="recv_object"):
        await right.recv(torch.zeros(1), src=0)
    assert await right.recv_object(src=0) == [1]


async def test_tensor_that_overlaps_itself_is_no_target(worlds: list[World]) -> None:
    """Several elements in one place cannot hold a message."""
    with pytest.raises(TensorMismatchError, match="overlaps itself"):
        await worlds[1].recv(torch.zeros(1).expand(3), src=0)
    with pytest.raises(TensorMismatchError, match="overlaps itself"):
        await worlds[1].recv(torch.zeros(5).unfold(0, 3, 1), src=0)
    with pytest.raises(TensorMismatchError, match="overlaps itself"):
        await worlds[1].recv(torch.zeros(9).as_strided((3, 3), (2, 1)), src=0)
    for view in (torch.zeros(4, 6)[::2, 1::3], torch.zeros(3, 3).t().diagonal()):
        await worlds[0].send(torch.ones(view.shape), dst=1)
        await worlds[1].recv(view, src=0)
        assert bool((view == 1).all())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
async def test_nested_tensor_is_refused_by_name(worlds: list[World]) -> None:
    """Its memory is not that of one dense tensor."""
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(TensorMismatchError, match="nested"):
        await worlds[0].send(nested, dst=1)
    with pytest.raises(TensorMismatchError, match="nested"):
        await worlds[0].all_reduce(nested)


async def test_outputs_that_share_memory_are_refused(worlds: list[World]) -> None:
    """Each rank's part would overwrite another's; adjacent memory is fine."""
    base = torch.zeros(6)
    with pytest.raises(TensorMismatchError, match="share memory"):
        await worlds[0].all_gather(torch.ones(3), [base[:3], base[2:5]])
    outs = [torch.zeros(3), torch.zeros(1).expand(3)]
    with pytest.raises(TensorMismatchError, match="overlaps itself"):
        await worlds[0].all_gather(torch.ones(3), outs)
    await asyncio.gather(
        worlds[0].all_gather(torch.ones(3), [base[:3], base[3:]]),
        worlds[1].all_gather(torch.ones(3)),
    )
    assert torch.equal(base, torch.ones(6))


async def test_strided_and_reshaped_targets_are_filled(worlds: list[World]) -> None:
    left, right = worlds
    target = torch.zeros(3, 2).t()
    await left.send(torch.arange(6.0), dst=1)
    assert await right.recv(target, src=0) is target
    assert target.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


async def test_sends_stay_in_call_order_while_one_is_prepared(
    worlds: list[World],
) -> None:
    left, right = worlds
    large = torch.ones(3_000, 1_000).t()
    sending = [
        asyncio.create_task(left.send(large, dst=1)),
        asyncio.create_task(left.send(torch.zeros(1), dst=1)),
        asyncio.create_task(left.send_object("last", dst=1)),
    ]
    assert (await right.recv(src=0)).numel() == 3_000_000
    assert (await right.recv(src=0)).tolist() == [0.0]
    assert await right.recv_object(src=0) == "last"
    await asyncio.gather(*sending)


async def test_cancelled_send_makes_room_for_the_next(worlds: list[World]) -> None:
    """A send that is cancelled while its copy is made sends nothing."""
    left, right = worlds
    large = torch.ones(3_000, 1_000).t()
    first = asyncio.create_task(left.send(large, dst=1))
    await turns(2)
    second = asyncio.create_task(left.send(torch.zeros(1), dst=1))
    await turns(2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert (await right.recv(src=0)).tolist() == [0.0]


async def test_cancelled_receive_loses_no_message(worlds: list[World]) -> None:
    left, right = worlds
    for cancel_first in (True, False):
        receiving = asyncio.create_task(right.recv(torch.zeros(1), src=0))
        await turns(3)
        if cancel_first:
            receiving.cancel()
        await left.send(torch.tensor([4.0]), dst=1)
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        if receiving.cancelled():
            assert (await right.recv(src=0)).tolist() == [4.0]
        else:
            assert receiving.result().tolist() == [4.0]


async def test_member_that_leaves_is_named_and_its_messages_remain(
    worlds: list[World],
) -> None:
    left, right = worlds
    await left.send(torch.ones(1), dst=1)
    waiting = asyncio.create_task(right.recv(src=0, tag=5))
    await turns(3)
    await left.close()
    with pytest.raises(MemberLeftError, match="rank 0"):
        await waiting
    assert (await right.recv(src=0)).tolist() == [1.0]
    for operation in (
        right.recv(src=0),
        right.send(torch.ones(1), dst=0),
        right.send_object(1, dst=0),
        right.barrier(),
    ):
        with pytest.raises(MemberLeftError):
            await operation


async def test_world_over_lanes_has_no_process_group(worlds: list[World]) -> None:
    with pytest.raises(UnsupportedOperationError, match="gloo"):
        _ = worlds[0].process_group
