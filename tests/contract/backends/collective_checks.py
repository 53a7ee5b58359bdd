"""Checks of collectives: every operation, size and dtype, and mismatches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.errors import (
    TensorMismatchError,
    UnsupportedOperationError,
    WorldBrokenError,
)
from multiworld.testing.arena import Arena
from multiworld.world.world import World
from tests.contract.backends.harness import (
    DTYPES,
    check,
    every,
    expect,
    raised_by,
    same,
    some,
)

SIZES = (1, 2, 3, 5)
AVG = ReduceOp.AVG


@check
async def broadcasts(arena: Arena) -> None:
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
async def takes_columns_of_any_length(arena: Arena) -> None:
    """Check columns with one element or none, which torch calls contiguous."""
    worlds = await arena.world(2)
    for rows in (0, 1, 3):

        def columns(rows: int = rows) -> list[Tensor]:
            return [torch.full((rows, 2), rank + 1.0)[:, 0] for rank in range(2)]

        found = columns()
        await every(worlds, lambda w, t=found: w.all_reduce(t[w.rank]))
        assert all(torch.equal(t, torch.full((rows,), 3.0)) for t in found)
        found = columns()
        await every(worlds, lambda w, t=found: w.broadcast(t[w.rank], src=1))
        assert all(torch.equal(t, torch.full((rows,), 2.0)) for t in found)
        parts = columns()
        lists = await every(worlds, lambda w, t=parts: w.all_gather(t[w.rank]))
        for each in lists:
            assert all(torch.equal(t, parts[rank]) for rank, t in enumerate(each))
        outs = columns()
        await every(
            worlds,
            lambda w, o=outs, p=parts: w.scatter(
                o[w.rank], p if w.rank == 0 else None, src=0
            ),
        )
        assert all(torch.equal(t, parts[rank]) for rank, t in enumerate(outs))
        await every(worlds, lambda w, o=outs: w.reduce_scatter(o[w.rank], columns()))
        for rank, out in enumerate(outs):
            assert torch.equal(out, torch.full((rows,), 2.0 * (rank + 1)))


@check
async def all_reduces(arena: Arena) -> None:
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
async def averages_what_no_sum_can_hold(arena: Arena) -> None:
    """Check that the average of tensors whose sum overflows is finite."""
    for size in (2, 3):
        worlds = await arena.world(size)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            large = torch.tensor([torch.finfo(dtype).max * 0.6, 3.0]).to(dtype)
            average = partial(torch.equal, large)
            totals = [large.clone() for _ in worlds]
            await every(worlds, lambda w, t=totals: w.all_reduce(t[w.rank], AVG))
            assert all(total.isfinite().all() for total in totals), (dtype, totals)
            assert size == 3 or all(map(average, totals)), (dtype, totals)
            totals = [large.clone() for _ in worlds]
            await every(worlds, lambda w, t=totals: w.reduce(t[w.rank], dst=0, op=AVG))
            assert totals[0].isfinite().all(), dtype
            outs = [torch.empty_like(large) for _ in worlds]
            given = [[large.clone() for _ in worlds] for _ in worlds]
            await every(
                worlds,
                lambda w, o=outs, g=given: w.reduce_scatter(o[w.rank], g[w.rank], AVG),
            )
            assert all(out.isfinite().all() for out in outs), dtype
            assert all(map(average, given[0])), "the inputs are the caller's"


@check
async def lets_nan_win(arena: Arena) -> None:
    """Check that minima and maxima with NaN, infinities and zeros equal torch's."""
    worlds = await arena.world(2)
    inf, nan = math.inf, math.nan
    inputs = [
        torch.tensor([nan, 1.0, -inf, -2.5, 0.0, inf, nan]),
        torch.tensor([5.0, nan, 3.0, -1.5, -1.0, nan, nan]),
    ]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        typed = [one.to(dtype) for one in inputs]
        for op, wanted in (
            (ReduceOp.MAX, torch.maximum(*typed)),
            (ReduceOp.MIN, torch.minimum(*typed)),
        ):
            totals = [one.clone() for one in typed]
            await every(worlds, lambda w, t=totals, o=op: w.all_reduce(t[w.rank], o))
            for total in totals:
                assert torch.equal(total.isnan(), wanted.isnan()), (op, dtype, total)
                both = total.nan_to_num(9.0), wanted.nan_to_num(9.0)
                assert torch.equal(*both), (op, dtype, total)


