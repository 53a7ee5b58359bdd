"""Checks of point-to-point messages: content, order and cancelling."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from multiworld.errors import (
    ConfigError,
    MemberLeftError,
    TensorMismatchError,
    UnsupportedOperationError,
)
from multiworld.testing.arena import Arena
from multiworld.world.world import World
from tests.contract.backends.harness import (
    DTYPES,
    check,
    expect,
    raised_by,
    same,
    some,
)


@check
async def sends_every_dtype(arena: Arena) -> None:
    left, right = await arena.world(2)
    for dtype in DTYPES:
        tensor = some((3, 5), dtype)
        await asyncio.gather(left.send(tensor, dst=1), expect(right, tensor))


@check
async def sends_every_shape(arena: Arena) -> None:
    left, right = await arena.world(2)
    base = some((6, 8), torch.float32)
    shapes = [torch.tensor(7.0), torch.empty(0), torch.empty(3, 0, 2), base.t()]
    shapes += [base[::2, 1::3], base[0].expand(4, 8), base.view(1, 1, 6, 8)]
    for tensor in shapes:
        await asyncio.gather(left.send(tensor, dst=1), expect(right, tensor))


@check
async def receives_into_given_tensors(arena: Arena) -> None:
    left, right = await arena.world(2)
    tensor = some((4, 6), torch.int32)
    outs = [torch.zeros(4, 6, dtype=torch.int32), torch.zeros(24, dtype=torch.int32)]
    outs.append(torch.zeros(6, 4, dtype=torch.int32).t())
    for out in outs:
        sending = asyncio.ensure_future(left.send(tensor, dst=1))
        got = await right.recv(out, src=0)
        await sending
        assert got is out
        assert torch.equal(out.reshape(4, 6), tensor)


@check
async def sends_large_tensors(arena: Arena) -> None:
    left, right = await arena.world(2)
    one, other = torch.randn(1_500_003), torch.randn(1_200_001)
    await asyncio.gather(
        left.send(one, dst=1),
        right.send(other, dst=0),
        expect(right, one),
        expect(left, other, src=1),
    )


@check
async def keeps_order_of_each_tag(arena: Arena) -> None:
    left, right = await arena.world(2)

    async def send() -> None:
        for i in range(20):
            await left.send(torch.tensor(i), dst=1, tag=i % 2)

    sending = asyncio.ensure_future(send())
    odd: list[int] = []
    even: list[int] = []

    async def receive(tag: int, into: list[int]) -> None:
        into.extend([int(await right.recv(src=0, tag=tag)) for _ in range(10)])

    await asyncio.gather(receive(1, odd), receive(0, even), sending)
    assert odd == list(range(1, 20, 2))
    assert even == list(range(0, 20, 2))


@check
async def keeps_order_of_concurrent_sends(arena: Arena) -> None:
    left, right = await arena.world(2)
    count = 200 if arena.config.host_p2p == "direct" else 20
    tensors = [torch.tensor([i]) for i in range(count)]
    tensors[7] = torch.full((2000, 1000), 7).t()  # must be copied before it is sent
    sending = asyncio.gather(*(left.send(t, dst=1) for t in tensors))
    got = [int((await right.recv(src=0)).reshape(-1)[0]) for _ in tensors]
    await sending
    assert got == list(range(count))


@check
async def serves_receives_in_call_order(arena: Arena) -> None:
    left, right = await arena.world(2)
    pending = [asyncio.ensure_future(right.recv(src=0)) for _ in range(5)]
    await asyncio.sleep(0)
    for i in range(5):
        await left.send(torch.tensor(i), dst=1)
    assert [int(await receive) for receive in pending] == [0, 1, 2, 3, 4]


@check
async def serves_receives_in_call_order_while_messages_wait(arena: Arena) -> None:
    left, right = await arena.world(2)
    count = 200 if arena.config.host_p2p == "direct" else 20
    sending = asyncio.gather(*(left.send(torch.tensor(i), dst=1) for i in range(count)))
    got: list[int] = []
    while len(got) < count:
        pair = await asyncio.gather(right.recv(src=0), right.recv(src=0))
        got += [int(tensor) for tensor in pair]
    await sending
    assert got == list(range(count))


@check
async def receives_from_whoever_is_first(arena: Arena) -> None:
    if arena.config.host_p2p == "backend":
        return  # refused, because torch's own call never notices a lost member
    worlds = await arena.world(3)
    sending = asyncio.ensure_future(worlds[2].send(torch.tensor(2), dst=0))
    source, tensor = await worlds[0].recv_any()
    await sending
    assert (source, int(tensor)) == (2, 2)
    pending = asyncio.ensure_future(worlds[0].recv_any())
    await asyncio.sleep(0)
    await worlds[1].send(torch.tensor(1), dst=0)
    source, tensor = await pending
    assert (source, int(tensor)) == (1, 1)


@check
async def sends_bundles_and_objects(arena: Arena) -> None:
    left, right = await arena.world(2)
    tensors = {
        "a": some((2, 3), torch.bfloat16),
        "b": torch.empty(0),
        "ä": some((), torch.bool),
        "turned": some((300, 70), torch.float32).t(),
        "one": some((1, 3), torch.float32).expand(4, 3),
    }
    meta = {"id": 7, "path": ["x", None, 1.5], "deep": {"ok": True}}
    sending = asyncio.ensure_future(left.send_bundle(tensors, meta=meta, dst=1))
    bundle = await right.recv_bundle(src=0)
    await sending
    assert bundle.meta == meta
    assert list(bundle.tensors) == list(tensors)
    assert all(same(bundle.tensors[name], tensors[name]) for name in tensors)
    sending = asyncio.ensure_future(left.send_object({"stop": [1, "2"]}, dst=1))
    assert await right.recv_object(src=0) == {"stop": [1, "2"]}
    await sending


@check
async def passes_tensors_to_a_handler(arena: Arena) -> None:
    left, right = await arena.world(2)
    got: list[Tensor] = []

    async def handle() -> None:
        right.handle(got.append, src=0, tag=1)

    if arena.config.host_p2p == "backend":
        # Torch's own receive blocks a thread, so no handler can wait for tensors.
        assert isinstance(await raised_by(handle()), UnsupportedOperationError)
        return
    sizes = (3, 2_000_000, 5, 300_000, 0, 2_000_000, 1)
    tensors = [some((size,), torch.float32) for size in sizes]
    early = [asyncio.ensure_future(left.send(t, dst=1, tag=1)) for t in tensors[:3]]
    await asyncio.sleep(0.01)
    await handle()
    await asyncio.gather(*early)
    for tensor in tensors[3:]:
        await left.send(tensor, dst=1, tag=1)
    kept = asyncio.ensure_future(left.send_object("kept", dst=1, tag=1))
    await asyncio.gather(left.send(tensors[0], dst=1), expect(right, tensors[0]))
    assert await right.recv_object(src=0, tag=1) == "kept"
    await kept
    await left.close()
    error = await raised_by(right.recv(src=0))
    assert isinstance(error, MemberLeftError), error
    assert len(got) == len(tensors)
    assert all(same(one, other) for one, other in zip(got, tensors, strict=True))


@check
async def lets_a_handler_peek(arena: Arena) -> None:
    """Check that a handler may read bytes in place, in order with other tensors."""
    if arena.config.host_p2p == "backend":
        return  # such a world has no handlers
    left, right = await arena.world(2)
    got: list[bytes] = []
    right.handle(
        lambda tensor: got.append(bytes(tensor.view(torch.uint8).tolist())),
        src=0,
        tag=1,
        peek=lambda memory: got.append(bytes(memory)),
    )
    sent = [some((size,), torch.uint8) for size in (3, 300_000, 0, 70_000, 5)]
    sent.insert(2, some((7,), torch.float32))
    for tensor in sent:
        await left.send(tensor, dst=1, tag=1)
    await left.close()
    await raised_by(right.recv(src=0))
    wanted = [bytes(tensor.view(torch.uint8).tolist()) for tensor in sent]
    assert got == wanted


@check
async def refuses_objects_that_are_not_plain(arena: Arena) -> None:
    left, _ = await arena.world(2)
    for thing in (object(), {1, 2}, torch.ones(1), b"bytes"):
        error = await raised_by(left.send_object(thing, dst=1))
        assert isinstance(error, ConfigError), error


@check
async def keeps_a_message_that_does_not_fit(arena: Arena) -> None:
    left, right = await arena.world(2)
    tensor = some((4,), torch.float32)
    sending = asyncio.ensure_future(left.send(tensor, dst=1))
    for out in (torch.zeros(3), torch.zeros(4, dtype=torch.int32), torch.zeros(5)):
        error = await raised_by(right.recv(out, src=0))
        assert isinstance(error, TensorMismatchError), error
    if arena.config.host_p2p == "direct":
        assert isinstance(
            await raised_by(right.recv_object(src=0)), TensorMismatchError
        )
        assert isinstance(
            await raised_by(right.recv_bundle(src=0)), TensorMismatchError
        )
    await expect(right, tensor)
    await sending


@check
async def refuses_ranks_and_tags_that_cannot_be(arena: Arena) -> None:
    left, right = await arena.world(2)
    one = torch.ones(1)
    steps: list[Awaitable[Any]] = [
        left.send(one, dst=2),
        left.send(one, dst=-1),
        left.send(one, dst=0),
        left.send(one, dst="1"),  # type: ignore[arg-type]
        left.send(one, dst=1, tag=-1),
        left.recv(src=5),
        left.broadcast(one, src=9),
    ]
    for step in steps:
        assert isinstance(await raised_by(step), ConfigError)
    error = await raised_by(left.send([1, 2], dst=1))  # type: ignore[arg-type]
    assert isinstance(error, TensorMismatchError)
    error = await raised_by(left.send(torch.ones(2).to_sparse(), dst=1))
    assert isinstance(error, TensorMismatchError)
    error = await raised_by(left.send(torch.ones(2, device="meta"), dst=1))
    assert isinstance(error, TensorMismatchError)
    await asyncio.gather(left.send(one, dst=1), expect(right, one))


@check
async def cancelling_a_receive_loses_nothing(arena: Arena) -> None:
    if arena.config.host_p2p == "backend":
        return  # documented: torch's own receive cannot be withdrawn
    left, right = await arena.world(2)
    for size in (1, 300_000):
        tensor = torch.randn(size)
        pending = asyncio.ensure_future(right.recv(torch.empty(size), src=0))
        await asyncio.sleep(0)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await asyncio.gather(left.send(tensor, dst=1), expect(right, tensor))


@check
async def cancelling_several_receives_keeps_the_order(arena: Arena) -> None:
    if arena.config.host_p2p == "backend":
        return  # documented: torch's own receive cannot be withdrawn
    left, right = await arena.world(2)
    pending = [asyncio.ensure_future(right.recv(src=0)) for _ in range(3)]
    await asyncio.sleep(0)
    sending = asyncio.gather(*(left.send(torch.tensor(i), dst=1) for i in range(3)))
    for _ in range(3):
        await asyncio.sleep(0)
    for task in pending:
        task.cancel()
    results = await asyncio.gather(*pending, return_exceptions=True)
    got = [int(r) for r in results if isinstance(r, Tensor)]
    got += [int(await right.recv(src=0)) for _ in range(3 - len(got))]
    await sending
    assert got == [0, 1, 2]


@check
async def cancelling_one_receive_keeps_the_order_of_the_others(arena: Arena) -> None:
    if arena.config.host_p2p == "backend":
        return  # documented: torch's own receive cannot be withdrawn
    sender, receiver = await arena.world(2)
    count = 6
    for size in (10, 100_000):
        for victim, is_given, turns in product((0, 1, 3), (False, True), range(12)):
            outs = [torch.empty(size) if is_given else None for _ in range(count)]
            tasks = [asyncio.create_task(receiver.recv(out, src=0)) for out in outs[:4]]
            await asyncio.sleep(0)
            sending = asyncio.create_task(_send_numbered(sender, count, size))
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks[victim].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            got = [f for f in found if isinstance(f, Tensor)]
            late = [await receiver.recv(src=0) for _ in range(count - len(got))]
            numbers = [int(tensor[0]) for tensor in [*got, *late]]
            assert numbers == list(range(count)), (size, victim, is_given, turns)
            assert all(bool((t == t[0]).all()) for t in [*got, *late])
            await sending


async def _send_numbered(sender: World, count: int, size: int) -> None:
    for number in range(count):
        await sender.send(torch.full((size,), float(number)), dst=1)


@check
async def cancelling_a_send_sends_all_or_nothing(arena: Arena) -> None:
    if arena.config.host_p2p == "backend":
        return  # documented: torch's own send cannot be withdrawn
    left, right = await arena.world(2)
    big, small = torch.randn(4_000_000), torch.tensor([1.0, 2.0])
    sending = asyncio.ensure_future(left.send(big, dst=1))
    for _ in range(3):
        await asyncio.sleep(0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    after = asyncio.ensure_future(left.send(small, dst=1))
    got = await right.recv(src=0)
    if got.numel() == big.numel():  # all of it was sent before it was cancelled
        assert same(got, big)
        got = await right.recv(src=0)
    await after
    assert same(got, small)
