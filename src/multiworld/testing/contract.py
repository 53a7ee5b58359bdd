"""What every backend promises, as checks that run on any of them.

Each check is an ``async`` function of an ``Arena``. A backend is done when all of
``CHECKS`` pass on it; those it cannot carry are listed where they are skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.errors import (
    ConfigError,
    MemberLeftError,
    TensorMismatchError,
    UnsupportedOperationError,
    WorldBrokenError,
    WorldClosedError,
)
from multiworld.testing.arena import Arena
from multiworld.world import World

Check = Callable[[Arena], Awaitable[None]]
CHECKS: list[Check] = []

HANG_S = 20.0
"""A check that takes longer hangs."""

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def check(function: Check) -> Check:
    """Add a check to the suite, bounded in time."""

    async def bounded(arena: Arena) -> None:
        async with asyncio.timeout(HANG_S):
            await function(arena)

    bounded.__name__, bounded.__doc__ = function.__name__, function.__doc__
    CHECKS.append(bounded)
    return bounded


def same(one: Tensor, other: Tensor) -> bool:
    """Compare bytes, shape and dtype: works for every dtype, NaN included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    flat = one.contiguous().view(-1).view(torch.uint8)
    return torch.equal(flat, other.contiguous().view(-1).view(torch.uint8))


