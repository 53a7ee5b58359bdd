"""The collectives: each declared once, with its signature and its steps.

To add one, write a method of ``CollectiveMethods`` (the method of ``World``) and below
it a function that ``declare`` turns into the declaration (how it runs over lanes), then
run ``python -m tests.meta.blocking_facade``. A native group also runs it over lanes,
unless ``c10d.group_collectives`` has a faster way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.backends import dtypes
from multiworld.backends.collective import Call, Operation, Steps, declare
from multiworld.backends.lane_collectives import (
    Buffer,
    LaneCollectives,
    checked,
    copy_into,
    flat_copy,
)
from multiworld.backends.offload import offload, size_of
from multiworld.backends.reduction import (
    begin_average,
    combiner,
    finish_average,
    op_name,
)

LONG_BYTES = 128 * 1024  # from this size on, bandwidth bounds an all-reduce


class CollectiveMethods:
    """The collectives as methods; ``_call`` carries one out."""

    rank: int
    size: int

    async def _call(self, call: Call) -> None:
        raise NotImplementedError

    async def broadcast(self, tensor: Tensor, *, src: int) -> Tensor:
        """Copy the tensor of ``src`` into every member's tensor.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
            src: The rank whose tensor is copied.

        Returns:
            ``tensor``.

        Raises:
            TensorMismatchError: The members' calls differ; the world breaks.

        Cancellation: breaks this world, and no other, because the other members wait
        for this one. This holds for every collective.
        """
        await self._call(Call(BROADCAST, tensor, root=src))
        return tensor

    async def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """Reduce all members' tensors, element by element, into every member's tensor.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
            op: A ``torch.distributed.ReduceOp``.

        Returns:
            ``tensor``.

        Raises:
            UnsupportedOperationError: ``op`` does not exist for the dtype.
            TensorMismatchError: The members' calls differ; the world breaks.

        Cancellation: as for ``broadcast``.
        """
        await self._call(Call(ALL_REDUCE, tensor, op=op))
        return tensor

    async def reduce(
        self, tensor: Tensor, *, dst: int, op: Any = ReduceOp.SUM
    ) -> Tensor:
        """Reduce all members' tensors, element by element, into the tensor of ``dst``.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
                The tensor changes at ``dst`` only.
            dst: The rank that receives the result.
            op: A ``torch.distributed.ReduceOp``.

        Returns:
            ``tensor``.

        Raises:
            UnsupportedOperationError: ``op`` does not exist for the dtype.
            TensorMismatchError: The members' calls differ; the world breaks.

        Cancellation: as for ``broadcast``.
        """
        await self._call(Call(REDUCE, tensor, root=dst, op=op))
        return tensor

    async def all_gather(
        self, tensor: Tensor, outs: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return every member's tensor, by rank.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
            outs: Tensors to fill, one for each rank; new ones by default.

        Returns:
            The tensors, by rank.

        Raises:
            TensorMismatchError: ``outs`` do not fit, or the members' calls differ; in
                the latter case the world breaks.

        Cancellation: as for ``broadcast``.
        """
        outs = self._like(tensor) if outs is None else outs
        await self._call(Call(ALL_GATHER, tensor, outs))
        return list(outs)

    async def gather(
        self, tensor: Tensor, *, dst: int, outs: Sequence[Tensor] | None = None
    ) -> list[Tensor] | None:
        """Return every member's tensor, by rank, at ``dst``; None elsewhere.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
            dst: The rank that receives the tensors.
            outs: Tensors to fill at ``dst``, one for each rank; new ones by default.

        Returns:
            The tensors, by rank, at ``dst``; None elsewhere.

        Raises:
            TensorMismatchError: ``outs`` do not fit, or the members' calls differ; in
                the latter case the world breaks.

        Cancellation: as for ``broadcast``.
        """
        if self.rank != dst:
            outs = None
        elif outs is None:
            outs = self._like(tensor)
        await self._call(Call(GATHER, tensor, outs, root=dst))
        return None if outs is None else list(outs)

    async def scatter(
        self, out: Tensor, tensors: Sequence[Tensor] | None = None, *, src: int
    ) -> Tensor:
        """Receive this rank's element of the list that ``src`` passes.

        Args:
            out: The tensor to fill; each of ``tensors`` has its dtype and number of
                elements.
            tensors: One tensor for each rank; at ``src`` only.
            src: The rank whose ``tensors`` are distributed.

        Returns:
            ``out``.

        Raises:
            TensorMismatchError: ``tensors`` do not fit, or the members' calls differ;
                in the latter case the world breaks.

        Cancellation: as for ``broadcast``.
        """
        given = tensors if self.rank == src else None
        await self._call(Call(SCATTER, out, given, root=src))
        return out

    async def reduce_scatter(
        self, out: Tensor, tensors: Sequence[Tensor], op: Any = ReduceOp.SUM
    ) -> Tensor:
        """Reduce ``tensors[i]`` of all members into ``out`` of rank i.

        Args:
            out: The tensor to fill; each of ``tensors`` has its dtype and number of
                elements.
            tensors: One tensor for each rank.
            op: A ``torch.distributed.ReduceOp``.

        Returns:
            ``out``.

        Raises:
            UnsupportedOperationError: ``op`` does not exist for the dtype.
            TensorMismatchError: ``tensors`` do not fit, or the members' calls differ;
                in the latter case the world breaks.

        Cancellation: as for ``broadcast``.
        """
        await self._call(Call(REDUCE_SCATTER, out, tensors, op=op))
        return out

    async def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor]
    ) -> list[Tensor]:
        """Send ``ins[i]`` to rank i, and receive rank i's tensor into ``outs[i]``.

        Args:
            outs: One tensor for each rank, all of one dtype and number of elements.
            ins: Likewise.

        Returns:
            ``outs``.

        Raises:
            TensorMismatchError: The lists do not fit, or the members' calls differ; in
                the latter case the world breaks.

        Cancellation: as for ``broadcast``.
        """
        like = ins[0] if len(ins) else torch.empty(0)
        await self._call(Call(ALL_TO_ALL, like, outs, ins))
        return list(outs)

    async def barrier(self) -> None:
        """Wait until every member has called ``barrier``.

        Cancellation: as for ``broadcast``.
        """
        await self._call(Call(BARRIER, torch.empty(0, dtype=torch.uint8)))

    def _like(self, tensor: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor) for _ in range(self.size)]


