"""Algorithms of collectives over lanes; collectives run in the order of the calls.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication
Operations in MPICH", IJHPCA 19(1), 2005; dissemination barrier: D. Hensgen, R. Finkel,
U. Manber, IJPP 17(1), 1988.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.backends import dtypes
from multiworld.backends import header as wire
from multiworld.backends.arrivals import Description, Receive
from multiworld.backends.base import WorldView
from multiworld.backends.channel import Channel
from multiworld.backends.collective import Call, Operation
from multiworld.backends.eager import begin
from multiworld.backends.offload import offload, size_of
from multiworld.backends.reduction import Combine, finish_average
from multiworld.errors import MemberLeftError, TensorMismatchError, WorldError
from multiworld.incarnation.lifecycle import Failed
from multiworld.liveness.manager_messages import EndCollectives

# Maximum bytes that a member reduces before it sends the result: operand and result
# then fit into the cache, and into a lane's shared memory
# (``WorldConfig.shared_memory_bytes``).
CHUNK_BYTES = 2 * 1024 * 1024


def operation_of(found: Description) -> Operation:
    number, count = found.shape if len(found.shape) == 2 else (0, 0)
    label = found.label
    code, op, root = label >> 24, label >> 16 & 0xFF, label & 0xFFFF
    return Operation(number, code, found.dtype, count, root, op)


def _copy(target: Tensor, source: Tensor) -> None:
    with dtypes.written(target):
        target.copy_(source)


class LaneCollectives:
    """The collectives of one world over its lanes. Tensors named ``flat``, ``total`` or
    ``chunks`` are one-dimensional and contiguous."""

    def __init__(
        self,
        view: WorldView,
        channel: Channel,
        # Opens the lane to a rank at its first use.
        open_lane: Callable[[int], Awaitable[None]],
    ) -> None:
        self._view, self._channel, self._open_lane = view, channel, open_lane
        self.rank, self.size = view.rank, view.incarnation.size
        self.matching = functools.partial(
            dtypes.require_matching, size=self.size, check=checked
        )
        self._turn = asyncio.Lock()
        self._number = self._running = 0
        self._ends_at: tuple[int, int] | None = None

    # Algorithms.

    async def binomial_down(
        self, operation: Operation, flat: Tensor, root: int
    ) -> None:
        """Copy the root's tensor to all members along a binomial tree."""
        relative = (self.rank - root) % self.size
        mask = 1
        while mask < self.size and not relative & mask:
            mask *= 2
        if relative:
            parent = (relative - mask + root) % self.size
            await self.receive_into(operation, parent, flat)
        mask //= 2
        while mask:
            if relative + mask < self.size:
                child = (relative + mask + root) % self.size
                await self.send(operation, child, flat)
            mask //= 2

    async def binomial_up(
        self, operation: Operation, total: Tensor, root: int, combine: Combine
    ) -> None:
        """Reduce all tensors into the root's; other members get partial results."""
        relative = (self.rank - root) % self.size
        arrived = torch.empty_like(total)
        mask = 1
        while mask < self.size:
            if relative & mask:
                parent = (relative - mask + root) % self.size
                await self.send(operation, parent, total)
                return
            if relative + mask < self.size:
                child = (relative + mask + root) % self.size
                sum_up = Sum(combine, total, arrived)
                await self.receive_into(operation, child, sum_up)
            mask *= 2

    async def recursive_doubling(
        self, operation: Operation, flat: Tensor, combine: Combine
    ) -> None:
        """Reduce all members' tensors into every member's, by recursive doubling."""
        # Members up to the largest power of two exchange data pairwise. Each other
        # member sends its data to one of these, and gets the result from it.
        power = 1 << (self.size.bit_length() - 1)
        extra = self.size - power
        arrived = torch.empty_like(flat)
        if self.rank >= power:
            partner = self.rank - power
            await self.send(operation, partner, flat)
            await self.receive_into(operation, partner, flat)
            return
        if self.rank < extra:
            await self.receive_into(operation, self.rank + power, arrived)
            await offload(size_of(flat), combine, flat, arrived)
        # The lower rank's tensor comes first at both partners: MAX of 0.0 and -0.0, and
        # the bits of a NaN, depend on the order.
        total, mask = flat, 1
        while mask < power:
            partner = self.rank ^ mask
            await self.exchange(operation, partner, total, partner, arrived)
            if partner < self.rank:
                total, arrived = arrived, total
            await offload(size_of(total), combine, total, arrived)
            mask *= 2
        if total is not flat:
            await offload(size_of(flat), _copy, flat, total)
        if self.rank < extra:
            await self.send(operation, self.rank + power, flat)

    async def long_all_reduce(
        self, operation: Operation, flat: Tensor, combine: Combine, op: ReduceOp
    ) -> None:
        """Reduce by a reduce-scatter and an all-gather, one segment at a time."""
        segments = -(-size_of(flat) // (self.size * CHUNK_BYTES))
        for segment in flat.tensor_split(segments):
            chunks = list(segment.tensor_split(self.size))
            await self.reduce_mine(operation, chunks, combine)
            finish_average(op, chunks[self.rank], self.size)
            await self.gather_all(operation, chunks)

    async def reduce_mine(
        self, operation: Operation, chunks: Sequence[Tensor], combine: Combine
    ) -> None:
        """Reduce all members' chunks for this rank, always in the same order."""
        mine = chunks[self.rank]
        sum_up = Sum(combine, mine, torch.empty_like(mine))
        gives = {dst: chunks[dst] for dst, _ in self.pairs()}
        takes: dict[int, Target] = {src: sum_up for _, src in self.pairs()}
        await self._swap(operation, gives, takes)

    async def gather_all(self, operation: Operation, chunks: Sequence[Tensor]) -> None:
        """Send this rank's chunk to all other members and receive theirs."""
        gives = {dst: chunks[self.rank] for dst, _ in self.pairs()}
        takes: dict[int, Target] = {src: chunks[src] for _, src in self.pairs()}
        await self._swap(operation, gives, takes)

    # Steps.

    async def run(self, call: Call) -> None:
        """Number a call, wait for its turn, and carry it out."""
        # ``start`` checks the arguments now; the tensors are read when this call's turn
        # comes.
        steps = call.collective.start(self, call)
        self._number += 1
        operation = call.operation(self._number)
        try:
            async with self._turn:
                self._check_end(operation.number)
                self._running = operation.number
                for rank in self.others():
                    await self._open_lane(rank)
                await steps(operation)
        except asyncio.CancelledError:
            # The world breaks: other members may already have exchanged messages of
            # this collective, and would wait for this one.
            self._view.report(
                Failed(f"rank {self.rank} cancelled {operation} before it was complete")
            )
            raise
        except MemberLeftError as error:
            self._end_everywhere(operation.number, error.rank)
            raise
        except WorldError:
            raise
        except Exception as error:
            # E.g. out of memory. Unless this is reported, the other members hang.
            self._view.report(
                Failed(f"rank {self.rank} failed in {operation}: {error}")
            )
            raise

    def end_next(self, left: int) -> None:
        """Fail the next collective and all later ones everywhere.

        Member ``left`` left during the native collective that was last agreed on.
        """
        self._end_everywhere(self._number + 1, left)

    def _end_everywhere(self, number: int, left: int) -> None:
        # Notify the other members: they may be waiting for this member, and would not
        # notice that another one has left.
        self.end_from(number, left)
        note = EndCollectives(self._view.incarnation.nonce, number, left)
        for rank in self.others():
            self._view.notify(rank, note)

    def end_from(self, number: int, left: int) -> None:
        """Fail collective ``number`` and all later ones: member ``left`` has left."""
        if self._ends_at is None or number < self._ends_at[0]:
            self._ends_at = number, left
        if self._running >= number:
            self._channel.end(lambda: self._view.left_error(left))

    def _check_end(self, number: int) -> None:
        if self._ends_at is not None and number >= self._ends_at[0]:
            raise self._view.left_error(self._ends_at[1])

    def _disagree(self, error: TensorMismatchError) -> None:
        self._view.report(Failed(f"the members do not agree: {error}"))

    def others(self) -> list[int]:
        """Return the other ranks, from this one's successor on."""
        # In the order of ranks, all members would start with rank 0.
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def pairs(self) -> list[tuple[int, int]]:
        """Return the destination and the source of each step of a pairwise exchange."""
        size, rank = self.size, self.rank
        return [((rank + i) % size, (rank - i) % size) for i in range(1, size)]

    async def send(self, operation: Operation, dst: int, flat: Tensor) -> None:
        memory = dtypes.memory_of(flat)
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
        flat = target.scratch if isinstance(target, Sum) else target
        merge = target.merge if isinstance(target, Sum) else None
        size = size_of(flat)

        def check(source: int, found: Description) -> Exception | None:
            theirs = operation_of(found)
            if theirs == operation and found.size == size:
                return None
            error = TensorMismatchError(
                f"rank {self.rank} is in {operation}, rank {source} in {theirs}; all "
                "members must call the same collectives in the same order, with equal "
                "dtypes and sizes"
            )
            # Break the world now, not when the receive is awaited: this member may be
            # blocked in a send that the other never receives.
            asyncio.get_running_loop().call_soon(self._disagree, error)
            return error

        return self._channel.post(src, 0, check, lambda _: flat, merge)

    async def _finish(self, receive: Receive, target: Target) -> None:
        arrival = await self._channel.wait(receive)
        source = dtypes.flat(arrival.tensor).view(torch.uint8)
        if isinstance(target, Sum):
            if not arrival.is_merged:
                await offload(source.numel(), target.add, 0, source)
        elif not arrival.is_borrowed:
            target = target.view(torch.uint8)
            await offload(source.numel(), dtypes.overwrite, target, source)

    async def receive_into(
        self, operation: Operation, src: int, target: Target
    ) -> None:
        await self._finish(self._post(operation, src, target), target)

    async def receive_all(self, operation: Operation, flats: Sequence[Tensor]) -> None:
        """Receive one tensor from each other member into ``flats``, by rank."""
        posted = {
            rank: self._post(operation, rank, flats[rank]) for rank in self.others()
        }
        for rank, receive in posted.items():
            await self._finish(receive, flats[rank])

    async def exchange(
        self, operation: Operation, dst: int, give: Tensor, src: int, take: Target
    ) -> None:
        """Send one tensor and receive another at the same time."""
        receive = self._post(operation, src, take)
        try:
            await self.send(operation, dst, give)
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
        """Send to many members at once, and receive from them one after the other."""
        # This cannot deadlock, because all sends are in progress while a receive is
        # awaited.
        sending: list[asyncio.Future[None]] = []
        try:
            for dst, give in gives.items():
                rest = begin(self.send(operation, dst, give))
                if rest is not None:
                    sending.append(asyncio.ensure_future(rest))
            for src, take in takes.items():
                await self.receive_into(operation, src, take)
            for task in sending:
                await task
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Sum:
    """A target into which received data is reduced, directly from shared memory."""

    combine: Combine
    total: Tensor  # must not be in use by a send in progress
    scratch: Tensor  # like ``total``, for data that arrives over a socket

    def merge(self, begin: int, payload: memoryview) -> None:
        """Reduce a fragment of whole elements into ``total`` at byte ``begin``."""
        self.add(begin, torch.frombuffer(payload, dtype=torch.uint8))

    def add(self, begin: int, part: Tensor) -> None:
        first = begin // self.total.element_size()
        other = part.view(self.total.dtype)
        self.combine(self.total[first : first + other.numel()], other)


Target = Tensor | Sum  # a plain tensor is overwritten


def checked(tensor: Tensor, *, is_written: bool = False) -> Tensor:
    """Return a tensor that a collective can use, or raise ``TensorMismatchError``."""
    tensor = dtypes.require_host(tensor, "a collective's tensor")
    dtypes.code_of(tensor)
    if is_written:
        dtypes.require_receivable(tensor, "a collective's tensor")
    return tensor


def flat_copy(tensor: Tensor) -> Tensor:
    return dtypes.flat(dtypes.plain(tensor)).clone()


async def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy all elements of ``source`` into ``target``; large copies in a thread."""
    source = source.reshape(target.shape)
    await offload(size_of(target), dtypes.overwrite, target, source)


class Buffer:
    """A tensor as flat, contiguous memory; ``write_back`` undoes a copy."""

    def __init__(self, tensor: Tensor, whole: Tensor) -> None:
        self._tensor = tensor
        self.flat = dtypes.flat(whole)
        self._is_copy = whole is not tensor

    @classmethod
    async def of(cls, tensor: Tensor) -> Buffer:
        """Return a buffer on the tensor's own memory, or on a contiguous copy."""
        if dtypes.is_plain(tensor):
            return cls(tensor, tensor)
        return cls(tensor, await offload(size_of(tensor), dtypes.plain, tensor))

    async def write_back(self) -> None:
        if self._is_copy:
            await copy_into(self._tensor, self.flat)