def some(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose elements differ."""
    count = 1
    for extent in shape:
        count *= extent
    return (torch.arange(count) % 100).to(dtype).view(shape)


async def every(worlds: list[World], call: Callable[..., Awaitable[Any]]) -> Any:
    """Let every member do the same; return the results by rank."""
    return await asyncio.gather(*(call(world) for world in worlds))


async def raised_by(step: Awaitable[Any]) -> BaseException | None:
    """Return the error of a step, or None."""
    try:
        await step
    except Exception as error:
        return error
    return None


# Point to point.


@check
async def sends_every_dtype(arena: Arena) -> None:
    """A tensor of any dtype arrives as it was, dtype and shape included."""
    left, right = await arena.world(2)
    for dtype in DTYPES:
        tensor = some((3, 5), dtype)
        await asyncio.gather(left.send(tensor, dst=1), _expect(right, tensor))


async def _expect(world: World, tensor: Tensor, src: int = 0, tag: int = 0) -> None:
    got = await world.recv(src=src, tag=tag)
    assert same(got, tensor), f"sent {tensor}, got {got}"


@check
async def sends_every_shape(arena: Arena) -> None:
    """Scalars, empty tensors and strided ones arrive as they were."""
    left, right = await arena.world(2)
    base = some((6, 8), torch.float32)
    shapes = [torch.tensor(7.0), torch.empty(0), torch.empty(3, 0, 2), base.t()]
    shapes += [base[::2, 1::3], base[0].expand(4, 8), base.view(1, 1, 6, 8)]
    for tensor in shapes:
        await asyncio.gather(left.send(tensor, dst=1), _expect(right, tensor))


@check
async def receives_into_given_tensors(arena: Arena) -> None:
    """``out`` may have another shape, and strides; it is what is returned."""
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
    """A tensor of many fragments arrives whole, both ways at once."""
    left, right = await arena.world(2)
    one, other = torch.randn(1_500_003), torch.randn(1_200_001)
    await asyncio.gather(
        left.send(one, dst=1),
        right.send(other, dst=0),
        _expect(right, one),
        _expect(left, other, src=1),
    )


@check
async def keeps_order_of_each_tag(arena: Arena) -> None:
    """Messages of one tag arrive in order; tags do not wait for each other."""
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
async def serves_receives_in_call_order(arena: Arena) -> None:
    """Several pending receives get the messages in the order they were called."""
    left, right = await arena.world(2)
    pending = [asyncio.ensure_future(right.recv(src=0)) for _ in range(5)]
    await asyncio.sleep(0)
    for i in range(5):
        await left.send(torch.tensor(i), dst=1)
    assert [int(await receive) for receive in pending] == [0, 1, 2, 3, 4]


@check
async def receives_from_whoever_is_first(arena: Arena) -> None:
    """``recv_any`` tells who sent."""
    if arena.config.host_p2p == "backend":
        return  # torch's own never notices a lost member; it is refused
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
    """Several named tensors with metadata, and plain data, are one message each."""
    left, right = await arena.world(2)
    tensors = {
        "a": some((2, 3), torch.bfloat16),
        "b": torch.empty(0),
        "ä": some((), torch.bool),
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
async def refuses_objects_that_are_not_plain(arena: Arena) -> None:
    """What JSON cannot say is refused before anything is sent."""
    left, _ = await arena.world(2)
    for thing in (object(), {1, 2}, torch.ones(1), b"bytes"):
        error = await raised_by(left.send_object(thing, dst=1))
        assert isinstance(error, ConfigError), error


@check
async def keeps_a_message_that_does_not_fit(arena: Arena) -> None:
    """A receive of the wrong dtype, size or kind fails, and loses nothing."""
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
    await _expect(right, tensor)
    await sending


@check
async def refuses_ranks_and_tags_that_cannot_be(arena: Arena) -> None:
    """Bad arguments are named, and the world lives on."""
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
    await asyncio.gather(left.send(one, dst=1), _expect(right, one))


@check
async def cancelling_a_receive_loses_nothing(arena: Arena) -> None:
    """A receive that is cancelled while it waits leaves the message to the next."""
    if arena.config.host_p2p == "backend":
        return  # documented: torch's own cannot be withdrawn
    left, right = await arena.world(2)
    for size in (1, 300_000):
        tensor = torch.randn(size)
        pending = asyncio.ensure_future(right.recv(torch.empty(size), src=0))
        await asyncio.sleep(0)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await asyncio.gather(left.send(tensor, dst=1), _expect(right, tensor))


@check
async def cancelling_a_send_sends_all_or_nothing(arena: Arena) -> None:
    """After a cancelled send the next message arrives whole."""
    if arena.config.host_p2p == "backend":
        return  # documented: torch's own cannot be withdrawn
    left, right = await arena.world(2)
    big, small = torch.randn(4_000_000), torch.tensor([1.0, 2.0])
    sending = asyncio.ensure_future(left.send(big, dst=1))
    for _ in range(3):
        await asyncio.sleep(0)
    sending.cancel()
    outcome = (await asyncio.gather(sending, return_exceptions=True))[0]
    after = asyncio.ensure_future(left.send(small, dst=1))
    got = await right.recv(src=0)
    if outcome is None:  # it was through already
        assert same(got, big)
        got = await right.recv(src=0)
    await after
    assert same(got, small)


# Collectives.

SIZES = (1, 2, 3, 5)


@check
async def broadcasts(arena: Arena) -> None:
    """Everybody has the root's tensor, for every root, size and dtype."""
    for size in SIZES:
        worlds = await arena.world(size)
        for root in range(size):
            tensors = [some((7,), torch.int64) * (rank + 1) for rank in range(size)]
            await every(
                worlds, lambda w, t=tensors, r=root: w.broadcast(t[w.rank], src=r)
            )
            assert all(
                torch.equal(t, some((7,), torch.int64) * (root + 1)) for t in tensors
            )


@check
async def broadcasts_every_dtype_and_shape(arena: Arena) -> None:
    """Strided and empty tensors and every dtype go through a broadcast."""
    worlds = await arena.world(2)
    for dtype in DTYPES:
        for shape in ((), (0,), (2, 3)):
            tensors = [some(shape, dtype), torch.zeros(shape).to(dtype)]
            await every(worlds, lambda w, t=tensors: w.broadcast(t[w.rank], src=0))
            assert same(tensors[1], some(shape, dtype))
    strided = torch.zeros(4, 6).t()
    tensors = [some((6, 4), torch.float32), strided]
    await every(worlds, lambda w: w.broadcast(tensors[w.rank], src=0))
    assert torch.equal(strided, some((6, 4), torch.float32))


@check
async def all_reduces(arena: Arena) -> None:
    """Every operation gives the right result on everybody, short and long."""
    for size in SIZES:
        worlds = await arena.world(size)
        for count in (0, 1, 5, 100_003):
            inputs = [some((count,), torch.int64) + rank for rank in range(size)]
            for op, expected in _expected(inputs).items():
                tensors = [t.clone() for t in inputs]
                await every(
                    worlds,
                    lambda w, t=tensors, o=op: w.all_reduce(
                        t[w.rank], getattr(ReduceOp, o)
                    ),
                )
                for tensor in tensors:
                    assert torch.equal(tensor, expected), (op, size, count)


def _expected(inputs: list[Tensor]) -> dict[str, Tensor]:
    stacked = torch.stack(inputs)
    bits_and, bits_or = inputs[0].clone(), inputs[0].clone()
    for tensor in inputs[1:]:
        bits_and &= tensor
        bits_or |= tensor
    return {
        "SUM": stacked.sum(0),
        "PRODUCT": stacked.prod(0),
        "MIN": stacked.amin(0),
        "MAX": stacked.amax(0),
        "BAND": bits_and,
        "BOR": bits_or,
    }


@check
async def all_reduces_other_dtypes(arena: Arena) -> None:
    """Averages, small integers, booleans, complex numbers and strided tensors."""
    worlds = await arena.world(3)

    async def reduced(tensors: list[Tensor], op: Any) -> Tensor:
        await every(worlds, lambda w: w.all_reduce(tensors[w.rank], op))
        assert all(same(t, tensors[0]) for t in tensors)
        return tensors[0]

    floats = [torch.full((4,), float(rank)) for rank in range(3)]
    assert torch.equal(await reduced(floats, ReduceOp.AVG), torch.ones(4))
    for dtype in (torch.int16, torch.bfloat16, torch.float16, torch.complex64):
        ones = [torch.ones(4).to(dtype) for _ in range(3)]
        assert torch.equal(
            await reduced(ones, ReduceOp.SUM), torch.full((4,), 3).to(dtype)
        )
    bools = [torch.tensor([rank == 0, True, False]) for rank in range(3)]
    total = await reduced(bools, ReduceOp.SUM)
    assert total.tolist() == [True, True, False]
    strided = [torch.ones(4, 6).t() for _ in range(3)]
    assert torch.equal(await reduced(strided, ReduceOp.SUM), torch.full((6, 4), 3.0))


@check
async def refuses_reductions_that_do_not_exist(arena: Arena) -> None:
    """All members learn alike, nothing is sent, and the world lives on."""
    worlds = await arena.world(2)
    for tensor, op in (
        (torch.ones(2), ReduceOp.BAND),
        (torch.ones(2, dtype=torch.int32), ReduceOp.AVG),
        (torch.ones(2, dtype=torch.complex64), ReduceOp.MAX),
    ):
        errors = await every(
            worlds, lambda w, t=tensor, o=op: raised_by(w.all_reduce(t.clone(), o))
        )
        assert all(isinstance(e, UnsupportedOperationError) for e in errors), errors
    await every(worlds, lambda w: w.barrier())


@check
async def reduces(arena: Arena) -> None:
    """Only the root's tensor changes."""
    for size in SIZES:
        worlds = await arena.world(size)
        for root in range(size):
            tensors = [torch.full((9,), rank + 1.0) for rank in range(size)]
            await every(worlds, lambda w, t=tensors, r=root: w.reduce(t[w.rank], dst=r))
            for rank, tensor in enumerate(tensors):
                total = size * (size + 1) / 2 if rank == root else rank + 1.0
                assert torch.equal(tensor, torch.full((9,), total)), (size, root, rank)


@check
async def gathers(arena: Arena) -> None:
    """``all_gather`` and ``gather`` return every member's tensor by rank."""
    for size in SIZES:
        worlds = await arena.world(size)
        results = await every(
            worlds, lambda w: w.all_gather(torch.full((3, 2), w.rank))
        )
        for result in results:
            assert [int(t[0, 0]) for t in result] == list(range(size))
            assert all(t.shape == (3, 2) for t in result)
        root = size - 1
        results = await every(
            worlds, lambda w, r=root: w.gather(torch.tensor([w.rank]), dst=r)
        )
        assert [int(t) for t in results[root]] == list(range(size))
        assert all(result is None for result in results[:-1])


@check
async def scatters(arena: Arena) -> None:
    """Each member gets its own element of the root's list."""
    for size in SIZES:
        worlds = await arena.world(size)
        root = size // 2
        parts = [torch.full((2, 2), 10.0 * rank) for rank in range(size)]
        outs = [torch.zeros(2, 2) for _ in range(size)]
        await every(
            worlds,
            lambda w, p=parts, o=outs, r=root: w.scatter(
                o[w.rank], p if w.rank == r else None, src=r
            ),
        )
        assert all(
            torch.equal(out, part) for out, part in zip(outs, parts, strict=True)
        )


@check
async def reduce_scatters(arena: Arena) -> None:
    """Member i gets the reduction of everybody's i-th tensor; the inputs stay."""
    for size in SIZES:
        worlds = await arena.world(size)
        inputs = [
            [torch.full((4,), float(i + rank)) for i in range(size)]
            for rank in range(size)
        ]
        outs = [torch.zeros(4) for _ in range(size)]
        await every(
            worlds, lambda w, i=inputs, o=outs: w.reduce_scatter(o[w.rank], i[w.rank])
        )
        for rank, out in enumerate(outs):
            total = sum(rank + other for other in range(size))
            assert torch.equal(out, torch.full((4,), float(total)))
            assert torch.equal(inputs[rank][0], torch.full((4,), float(rank)))


@check
async def exchanges_all_to_all(arena: Arena) -> None:
    """What member i sends to j is what j has from i."""
    for size in SIZES:
        worlds = await arena.world(size)
        ins = [[torch.tensor([rank, i]) for i in range(size)] for rank in range(size)]
        outs = [
            [torch.zeros(2, dtype=torch.int64) for _ in range(size)]
            for _ in range(size)
        ]
        await every(worlds, lambda w, i=ins, o=outs: w.all_to_all(o[w.rank], i[w.rank]))
        for rank in range(size):
            assert [t.tolist() for t in outs[rank]] == [[i, rank] for i in range(size)]


@check
async def waits_at_a_barrier(arena: Arena) -> None:
    """Nobody passes before the last has come."""
    worlds = await arena.world(3)
    early = [asyncio.ensure_future(world.barrier()) for world in worlds[:2]]
    one = torch.ones(1)
    await asyncio.gather(worlds[0].send(one, dst=2), _expect(worlds[2], one))
    assert not any(task.done() for task in early)
    await worlds[2].barrier()
    await asyncio.gather(*early)


@check
async def runs_many_operations_at_once(arena: Arena) -> None:
    """Collectives and messages of several worlds may all be pending together."""
    one, two = await arena.world(3), await arena.world(3)
    steps: list[Awaitable[Any]] = []
    for worlds in (one, two):
        for _ in range(4):
            steps.extend(world.all_reduce(torch.ones(100)) for world in worlds)
        steps.extend(worlds[0].send(torch.tensor(i), dst=1) for i in range(10))
        steps.extend(worlds[1].recv(src=0) for i in range(10))
    results = await asyncio.gather(*steps)
    reduced = [r for r in results if r is not None and r.numel() == 100]
    assert all(torch.equal(r, torch.full((100,), 3.0)) for r in reduced)


@check
async def names_both_sides_of_a_mismatch(arena: Arena) -> None:
    """Members that call different things are told what each called; nobody hangs."""
    mistakes: list[Callable[[World], Awaitable[Any]]] = [
        lambda w: w.all_reduce(torch.ones(3)),
        lambda w: w.broadcast(torch.ones(2, dtype=torch.int32), src=0),
        lambda w: w.all_gather(torch.ones(2)),
    ]
    for wrong in mistakes:
        other, world = await arena.world(2), await arena.world(2)
        errors = await asyncio.gather(
            raised_by(world[0].all_reduce(torch.ones(2))), raised_by(wrong(world[1]))
        )
        assert any(isinstance(e, TensorMismatchError) for e in errors), errors
        assert all(
            isinstance(e, TensorMismatchError | WorldBrokenError) for e in errors
        ), errors
        text = str(next(e for e in errors if isinstance(e, TensorMismatchError)))
        assert "all_reduce" in text
        assert "rank 0" in text
        assert "rank 1" in text
        await every(other, lambda w: w.all_reduce(torch.ones(2)))


@check
async def checks_lists_of_tensors(arena: Arena) -> None:
    """A list of the wrong length or content is named before anything is sent."""
    worlds = await arena.world(2)
    one = torch.ones(2)
    steps: list[Awaitable[Any]] = [
        worlds[0].all_gather(one, [one]),
        worlds[0].all_gather(one, [one, torch.ones(3)]),
        worlds[0].scatter(one, [one], src=0),
        worlds[0].scatter(one, None, src=0),
        worlds[0].reduce_scatter(one, [one, one.int()]),
        worlds[0].all_to_all([one, one], [one]),
    ]
    for step in steps:
        assert isinstance(await raised_by(step), TensorMismatchError)
    await every(worlds, lambda w: w.barrier())


# The end.


@check
async def leaves_politely(arena: Arena) -> None:
    """The others get what was sent, then ``MemberLeftError``; no fault is declared."""
    left, right = await arena.world(2)
    sizes = (1, 100, 50_000) if arena.config.host_p2p == "direct" else ()
    sent = [torch.randn(size) for size in sizes]
    receiving = asyncio.ensure_future(_receive_all(right, len(sent)))
    for tensor in sent:
        await left.send(tensor, dst=1)
    pending = asyncio.ensure_future(raised_by(right.recv_object(src=0, tag=9)))
    await left.close()
    assert all(same(a, b) for a, b in zip(await receiving, sent, strict=True))
    for error in (await pending, await raised_by(right.recv_object(src=0))):
        assert isinstance(error, MemberLeftError), error
        assert error.rank == 0
    assert isinstance(
        await raised_by(right.send(torch.ones(1), dst=0)), MemberLeftError
    )
    assert isinstance(await raised_by(right.barrier()), MemberLeftError)
    assert right.is_ready
    assert right.left == {0}
    assert isinstance(
        await raised_by(left.send(torch.ones(1), dst=1)), WorldClosedError
    )


async def _receive_all(world: World, count: int) -> list[Tensor]:
    return [await world.recv(src=0) for _ in range(count)]


@check
async def the_rest_goes_on_after_a_leave(arena: Arena) -> None:
    """Members that stay can still send to each other; collectives name who left."""
    worlds = await arena.world(3)
    await every(worlds, lambda w: w.barrier())
    await worlds[2].close()
    one = torch.ones(1)
    await asyncio.gather(worlds[0].send(one, dst=1), _expect(worlds[1], one))
    errors = await every(worlds[:2], lambda w: raised_by(w.all_reduce(torch.ones(4))))
    assert all(isinstance(e, MemberLeftError) and e.rank == 2 for e in errors), errors


@check
async def cancelling_a_collective_breaks_the_world_only(arena: Arena) -> None:
    """The others are told why; other worlds go on; the name can be joined again."""
    other = await arena.world(2, "other")
    worlds = await arena.world(2, "again")
    pending = asyncio.ensure_future(worlds[0].all_reduce(torch.ones(2)))
    await asyncio.sleep(0.01)
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    error = await raised_by(worlds[1].all_reduce(torch.ones(2)))
    assert isinstance(error, WorldBrokenError), error
    assert "cancelled" in str(error)
    await every(other, lambda w: w.all_reduce(torch.ones(2)))
    worlds = await arena.world(2, "again")
    assert worlds[0].epoch == 2
    await every(worlds, lambda w: w.all_reduce(torch.ones(2)))


@check
async def closes_while_operations_wait(arena: Arena) -> None:
    """Our own pending operations end with ``WorldClosedError``."""
    left, _ = await arena.world(2)
    pending = [
        asyncio.ensure_future(raised_by(left.recv(src=1))),
        asyncio.ensure_future(raised_by(left.recv_object(src=1, tag=3))),
        asyncio.ensure_future(raised_by(left.barrier())),
    ]
    await asyncio.sleep(0.01)
    await left.close()
    for step in pending:
        assert isinstance(await step, WorldClosedError)