# How each collective runs over lanes. The code above ``steps`` checks the call as soon
# as it is made; ``steps`` runs when the call's turn comes.


@declare(0, has_root=True)
def BROADCAST(lanes: LaneCollectives, call: Call) -> Steps:
    is_root = lanes.rank == call.root
    tensor = checked(call.tensor, is_written=not is_root)

    async def steps(operation: Operation) -> None:
        buffer = await Buffer.of(tensor)
        await lanes.binomial_down(operation, buffer.flat, call.root)
        if not is_root:
            await buffer.write_back()

    return steps


@declare(1)
def ALL_REDUCE(lanes: LaneCollectives, call: Call) -> Steps:
    tensor, op = checked(call.tensor, is_written=True), call.op
    combine = combiner(op, tensor)

    async def steps(operation: Operation) -> None:
        buffer = await Buffer.of(tensor)
        flat = buffer.flat
        await offload(size_of(flat), begin_average, op, flat, lanes.size)
        if size_of(flat) >= LONG_BYTES and flat.numel() >= lanes.size:
            await lanes.long_all_reduce(operation, flat, combine, op)
        else:
            await lanes.recursive_doubling(operation, flat, combine)
            finish_average(op, flat, lanes.size)
        await buffer.write_back()

    return steps


@declare(2, has_root=True)
def REDUCE(lanes: LaneCollectives, call: Call) -> Steps:
    is_root = lanes.rank == call.root
    tensor, op = checked(call.tensor, is_written=is_root), call.op
    combine = combiner(op, tensor)

    async def steps(operation: Operation) -> None:
        buffer = await Buffer.of(tensor)
        total = buffer.flat
        if not is_root:
            total = await offload(size_of(total), total.clone)
        await offload(size_of(total), begin_average, op, total, lanes.size)
        await lanes.binomial_up(operation, total, call.root, combine)
        if is_root:
            await offload(size_of(total), finish_average, op, total, lanes.size)
            await buffer.write_back()

    return steps