@check
async def leaves_the_same_bits_everywhere(arena: Arena) -> None:
    """Check that members agree on the sign of zero, and on the bits of a NaN."""
    nans = torch.tensor([0x7FC00001, 0x7FC00002], dtype=torch.int32).view(torch.float32)
    for size in (2, 3, 5):
        worlds = await arena.world(size)
        for op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.SUM):
            totals = [
                torch.cat([torch.tensor([-0.0, 0.0]).roll(rank), nans.roll(rank)])
                for rank in range(size)
            ]
            await every(worlds, lambda w, t=totals, o=op: w.all_reduce(t[w.rank], o))
            bits = {tuple(total.view(torch.int32).tolist()) for total in totals}
            assert len(bits) == 1, (size, op, bits)


@check
async def reduces_large_tensors(arena: Arena) -> None:
    """Check reductions of several segments and fragments, for several element sizes."""
    for size in (2, 3):
        worlds = await arena.world(size)
        for dtype, count in (
            (torch.float32, 1_800_001),
            (torch.int16, 300_001),
            (torch.complex128, 100_003),
        ):
            inputs = [
                (torch.arange(count) % 11 + rank).to(dtype) for rank in range(size)
            ]
            expected = torch.stack(inputs).sum(0).to(dtype)
            totals = [t.clone() for t in inputs]
            await every(worlds, lambda w, t=totals: w.all_reduce(t[w.rank]))
            assert all(torch.equal(t, expected) for t in totals), (size, dtype)
            totals = [t.clone() for t in inputs]
            await every(worlds, lambda w, t=totals: w.reduce(t[w.rank], dst=1))
            assert torch.equal(totals[1], expected), (size, dtype)
            gathered = [[torch.empty_like(t) for t in inputs] for _ in worlds]
            await every(
                worlds,
                lambda w, g=gathered, i=inputs: w.all_gather(i[w.rank], g[w.rank]),
            )
            for outs in gathered:
                assert all(map(torch.equal, outs, inputs)), (size, dtype)
            # The output is also one of the inputs.
            parts = [[t.clone() for _ in range(size)] for t in inputs]
            await every(
                worlds,
                lambda w, p=parts: w.reduce_scatter(p[w.rank][w.rank], p[w.rank]),
            )
            for rank in range(size):
                assert torch.equal(parts[rank][rank], expected), (size, dtype)
        averages = [torch.full((900_001,), float(rank)) for rank in range(size)]
        await every(worlds, lambda w, a=averages: w.all_reduce(a[w.rank], ReduceOp.AVG))
        wanted = torch.full((900_001,), (size - 1) / 2)
        assert all(torch.equal(a, wanted) for a in averages)


@check
async def refuses_reductions_that_do_not_exist(arena: Arena) -> None:
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
async def exchanges_in_place(arena: Arena) -> None:
    """Check that what is received does not overwrite what is still to be sent."""
    worlds = await arena.world(3)
    parts = [[torch.tensor([rank, i]) for i in range(3)] for rank in range(3)]
    await every(worlds, lambda w: w.all_to_all(parts[w.rank], parts[w.rank]))
    for rank in range(3):
        assert [t.tolist() for t in parts[rank]] == [[i, rank] for i in range(3)]
    given = [torch.tensor([i]) for i in range(3)]
    outs = [given[1], torch.zeros(1, dtype=torch.int64), torch.tensor([9])]
    await every(
        worlds, lambda w: w.scatter(outs[w.rank], [] if w.rank else given, src=0)
    )
    assert [int(out) for out in outs] == [0, 1, 2]


@check
async def waits_at_a_barrier(arena: Arena) -> None:
    worlds = await arena.world(3)
    early = [asyncio.ensure_future(world.barrier()) for world in worlds[:2]]
    one = torch.ones(1)
    await asyncio.gather(worlds[0].send(one, dst=2), expect(worlds[2], one))
    assert not any(task.done() for task in early)
    await worlds[2].barrier()
    await asyncio.gather(*early)


@check
async def runs_many_operations_at_once(arena: Arena) -> None:
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
    """Check that a list of wrong length or content fails before anything is sent."""
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
