"""Collectives over lanes, by textbook algorithms. Shell.

Sources: binomial trees for broadcast and reduce, recursive doubling for short
all-reduces, pairwise exchange for reduce-scatter, all-gather and all-to-all, and for
long all-reduces as the first two in turn: R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1), 2005;
dissemination barrier: D. Hensgen, R. Finkel, U. Manber, IJPP 17(1), 1988.

Collectives of one world run one after the other, in the order they were called. Every
message says which operation it belongs to (number, kind, dtype, size, root, op); the
first that does not fit breaks the world with an error that names both sides'
operation, because there is no telling what the other members made of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.backends.base import WorldView
from multiworld.backends.channel import Channel
from multiworld.backends.direct import header as wire
from multiworld.backends.dtypes import (
    DTYPES,
    code_of,
    is_plain,
    memory_of,
    plain,
    require_alike,
    require_host,
)
from multiworld.backends.eager import begin
from multiworld.backends.mailbox import Description, Receive
from multiworld.backends.offload import offload, size_of
from multiworld.backends.reduction import (
    OP_CODES,
    OP_NAMES,
    Combine,
    combiner,
    finish_average,
    op_name,
)
from multiworld.errors import MemberLeftError, TensorMismatchError
from multiworld.incarnation.lifecycle import Failed

KINDS = (
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)

LONG_BYTES = 128 * 1024
"""From this size on an all-reduce is bound by bandwidth, not by the number of steps."""

CHUNK_BYTES = 2 * 1024 * 1024
"""Most that one member reduces before it passes the result on: both fit into the shared
memory of a lane (``WorldConfig.shared_memory_bytes``), and stay in the cache."""


class Operation(NamedTuple):
    """What one collective is; equal on all members, or the world breaks."""

    number: int
    kind: int
    dtype: int
    elements: int
    root: int
    op: int

    def label(self) -> int:
        """Return kind, op and root in 32 bits."""
        return self.kind << 24 | self.op << 16 | self.root

    def __str__(self) -> str:
        name = KINDS[self.kind] if self.kind < len(KINDS) else f"kind {self.kind}"
        root = f", root {self.root}" if name in _ROOTED else ""
        op = f", {OP_NAMES.get(self.op, self.op)}" if name in _REDUCING else ""
        dtype = str(DTYPES.get(self.dtype, self.dtype)).removeprefix("torch.")
        return f"{name} #{self.number} of {self.elements} {dtype}{root}{op}"


_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def _operation_of(found: Description) -> Operation:
    number, count = found.shape if len(found.shape) == 2 else (0, 0)
    label = found.label
    kind, op, root = label >> 24, label >> 16 & 0xFF, label & 0xFFFF
    return Operation(number, kind, found.dtype, count, root, op)


class Collectives:
    """The collectives of one world."""

    def __init__(
        self,
        view: WorldView,
        channel: Channel,
        open_lane: Callable[[int], Awaitable[None]],
    ) -> None:
        self._view, self._channel, self._open_lane = view, channel, open_lane
        self._rank, self._size = view.rank, view.incarnation.size
        self._turn = asyncio.Lock()
        self._number = self._running = 0
        self._ends_at: tuple[int, int] | None = None

    # The operations. Everything is checked before the operation gets its number, and
    # copied only when it is its turn: concurrent calls stay in the order of the calls.

    async def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy ``tensor`` of ``src`` into everybody's."""
        tensor = _checked(tensor)

        async def steps(operation: Operation) -> None:
            buffer = await _Buffer.of(tensor)
            await self._binomial_down(operation, buffer.flat, src)
            await buffer.write_back()

        await self._run("broadcast", tensor, steps, root=src)

    async def all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Reduce into everybody's ``tensor``."""
        tensor = _checked(tensor)
        combine = combiner(op, tensor)

        async def steps(operation: Operation) -> None:
            buffer = await _Buffer.of(tensor)
            flat = buffer.flat
            if size_of(flat) >= LONG_BYTES and flat.numel() >= self._size:
                await self._long_all_reduce(operation, flat, combine, op)
            else:
                await self._recursive_doubling(operation, flat, combine)
                finish_average(op, flat, self._size)
            await buffer.write_back()

        await self._run("all_reduce", tensor, steps, op=op)

    async def reduce(self, tensor: Tensor, dst: int, op: ReduceOp) -> None:
        """Reduce into ``tensor`` of ``dst``; the others' stay as they are."""
        tensor = _checked(tensor)
        combine = combiner(op, tensor)

        async def steps(operation: Operation) -> None:
            buffer = await _Buffer.of(tensor)
            total = buffer.flat
            if self._rank != dst:
                total = await offload(size_of(total), total.clone)
            await self._binomial_up(operation, total, dst, combine)
            if self._rank == dst:
                await offload(size_of(total), finish_average, op, total, self._size)
                await buffer.write_back()

        await self._run("reduce", tensor, steps, root=dst, op=op)

    async def all_gather(self, outs: Sequence[Tensor], tensor: Tensor) -> None:
        """Put every member's tensor into ``outs``, by rank."""
        tensor = _checked(tensor)
        targets = self._alike(outs, tensor, "outs")

        async def steps(operation: Operation) -> None:
            buffers = [await _Buffer.of(target) for target in targets]
            await _copy(buffers[self._rank].flat, tensor)
            await self._gather_all(operation, [b.flat for b in buffers])
            for buffer in buffers:
                await buffer.write_back()

        await self._run("all_gather", tensor, steps)

    async def gather(
        self, tensor: Tensor, outs: Sequence[Tensor] | None, dst: int
    ) -> None:
        """Put every member's tensor into ``outs`` of ``dst``."""
        tensor = _checked(tensor)
        is_root = self._rank == dst
        targets = self._alike(outs, tensor, "outs") if is_root else []

        async def steps(operation: Operation) -> None:
            if not is_root:
                mine = await _Buffer.of(tensor)
                await self._send(operation, dst, mine.flat)
                return
            buffers = [await _Buffer.of(target) for target in targets]
            await _copy(buffers[dst].flat, tensor)
            await self._receive_all(operation, [b.flat for b in buffers])
            for buffer in buffers:
                await buffer.write_back()

        await self._run("gather", tensor, steps, root=dst)

    async def scatter(
        self, out: Tensor, tensors: Sequence[Tensor] | None, src: int
    ) -> None:
        """Put ``tensors[rank]`` of ``src`` into ``out``."""
        out = _checked(out)
        is_root = self._rank == src
        parts = self._alike(tensors, out, "tensors") if is_root else []

        async def steps(operation: Operation) -> None:
            buffer = await _Buffer.of(out)
            if is_root:
                await _copy(buffer.flat, parts[src])
                for rank in self._others():
                    part = await _Buffer.of(parts[rank])
                    await self._send(operation, rank, part.flat)
            else:
                await self._receive_into(operation, src, buffer.flat)
            await buffer.write_back()

        await self._run("scatter", out, steps, root=src)

    async def reduce_scatter(
        self, out: Tensor, tensors: Sequence[Tensor], op: ReduceOp
    ) -> None:
        """Reduce ``tensors[i]`` of all into ``out`` of member i."""
        out = _checked(out)
        combine = combiner(op, out)
        given = self._alike(tensors, out, "tensors")

        async def steps(operation: Operation) -> None:
            parts = [(await _Buffer.of(tensor)).flat for tensor in given]
            # ``out`` may be one of them: it is written when all have been sent.
            mine = await offload(size_of(out), _flat_copy, given[self._rank])
            parts[self._rank] = mine
            await self._reduce_mine(operation, parts, combine)
            await offload(size_of(mine), finish_average, op, mine, self._size)
            await _copy(out, mine)

        await self._run("reduce_scatter", out, steps, op=op)

    async def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        """Send ``ins[i]`` to member i, and put what it sent into ``outs[i]``."""
        like = _checked(ins[0]) if len(ins) else torch.empty(0)
        gives = self._alike(ins, like, "ins")
        targets = self._alike(outs, like, "outs")

        async def steps(operation: Operation) -> None:
            takes = [await _Buffer.of(target) for target in targets]
            await _copy(takes[self._rank].flat, gives[self._rank])
            for dst, src in self._pairs():
                give = await _Buffer.of(gives[dst])
                await self._exchange(operation, dst, give.flat, src, takes[src].flat)
            for take in takes:
                await take.write_back()

        await self._run("all_to_all", like, steps)

    async def barrier(self) -> None:
        """Wait until every member is here."""
        nothing = torch.empty(0, dtype=torch.uint8)

        async def steps(operation: Operation) -> None:
            distance = 1
            while distance < self._size:
                dst = (self._rank + distance) % self._size
                src = (self._rank - distance) % self._size
                await self._exchange(operation, dst, nothing, src, nothing)
                distance *= 2

        await self._run("barrier", nothing, steps)

    # Algorithms.

    async def _binomial_down(
        self, operation: Operation, flat: Tensor, root: int
    ) -> None:
        relative = (self._rank - root) % self._size
        mask = 1
        while mask < self._size and not relative & mask:
            mask *= 2
        if relative:
            parent = (relative - mask + root) % self._size
            await self._receive_into(operation, parent, flat)
        mask //= 2
        while mask:
            if relative + mask < self._size:
                child = (relative + mask + root) % self._size
                await self._send(operation, child, flat)
            mask //= 2

    async def _binomial_up(
        self, operation: Operation, total: Tensor, root: int, combine: Combine
    ) -> None:
        relative = (self._rank - root) % self._size
        arrived = torch.empty_like(total)
        mask = 1
        while mask < self._size:
            if relative & mask:
                parent = (relative - mask + root) % self._size
                await self._send(operation, parent, total)
                return
            if relative + mask < self._size:
                child = (relative + mask + root) % self._size
                sum_up = _Sum(combine, total, arrived)
                await self._receive_into(operation, child, sum_up)
            mask *= 2

    async def _recursive_doubling(
        self, operation: Operation, flat: Tensor, combine: Combine
    ) -> None:
        """Reduce among the largest power of two; the rest hands in, and gets."""
        power = 1 << (self._size.bit_length() - 1)
        extra = self._size - power
        arrived = torch.empty_like(flat)
        if self._rank >= power:
            partner = self._rank - power
            await self._send(operation, partner, flat)
            await self._receive_into(operation, partner, flat)
            return
        if self._rank < extra:
            await self._receive_into(operation, self._rank + power, arrived)
            await self._combine(combine, flat, arrived)
        mask = 1
        while mask < power:
            partner = self._rank ^ mask
            await self._exchange(operation, partner, flat, partner, arrived)
            await self._combine(combine, flat, arrived)
            mask *= 2
        if self._rank < extra:
            await self._send(operation, self._rank + power, flat)

    async def _long_all_reduce(
        self, operation: Operation, flat: Tensor, combine: Combine, op: ReduceOp
    ) -> None:
        """Let each member reduce a chunk and give it to all, a segment at a time."""
        segments = -(-size_of(flat) // (self._size * CHUNK_BYTES))
        for segment in flat.tensor_split(segments):
            chunks = list(segment.tensor_split(self._size))
            await self._reduce_mine(operation, chunks, combine)
            finish_average(op, chunks[self._rank], self._size)
            await self._gather_all(operation, chunks)

    async def _reduce_mine(
        self, operation: Operation, chunks: Sequence[Tensor], combine: Combine
    ) -> None:
        """Reduce everybody's chunk of this rank's number, always in the same order."""
        mine = chunks[self._rank]
        sum_up = _Sum(combine, mine, torch.empty_like(mine))
        gives = {dst: chunks[dst] for dst, _ in self._pairs()}
        takes: dict[int, Target] = {src: sum_up for _, src in self._pairs()}
        await self._swap(operation, gives, takes)

    async def _gather_all(self, operation: Operation, chunks: Sequence[Tensor]) -> None:
        """Give this rank's chunk to all others, and take theirs."""
        gives = {dst: chunks[self._rank] for dst, _ in self._pairs()}
        takes: dict[int, Target] = {src: chunks[src] for _, src in self._pairs()}
        await self._swap(operation, gives, takes)

    # Steps.

    async def _run(
        self,
        kind: str,
        like: Tensor,
        steps: Callable[[Operation], Awaitable[None]],
        *,
        root: int = 0,
        op: ReduceOp | None = None,
    ) -> None:
        """Number an operation, wait for its turn, and carry it out."""
        self._number += 1
        operation = Operation(
            self._number,
            KINDS.index(kind),
            code_of(like),
            like.numel(),
            root,
            0 if op is None else OP_CODES[op_name(op)],
        )
        try:
            async with self._turn:
                self._check_end(operation.number)
                self._running = operation.number
                for rank in self._others():
                    await self._open_lane(rank)
                await steps(operation)
        except asyncio.CancelledError:
            self._view.report(
                Failed(f"rank {self._rank} cancelled {operation} half way")
            )
            raise
        except MemberLeftError as error:
            # The members that wait for this one, not for the one that left, must hear.
            self.end_from(operation.number, error.rank)
            for rank in self._others():
                note = {"op": "uncollective", "number": operation.number}
                self._view.tell(rank, {**note, "left": error.rank})
            raise

    def end_from(self, number: int, left: int) -> None:
        """Fail collective ``number`` and all after it: member ``left`` is not there."""
        if self._ends_at is None or number < self._ends_at[0]:
            self._ends_at = number, left
        if self._running >= number:
            self._channel.end(lambda: self._view.left_error(left))

    def _check_end(self, number: int) -> None:
        if self._ends_at is not None and number >= self._ends_at[0]:
            raise self._view.left_error(self._ends_at[1])

    def _disagree(self, error: TensorMismatchError) -> None:
        self._view.report(Failed(f"the members do not agree: {error}"))

    def _others(self) -> list[int]:
        """The other ranks, this one's successors first, so that not all begin at 0."""
        return [(self._rank + i) % self._size for i in range(1, self._size)]

    def _pairs(self) -> list[tuple[int, int]]:
        """Whom to send to and whom to receive from, step by step: all are busy."""
        size, rank = self._size, self._rank
        return [((rank + i) % size, (rank - i) % size) for i in range(1, size)]

    async def _send(self, operation: Operation, dst: int, flat: Tensor) -> None:
        memory = memory_of(flat)
        description = Description(
            wire.COLLECTIVE,
            operation.dtype,
            (operation.number, operation.elements),
            len(memory),
            0,
            operation.label(),
        )
        await self._channel.lanes[dst].send(description, memory, flat)

    def _post(self, operation: Operation, src: int, target: Target) -> Receive:
        flat = target.scratch if isinstance(target, _Sum) else target
        merge = target.merge if isinstance(target, _Sum) else None
        size = size_of(flat)

        def check(source: int, found: Description) -> Exception | None:
            theirs = _operation_of(found)
            if theirs == operation and found.size == size:
                return None
            error = TensorMismatchError(
                f"rank {self._rank} is in {operation}, rank {source} in {theirs}; all "
                "members must call the same collectives in the same order, with equal "
                "dtypes and sizes"
            )
            # At once, and not when somebody looks at the receive: this member may be
            # in a send that the other will never take.
            asyncio.get_running_loop().call_soon(self._disagree, error)
            return error

        return self._channel.post(src, 0, check, lambda _: flat, merge)

    async def _finish(self, receive: Receive, target: Target) -> None:
        arrival = await self._channel.wait(receive)
        source = arrival.tensor.view(-1).view(torch.uint8)
        if isinstance(target, _Sum):
            if not arrival.is_merged:
                await offload(source.numel(), target.add, 0, source)
        elif not arrival.is_borrowed:
            await offload(source.numel(), target.view(torch.uint8).copy_, source)

    async def _receive_into(
        self, operation: Operation, src: int, target: Target
    ) -> None:
        await self._finish(self._post(operation, src, target), target)

    async def _receive_all(self, operation: Operation, flats: Sequence[Tensor]) -> None:
        posted = {
            rank: self._post(operation, rank, flats[rank]) for rank in self._others()
        }
        for rank, receive in posted.items():
            await self._finish(receive, flats[rank])

    async def _exchange(
        self, operation: Operation, dst: int, give: Tensor, src: int, take: Target
    ) -> None:
        receive = self._post(operation, src, take)
        try:
            await self._send(operation, dst, give)
        except BaseException:
            self._channel.mailbox.cancel(receive)
            if receive.future.done() and not receive.future.cancelled():
                error = receive.future.exception()
                if isinstance(error, TensorMismatchError):
                    raise error from None
            raise
        await self._finish(receive, take)

    async def _swap(
        self,
        operation: Operation,
        gives: Mapping[int, Tensor],
        takes: Mapping[int, Target],
    ) -> None:
        """Send to many at once, and take what they send one after the other.

        Whatever the transport holds, somebody can always go on: all sends are under way
        while any receive is waited for.
        """
        sending: list[asyncio.Future[None]] = []
        try:
            for dst, give in gives.items():
                rest = begin(self._send(operation, dst, give))
                if rest is not None:
                    sending.append(asyncio.ensure_future(rest))
            for src, take in takes.items():
                await self._receive_into(operation, src, take)
            for task in sending:
                await task
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    async def _combine(self, combine: Combine, total: Tensor, arrived: Tensor) -> None:
        await offload(size_of(total), combine, total, arrived)

    def _alike(
        self, tensors: Sequence[Tensor] | None, like: Tensor, what: str
    ) -> list[Tensor]:
        """Return ``tensors`` if there is one like ``like`` for each rank."""
        return require_alike(tensors, like, self._size, what, _checked)


@dataclass(frozen=True, slots=True)
class _Sum:
    """A target that what arrives is combined with, straight out of shared memory.

    Nothing of ``total`` may be on its way to somebody else meanwhile. What comes over a
    socket goes to ``scratch``, of the same size, first.
    """

    combine: Combine
    total: Tensor
    scratch: Tensor

    def merge(self, begin: int, payload: memoryview) -> None:
        """Combine with the bytes from ``begin`` on: a fragment has whole elements."""
        self.add(begin, torch.frombuffer(payload, dtype=torch.uint8))

    def add(self, begin: int, part: Tensor) -> None:
        """Combine with a part that is given as bytes."""
        first = begin // self.total.element_size()
        other = part.view(self.total.dtype)
        self.combine(self.total[first : first + other.numel()], other)


Target = Tensor | _Sum
"""Where what arrives goes; a plain tensor is overwritten."""


def _checked(tensor: Tensor) -> Tensor:
    tensor = require_host(tensor, "a collective's tensor")
    code_of(tensor)
    return tensor


def _flat_copy(tensor: Tensor) -> Tensor:
    return plain(tensor).view(-1).clone()


async def _copy(target: Tensor, source: Tensor) -> None:
    await offload(size_of(target), target.copy_, source.reshape(target.shape))


class _Buffer:
    """A tensor as flat, contiguous memory, and the way back if that is a copy."""

    def __init__(self, tensor: Tensor, whole: Tensor) -> None:
        self._tensor = tensor
        self.flat = whole.view(-1)
        self._is_copy = whole is not tensor

    @classmethod
    async def of(cls, tensor: Tensor) -> _Buffer:
        """Return the tensor's own memory, or a copy of it."""
        if is_plain(tensor):
            return cls(tensor, tensor)
        return cls(tensor, await offload(size_of(tensor), plain, tensor))

    async def write_back(self) -> None:
        """Bring the tensor up to date."""
        if self._is_copy:
            await _copy(self._tensor, self.flat)