@declare(3)
def ALL_GATHER(lanes: LaneCollectives, call: Call) -> Steps:
    tensor = checked(call.tensor)
    targets = lanes.matching(call.tensors, tensor, "outs", is_written=True)

    async def steps(operation: Operation) -> None:
        buffers = [await Buffer.of(target) for target in targets]
        await copy_into(buffers[lanes.rank].flat, tensor)
        await lanes.gather_all(operation, [b.flat for b in buffers])
        for buffer in buffers:
            await buffer.write_back()

    return steps


@declare(4, has_root=True)
def GATHER(lanes: LaneCollectives, call: Call) -> Steps:
    tensor = checked(call.tensor)
    is_root = lanes.rank == call.root
    targets = (
        lanes.matching(call.tensors, tensor, "outs", is_written=True) if is_root else []
    )

    async def steps(operation: Operation) -> None:
        if not is_root:
            mine = await Buffer.of(tensor)
            await lanes.send(operation, call.root, mine.flat)
            return
        buffers = [await Buffer.of(target) for target in targets]
        await copy_into(buffers[call.root].flat, tensor)
        await lanes.receive_all(operation, [b.flat for b in buffers])
        for buffer in buffers:
            await buffer.write_back()

    return steps


@declare(5, has_root=True)
def SCATTER(lanes: LaneCollectives, call: Call) -> Steps:
    out = checked(call.tensor, is_written=True)
    is_root = lanes.rank == call.root
    parts = lanes.matching(call.tensors, out, "tensors") if is_root else []

    async def steps(operation: Operation) -> None:
        buffer = await Buffer.of(out)
        if is_root:
            for rank in lanes.others():
                part = await Buffer.of(parts[rank])
                await lanes.send(operation, rank, part.flat)
            # Write ``out`` last, because it may be one of ``tensors``.
            await copy_into(buffer.flat, parts[call.root])
        else:
            await lanes.receive_into(operation, call.root, buffer.flat)
        await buffer.write_back()

    return steps


@declare(6)
def REDUCE_SCATTER(lanes: LaneCollectives, call: Call) -> Steps:
    out, op = checked(call.tensor, is_written=True), call.op
    combine = combiner(op, out)
    given = lanes.matching(call.tensors, out, "tensors")

    async def steps(operation: Operation) -> None:
        parts = [(await Buffer.of(tensor)).flat for tensor in given]
        # ``out`` may be one of ``tensors``, so write it after all of them have been
        # sent.
        mine = await offload(size_of(out), flat_copy, given[lanes.rank])
        parts[lanes.rank] = mine
        if op_name(op) == "AVG":  # do not scale the caller's tensors
            for rank in lanes.others():
                parts[rank] = await offload(size_of(out), torch.clone, parts[rank])
            for part in parts:
                await offload(size_of(part), begin_average, op, part, lanes.size)
        await lanes.reduce_mine(operation, parts, combine)
        await offload(size_of(mine), finish_average, op, mine, lanes.size)
        await copy_into(out, mine)

    return steps


@declare(7)
def ALL_TO_ALL(lanes: LaneCollectives, call: Call) -> Steps:
    like = checked(call.tensor)
    targets = lanes.matching(call.tensors, like, "outs", is_written=True)
    gives = lanes.matching(call.more, like, "ins")

    async def steps(operation: Operation) -> None:
        takes = [await Buffer.of(target) for target in targets]
        apart = [  # received data must not overwrite data still to be sent
            await offload(size_of(give), torch.clone, give) if is_reached else give
            for give, is_reached in zip(
                gives, dtypes.reached_by(gives, targets), strict=True
            )
        ]
        await copy_into(takes[lanes.rank].flat, apart[lanes.rank])
        for dst, src in lanes.pairs():
            give = await Buffer.of(apart[dst])
            await lanes.exchange(operation, dst, give.flat, src, takes[src].flat)
        for take in takes:
            await take.write_back()

    return steps


@declare(8)
def BARRIER(lanes: LaneCollectives, call: Call) -> Steps:
    async def steps(operation: Operation) -> None:
        distance = 1
        while distance < lanes.size:
            dst = (lanes.rank + distance) % lanes.size
            src = (lanes.rank - distance) % lanes.size
            await lanes.exchange(operation, dst, call.tensor, src, call.tensor)
            distance *= 2

    return steps
