"""The ``c10d`` backend: Gloo, NCCL, or any backend registered with torch. Host tensors,
bundles and objects take the ``direct`` data path (``WorldConfig.host_p2p``). That path
also announces dtype and shape before the native group carries a tensor."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from multiworld.backends.base import Handler, Peek, Received, WorldView
from multiworld.backends.c10d.flat import as_bytes, flat_of, on_device
from multiworld.backends.c10d.group_collectives import GroupCollectives
from multiworld.backends.c10d.groups import Group, check_backend
from multiworld.backends.c10d.store import C10dStore
from multiworld.backends.c10d.work_runner import WorkRunner
from multiworld.backends.direct.backend import DirectBackend
from multiworld.backends.dtypes import CODES, DTYPES, is_plain, overwrite
from multiworld.backends.turns import Turns
from multiworld.errors import TensorMismatchError, UnsupportedOperationError
from multiworld.incarnation.lifecycle import Failed
from multiworld.liveness.manager_messages import BackendMessage, EndCollectives
from multiworld.net.threads import in_thread, settle
from multiworld.rendezvous.admission import key_prefix
from multiworld.rendezvous.blocking_values import BlockingValues

__all__ = ["C10dBackend", "check_backend"]

HEADER_TAG_BASE = 1 << 62  # first tag of announcements on the direct data path
MAX_BACKEND_TAG = 2**31 - 1  # largest tag that a native group carries: a C int


class C10dBackend(DirectBackend):
    """Backend of one world on a c10d group. Sends and receives of a native group cannot
    be withdrawn, so cancelling one breaks the world."""

    def __init__(self, view: WorldView, name: str) -> None:
        super().__init__(view)
        self._name = name
        self._rank, self._size = view.rank, view.incarnation.size
        self._loop = asyncio.get_running_loop()
        self._runner = WorkRunner(view, name)
        self.collectives = GroupCollectives(view, self._lane_collectives, self._runner)
        self._public: ProcessGroup | None = None
        # Locks by rank and tag. ``Turns`` drops a lock that nobody uses, because a
        # program may use each tag only once.
        self._sending, self._receiving = Turns(), Turns()
        # Announcements, by source and tag, whose tensor is not received yet. A receive
        # that does not match is refused; the announcement stays for the next receive.
        self._headers: dict[tuple[int, int], Any] = {}

    async def open(self) -> None:
        await super().open()
        incarnation = self._view.incarnation
        prefix = key_prefix(incarnation.world, incarnation.epoch, incarnation.nonce)
        host = incarnation.members[self._rank].address.host
        limit_s = self._view.config.join_s
        view = self._view
        values = await in_thread(
            lambda: BlockingValues(view.store, limit_s, view.security)
        )
        store = C10dStore(values, f"{prefix}{self._name}/", limit_s)
        self._runner.group = group = Group(
            self._name, store, self._view.device, self._loop.call_soon
        )
        making = asyncio.ensure_future(
            in_thread(
                lambda: group.make(
                    self._rank, self._size, host, self._view.config.operation_s
                )
            )
        )
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            group.give_up()
            making.add_done_callback(lambda making: _drop_made(making, group))
            self._runner.group = None
            raise
        except (RuntimeError, TimeoutError) as error:
            raise ConnectionError(f"{self._name} could not connect: {error}") from error

    # Point to point.

    def _is_ours(self, tensor: Tensor | None) -> bool:
        """Return whether the direct data path carries ``tensor``."""
        # A receive without a tensor expects one on the world's device.
        is_host_world = self._view.device.type == "cpu"
        if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
            return is_host_world  # the direct path refuses it with a clear error
        if not is_host_world:
            return tensor is not None
        return self._view.config.host_p2p == "direct"

    async def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        if self._is_ours(tensor):
            await super().send(tensor, dst, tag)
            return
        self._check_tag(tag)
        tensor = on_device(tensor, self._view.device, "the tensor to send")
        data = as_bytes(flat_of(tensor))
        header = [CODES[tensor.dtype], list(tensor.shape)]
        async with self._sending.of((dst, tag)):
            try:
                await self.send_object(header, dst, HEADER_TAG_BASE + tag)
            except asyncio.CancelledError:
                # The announcement may already have been sent. The receiver would then
                # expect the next tensor to have this size, and Gloo ends the process if
                # the size differs.
                reason = f"rank {self._rank} cancelled a send that was announced"
                self._view.report(Failed(reason))
                raise
            await self._runner.wait_in_thread(
                lambda native: native.send([data], dst, tag)
            )

    async def recv(self, out: Tensor | None, src: int | None, tag: int) -> Received:
        if self._is_ours(out):
            return await super().recv(out, src, tag)
        self._check_tag(tag)
        if src is None:
            raise UnsupportedOperationError(
                f"{self._name} cannot receive without a source rank: torch's call "
                "would hang if a member is lost; pass src, or use host_p2p='direct'"
            )
        async with self._receiving.of((src, tag)):
            code, shape = await self._next_header(src, tag)
            target = self._target(out, src, code, shape)
            data = as_bytes(target)
            del self._headers[src, tag]
            await self._runner.wait_in_thread(
                lambda native: native.recv([data], src, tag)
            )
        if out is not None and target.data_ptr() != out.data_ptr():
            overwrite(out.detach(), target.view(out.shape))
        return Received(target if out is None else out, src)

    async def _next_header(self, src: int, tag: int) -> Any:
        if (src, tag) not in self._headers:
            header = await self.recv_object(src, HEADER_TAG_BASE + tag)
            self._headers[src, tag] = header
        return self._headers[src, tag]

    def _target(
        self, out: Tensor | None, src: int, code: int, shape: list[int]
    ) -> Tensor:
        dtype = DTYPES[code]
        if out is None:
            return torch.empty(shape, dtype=dtype, device=self._view.device)
        on_device(out, self._view.device, "the tensor to receive into")
        if (out.dtype, out.numel()) != (dtype, math.prod(shape)):
            raise TensorMismatchError(
                f"rank {src} sent {shape} of {dtype}, but the tensor to receive into "
                f"has {out.numel()} elements of {out.dtype}; the message is still "
                "there: receive it with a tensor that fits, or omit out"
            )
        if is_plain(out):
            return out.detach()
        return torch.empty(out.shape, dtype=out.dtype, device=out.device)

    def _check_tag(self, tag: int) -> None:
        if tag > MAX_BACKEND_TAG or (self._name == "nccl" and tag):
            limit = 0 if self._name == "nccl" else MAX_BACKEND_TAG
            raise UnsupportedOperationError(
                f"tag {tag} exceeds the maximum of {self._name}, {limit}"
            )

    def handle(
        self, src: int, tag: int, handler: Handler, peek: Peek | None = None
    ) -> None:
        if self._view.device.type == "cpu" and self._view.config.host_p2p != "direct":
            raise UnsupportedOperationError(
                f"{self._name} cannot pass tensors to a handler; use host_p2p='direct'"
            )
        super().handle(src, tag, handler, peek)

    # Members and closing.

    @property
    def process_group(self) -> ProcessGroup:
        """The c10d group, registered with ``torch.distributed`` at the first use."""
        if self._public is None:
            from multiworld.backends.c10d.registration import register

            native = self._runner.native()
            assert self._runner.group is not None
            self._public = register(
                native,
                self._runner.group.store,
                self._rank,
                self._size,
                world=self._view.incarnation.world,
                device=self._view.device,
                name=self._name,
            )
        return self._public

    def on_message(self, rank: int, message: BackendMessage) -> None:
        if isinstance(message, EndCollectives) and message.left == rank:
            # A member that leaves sends this only if it has unfinished collectives;
            # otherwise, the native group's collectives continue.
            self._runner.abandoned(rank, message.number)
        else:
            super().on_message(rank, message)

    def abort(self) -> None:
        super().abort()
        self._free()

    def begin_close(self) -> None:
        if self._runner.unfinished:
            nonce, first = self._view.incarnation.nonce, min(self._runner.unfinished)
            for rank in range(self._size):
                if rank != self._rank:
                    self._view.notify(rank, EndCollectives(nonce, first, self._rank))
            self._runner.unfinished.clear()  # ``close`` calls this again
        super().begin_close()

    async def close(self) -> None:
        await super().close()
        dropped = self._loop.create_future()
        if self._free(lambda: settle(self._loop, dropped)):
            await dropped

    def close_nowait(self) -> None:
        super().close_nowait()
        self._free()

    def _free(self, done: Callable[[], None] | None = None) -> bool:
        group, self._runner.group = self._runner.group, None
        public, self._public = self._public, None
        if group is None:
            return False
        if public is not None:
            from multiworld.backends.c10d.registration import unregister

            unregister(public)
            del public
        if self._runner.is_busy or done is None:
            group.cut()
        self._runner.fail_all()
        group.drop(done)
        return True


def _drop_made(making: asyncio.Future[Any], group: Group) -> None:
    """Free a group whose construction outlived its cancelled caller."""
    if not making.cancelled():
        making.exception()
    group.drop()
