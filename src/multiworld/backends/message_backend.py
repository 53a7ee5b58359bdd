"""Operations over lanes, shared by ``direct`` and ``memory``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from multiworld.backends import bundles, dtypes
from multiworld.backends import header as wire
from multiworld.backends.arrivals import Check, Description, allocate
from multiworld.backends.base import Bundle, Handler, Meta, Peek, Received, WorldView
from multiworld.backends.channel import Channel, Lane
from multiworld.backends.collective import Collectives
from multiworld.backends.lane_collectives import LaneCollectives
from multiworld.backends.offload import offload, size_of
from multiworld.backends.turns import Turns
from multiworld.errors import TensorMismatchError, UnsupportedOperationError
from multiworld.incarnation.lifecycle import Failed, Finished
from multiworld.liveness.manager_messages import (
    BackendMessage,
    EndCollectives,
    OpenLane,
)

P2P, COLLECTIVE = "p2p", "collective"


class MessageBackend:
    """Data transfer of one world over lanes. Subclasses define how a lane opens.

    The caller has checked the ranks. Every operation raises ``TensorMismatchError`` for
    a tensor or message that it cannot take, and ``WorldView.broken_error`` once
    ``abort`` was called. A receive takes from any member if ``src`` is None; a message
    of the wrong kind or size stays first in its queue. Cancelling a send withdraws the
    rest of the message, and cancelling a receive loses no message. A backend that
    cannot do this breaks the world instead.
    """

    def __init__(self, view: WorldView) -> None:
        self._view = view
        others = [m.rank for m in view.incarnation.members if m.rank != view.rank]
        budget = view.config.unexpected_bytes
        self._others = others
        self._p2p = Channel(others, budget)
        self._collective = Channel(others, budget)
        self._lane_collectives = LaneCollectives(
            view, self._collective, self._collective_lane
        )
        self.collectives: Collectives = self._lane_collectives
        self._opening: dict[int, asyncio.Task[Lane]] = {}
        # Keeps the sends to a rank in order while one of them is being prepared.
        self._turns = Turns()
        self._is_over = False

    async def _open_lane(self, rank: int, name: str, channel: Channel) -> Lane:
        raise NotImplementedError

    async def open(self) -> None:
        """Connect to the other members; after a cancellation, call ``close_nowait``."""
        loop = asyncio.get_running_loop()
        opening = [loop.create_task(self._open_p2p(rank)) for rank in self._others]
        try:
            await asyncio.gather(*opening)
        finally:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)

    async def _open_p2p(self, rank: int) -> None:
        lane = await self._open_lane(rank, P2P, self._p2p)
        self._p2p.lanes[rank] = lane
        if self._is_over:
            lane.close_nowait()

    # Point to point.

    async def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Send a tensor of any shape and strides, of a dtype in ``backends.dtypes``."""
        tensor = dtypes.require_host(tensor, "the tensor to send")
        code = dtypes.code_of(tensor)
        if dst not in self._turns and dtypes.is_plain(tensor):
            await self._send_plain(tensor, code, dst, tag)
            return
        async with self._turns.of(dst):
            tensor = await offload(size_of(tensor), dtypes.plain, tensor)
            await self._send_plain(tensor, code, dst, tag)

    async def _send_plain(self, tensor: Tensor, code: int, dst: int, tag: int) -> None:
        memory = dtypes.memory_of(tensor)
        shape = tuple(tensor.shape)
        description = Description(wire.TENSOR, code, shape, len(memory), tag, 0)
        await self._p2p.lanes[dst].send(description, memory, tensor)

    async def recv(self, out: Tensor | None, src: int | None, tag: int) -> Received:
        """Receive into ``out``, or into a new tensor if it is None. ``out`` has any
        shape and strides, and the sent dtype and number of elements. Cancelling leaves
        its content undefined."""
        if src is not None:
            found = self._p2p.next_from(src, tag)
            if found is not None:
                tensor = _target(out, found)
                if tensor is not None:
                    self._p2p.lanes[src].take(dtypes.memory_of(tensor))
                    return Received(tensor if out is None else out, src)
        if out is None:
            receive = self._p2p.post(src, tag, _check_tensor, _nowhere)
            arrival = await self._p2p.wait(receive)
            return Received(arrival.tensor, arrival.source)
        given, out = out, dtypes.require_host(out, "the tensor to receive into")
        fits = _Fits(out)
        receive = self._p2p.post(src, tag, fits.check, fits.place)
        arrival = await self._p2p.wait(receive, settles=False)
        try:
            if not arrival.is_borrowed:
                tensor = arrival.tensor.view(out.shape)
                await offload(size_of(out), dtypes.overwrite, out, tensor)
        except BaseException:
            self._p2p.mailbox.cancel(receive)
            raise
        self._p2p.mailbox.settle(receive)
        return Received(given, arrival.source)

    async def send_bundle(
        self, tensors: Mapping[str, Tensor], meta: Meta, dst: int, tag: int
    ) -> None:
        """Send named host tensors and JSON metadata as one message."""
        layout = bundles.lay_out(tensors, meta)
        async with self._turns.of(dst):
            packed = await offload(layout.size, layout.pack)
            size, label = packed.numel(), len(layout.manifest)
            description = Description(wire.BUNDLE, dtypes.UINT8, (), size, tag, label)
            await self._p2p.lanes[dst].send(
                description, dtypes.memory_of(packed), packed
            )

    async def recv_bundle(self, src: int | None, tag: int) -> Bundle:
        receive = self._p2p.post(src, tag, _check_bundle, _nowhere)
        arrival = await self._p2p.wait(receive)
        length = arrival.description.label
        return bundles.unpack_bundle(arrival.tensor, length, arrival.source)

    async def send_object(self, obj: Any, dst: int, tag: int) -> None:
        """Send JSON data."""
        body = bytearray(bundles.encode_object(obj, "the object to send"))
        memory = memoryview(body)
        description = Description(wire.OBJECT, dtypes.UINT8, (), len(body), tag, 0)
        if dst not in self._turns:
            await self._p2p.lanes[dst].send(description, memory, body)
            return
        async with self._turns.of(dst):
            await self._p2p.lanes[dst].send(description, memory, body)

    async def recv_object(self, src: int | None, tag: int) -> Any:
        receive = self._p2p.post(src, tag, _check_object, _nowhere)
        arrival = await self._p2p.wait(receive)
        return bundles.decode_object(bytes(arrival.memory))

    def handle(
        self, src: int, tag: int, handler: Handler, peek: Peek | None = None
    ) -> None:
        """Pass each tensor from ``src`` with this tag to ``handler`` as it arrives.
        ``peek`` may receive the bytes of a uint8 tensor in place of ``handler``. Raises
        ``UnsupportedOperationError`` if the backend cannot do this."""
        self._p2p.mailbox.handle(src, tag, handler, peek)

    # Lanes for collectives.

    async def _collective_lane(self, rank: int) -> None:
        if rank in self._collective.lanes:
            return
        if self._is_over:  # the world has ended: nothing would end the wait for a lane
            raise self._view.broken_error()
        # If the member opened a lane before it left, data sent on it still arrives.
        if self._view.has_left(rank) and not self._has_lane(rank):
            raise self._view.left_error(rank)
        if not self._view.dials(rank) and rank not in self._opening:
            self._view.notify(rank, OpenLane(self._view.incarnation.nonce))
        task = self._start_opening(rank)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._is_over:
                raise self._view.broken_error() from None
            if task.cancelled() and self._view.has_left(rank):
                raise self._view.left_error(rank) from None
            raise
        except OSError as error:
            # The connection failed. The control link soon reports whether the member
            # was lost.
            if self._view.has_left(rank):
                raise self._view.left_error(rank) from error
            self._view.trouble(rank, str(error))
            # Returns if the member is lost, or has left.
            await self._view.wait_gone(rank)
            if not self._is_over:
                raise self._view.left_error(rank) from error
            raise self._view.broken_error() from error

    def _start_opening(self, rank: int) -> asyncio.Task[Lane]:
        if rank not in self._opening:
            task = asyncio.get_running_loop().create_task(
                self._open_collective(rank), name="multiworld collective lane"
            )
            self._opening[rank] = task
            task.add_done_callback(_retrieve)
        return self._opening[rank]

    async def _open_collective(self, rank: int) -> Lane:
        lane = await self._open_lane(rank, COLLECTIVE, self._collective)
        if self._is_over:
            lane.close_nowait()
            raise self._view.broken_error()
        self._collective.lanes[rank] = lane
        if self._view.has_left(rank):
            lane.fail_sends(lambda: self._view.left_error(rank))
        return lane

    def _has_lane(self, rank: int) -> bool:
        return self._view.has_lane(rank, COLLECTIVE)

    def on_message(self, rank: int, message: BackendMessage) -> None:
        """Handle a control message from another member's backend."""
        if self._is_over:
            return
        match message:
            case OpenLane():
                self._start_opening(rank)
            case EndCollectives(number=number, left=left):
                self._lane_collectives.end_from(number, left)

    # Closing.

    def lane_ended(self, rank: int, evidence: str) -> None:
        if self._is_over:
            return
        if self._view.has_left(rank):  # the member left before it had sent all its data
            self._p2p.member_left(rank, lambda: self._view.left_error(rank))
            if rank in self._collective.lanes:
                self._collective.member_left(rank, lambda: self._view.left_error(rank))
        else:
            # The end of a lane is no proof: the control link decides whether the member
            # is lost.
            self._view.trouble(rank, evidence)

    def lane_corrupt(self, rank: int, evidence: str) -> None:
        reason = f"a corrupt frame arrived from rank {rank}"
        self._view.report(Failed(reason, evidence))

    def lane_finished(self, rank: int) -> None:
        self._view.report(Finished(rank))
        for channel in (self._p2p, self._collective):
            lane = channel.lanes.get(rank)
            if lane is not None and lane.is_finished:
                channel.mailbox.end(rank, self._view.left_error)
                lane.fail_sends(lambda: self._view.left_error(rank))

    def member_left(self, rank: int) -> None:
        """Fail the operations that need a member that has left."""
        self._p2p.member_left(rank, lambda: self._view.left_error(rank))
        if rank in self._collective.lanes or not self._has_lane(rank):
            self._collective.member_left(rank, lambda: self._view.left_error(rank))
        opening = self._opening.get(rank)
        if opening is not None and not self._has_lane(rank):
            opening.cancel()

    def member_ended(self, rank: int) -> None:
        """Fail receives from a member that has left, once nothing more can arrive."""
        for channel in (self._p2p, self._collective):
            channel.mailbox.end(rank, self._view.left_error)

    def is_arriving(self, rank: int) -> bool:
        """Return whether data from a member that has ended may still arrive."""
        return any(
            channel.lanes[rank].is_arriving
            for channel in (self._p2p, self._collective)
            if rank in channel.lanes
        )

    def abort(self) -> None:
        """Fail all operations and free everything, without waiting."""
        self._is_over = True
        self._cancel_opening()
        self._p2p.abort(self._view.broken_error)
        self._collective.abort(self._view.broken_error)

    def has_message(self, src: int | None, tag: int) -> bool:
        """Return whether a complete message waits, even in a broken world."""
        return self._p2p.mailbox.has_message(src, tag)

    def begin_close(self) -> None:
        """Queue a final frame after the sent data, without waiting; safe to repeat."""
        for lane in self._lanes():
            lane.begin_close(self._view.broken_error)

    async def close(self) -> None:
        """Wait until sent data has left this process. The caller limits the time, and
        then calls ``close_nowait``."""
        self.begin_close()
        await asyncio.gather(*(lane.wait_drained() for lane in self._lanes()))

    def close_nowait(self) -> None:
        """Free everything; TCP connections linger until the peer has read all."""
        self._is_over = True
        self._cancel_opening()
        for channel in (self._p2p, self._collective):
            channel.mailbox.abort(self._view.broken_error)
        for lane in self._lanes():
            lane.fail_sends(self._view.broken_error)
            if lane.finish_close(self._view.config.close_s):
                self._view.linger(lane)

    def drop_messages(self) -> None:
        """Drop what has arrived and was not received: the world is closed."""
        for channel in (self._p2p, self._collective):
            channel.mailbox.clear()

    def _cancel_opening(self) -> None:
        for task in self._opening.values():
            task.cancel()

    def _lanes(self) -> list[Lane]:
        return [*self._p2p.lanes.values(), *self._collective.lanes.values()]

    @property
    def process_group(self) -> ProcessGroup:
        raise UnsupportedOperationError(
            "this world's backend has no c10d process group; join it with "
            "backend='gloo' (or 'nccl')"
        )


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Keep asyncio from logging a task's error, which its awaiters get."""
    if not task.cancelled():
        task.exception()


def _target(out: Tensor | None, found: Description) -> Tensor | None:
    """Return the tensor to receive a message into without a copy, or None."""
    if found.kind != wire.TENSOR:
        return None
    if out is None:
        return allocate(found)
    out = dtypes.require_host(out, "the tensor to receive into")
    fits = dtypes.code_of(out) == found.dtype and out.nbytes == found.size
    return out if fits and dtypes.is_plain(out) else None


# Checks of the messages that a receive accepts.


def _nowhere(_: Description) -> Tensor | None:
    return None


class _Fits:
    def __init__(self, out: Tensor) -> None:
        if not out.is_contiguous():
            dtypes.require_receivable(out, "the tensor to receive into")
        self._out = out
        self._code = dtypes.code_of(out)
        self._size = out.numel() * out.element_size()

    def check(self, source: int, found: Description) -> Exception | None:
        if found.kind != wire.TENSOR:
            return _wrong_kind(source, found, "a tensor")
        if (found.dtype, found.size) == (self._code, self._size):
            return None
        return TensorMismatchError(
            f"rank {source} sent {list(found.shape)} of {dtypes.DTYPES[found.dtype]}, "
            f"but the tensor to receive into holds {self._out.numel()} of "
            f"{self._out.dtype}; the message is still there: receive it with a tensor "
            "that fits, or omit out"
        )

    def place(self, found: Description) -> Tensor | None:
        return self._out if dtypes.is_plain(self._out) else None


def _wrong_kind(source: int, found: Description, wanted: str) -> TensorMismatchError:
    receiver = {wire.TENSOR: "recv", wire.BUNDLE: "recv_bundle"}
    call = receiver.get(found.kind, "recv_object")
    return TensorMismatchError(
        f"rank {source} sent {wire.KIND_NAMES[found.kind]}, not {wanted}; the message "
        f"is still there: receive it with {call}"
    )


def _check_of(kind: int, what: str) -> Check:
    def check(source: int, found: Description) -> Exception | None:
        return None if found.kind == kind else _wrong_kind(source, found, what)

    return check


_check_tensor = _check_of(wire.TENSOR, "a tensor")
_check_bundle = _check_of(wire.BUNDLE, "a bundle")
_check_object = _check_of(wire.OBJECT, "an object")
