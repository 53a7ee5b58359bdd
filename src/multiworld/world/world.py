"""A world: the operations of one member on one incarnation. A broken world stays
broken; a new join of the name opens the next epoch, with another ``World`` object."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from multiworld.backends.base import Bundle, Handler, Peek
from multiworld.backends.collective import Call
from multiworld.backends.collectives import CollectiveMethods
from multiworld.config import is_int
from multiworld.errors import ConfigError, MultiWorldError
from multiworld.incarnation.lifecycle import Phase
from multiworld.net.threads import in_thread
from multiworld.world.local_member import LocalMember

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Bundle", "World", "WorldStatistics"]

# The maximum tag of a message; larger tags announce messages of native groups.
MAX_TAG = 2**62 - 1

# Seconds beyond ``silence_s`` to wait until the failure detector has found the cause of
# a native error.
VERDICT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldStatistics:
    """A snapshot of one world.

    Attributes:
        world, epoch, rank, size: The world's name, and as in ``World``.
        phase: "joining", "ready", "broken" or "closed".
        left: Ranks that have left gracefully.
        pending: Operations in progress.
        started: Operations started since the incarnation was opened.
    """

    world: str
    epoch: int
    rank: int
    size: int
    phase: str
    left: frozenset[int]
    pending: int
    started: int


class _Pending:
    """Counts operations while they run; a generator would be slower per message."""

    __slots__ = ("count", "started")

    def __init__(self) -> None:
        self.count = self.started = 0

    def __enter__(self) -> None:
        self.count += 1
        self.started += 1

    def __exit__(self, *error: object) -> None:
        self.count -= 1


class Changes(Protocol):
    """Opens the next incarnation of a world."""

    async def reform(self, name: str) -> World:
        """Return the smaller world; see ``World.reform``. Cancellation: As there.

        Args:
            name: The world's name.
        """

    async def grow(self, name: str, to: int) -> World:
        """Return the larger world; see ``World.grow``. Cancellation: As there.

        Args:
            name, to: The world's name, and its new size.
        """


class World(CollectiveMethods):
    """One incarnation of a world, as one member sees it.

    ``WorldManager.join`` returns it. Call its methods on the manager's event loop only;
    ``multiworld.blocking`` is for threads. Any number of operations may be pending at
    once, on one world and on many.

    Every operation raises ``WorldBrokenError`` (``MemberLostError`` if a member is
    known to be lost) if the world is or becomes broken, ``WorldClosedError`` if this
    process has left it, ``MemberLeftError`` if a member that it needs has left, and
    ``ConfigError`` for an invalid rank or tag.

    Attributes:
        name: The world's name.
        epoch: Number of this incarnation.
        rank: This member's rank.
        size: World size.
        backend_name: Name of the backend.
    """

    def __init__(self, member: LocalMember, changes: Changes) -> None:
        self._changes = changes
        incarnation = member.incarnation
        self.name, self.epoch = incarnation.world, incarnation.epoch
        self.rank, self.size = member.rank, incarnation.size
        self.backend_name = member.backend_name
        self._member = member
        self._collectives = member.backend.collectives
        self._pending = _Pending()

    def __repr__(self) -> str:
        place = f"rank {self.rank}/{self.size} epoch {self.epoch}"
        state = self._member.phase.value
        return f"<World {self.name!r} {state} {place} {self.backend_name}>"

    # Health.

    @property
    def is_ready(self) -> bool:
        """True while operations are possible."""
        return self._member.phase is Phase.READY

    @property
    def is_broken(self) -> bool:
        """True once a fault has broken the world."""
        return self._member.phase is Phase.BROKEN

    @property
    def is_closed(self) -> bool:
        """True once this process has left the world."""
        return self._member.phase is Phase.CLOSED

    @property
    def left(self) -> frozenset[int]:
        """Ranks that have left gracefully."""
        return self._member.left

    @property
    def lost(self) -> frozenset[int]:
        """Ranks known to be lost; the set may grow after the world broke."""
        return self._member.lost

    def silent_s(self, rank: int) -> float:
        """Return the seconds since a member's last sign of life; 0 for this process.

        The failure detector waits for ``WorldConfig.silence_s``. A program that
        distributes work can react earlier: heartbeats are sent and evaluated every 0.1
        s, so 0.3 s or more is suspicious. A stopped process counts as silent, although
        its helper still sends.

        Args:
            rank: Rank of the member.
        """
        self._check_rank(rank, self_too=True)
        return self._member.silent_s(rank)

    @property
    def members(self) -> tuple[str, ...]:
        """Human-readable descriptions of the members, by rank."""
        return tuple(map(str, self._member.incarnation.members))

    def statistics(self) -> WorldStatistics:
        """Return a snapshot of this world."""
        return WorldStatistics(
            world=self.name,
            epoch=self.epoch,
            rank=self.rank,
            size=self.size,
            phase=self._member.phase.value,
            left=self._member.left,
            pending=self._pending.count,
            started=self._pending.started,
        )

    async def wait_over(self) -> None:
        """Wait until the world is broken or closed. Cancellation: Safe."""
        await self._member.wait_over()

    async def wait_incomplete(self) -> None:
        """Wait until the world ends or a member has left. Cancellation: Safe."""
        await self._member.wait_incomplete()

    @contextlib.asynccontextmanager
    async def named_errors(self) -> AsyncIterator[None]:
        """Yield to code that uses ``process_group``; turn its errors into the world's.

        ``DistributedDataParallel`` and other users of ``process_group`` raise the
        backend's ``RuntimeError``, which does not name the lost member. This context
        manager raises ``WorldBrokenError`` (``MemberLostError`` names the member) or
        ``MemberLeftError`` instead::

            async with world.named_errors():
                await asyncio.to_thread(train_step)

        Cancellation: Safe; the code inside handles its own cancellation.
        """
        try:
            yield
        except RuntimeError as error:
            await self._await_verdict()
            self.raise_if_over(error)
            raise
        await self._await_device()

    async def _await_device(self) -> None:
        """Wait for the GPU, then raise the world's error if the world is broken."""
        # The loss of a member ends the GPU's kernels early, with wrong results but no
        # error, so check the world afterwards.
        device = self._member.device
        if device.type == "cuda":
            await in_thread(lambda: torch.cuda.synchronize(device))
            if self.is_broken:
                self.raise_if_over()

    async def _await_verdict(self) -> None:
        try:
            async with asyncio.timeout(self._member.config.silence_s + VERDICT_S):
                await self.wait_incomplete()
        except TimeoutError:
            pass  # the world is not broken, so the error has another cause

    def raise_if_over(self, cause: BaseException | None = None) -> None:
        """Raise this world's error if it is broken or closed, or a member has left.

        Args:
            cause: The error that made the caller check.
        """
        try:
            self._member.check()
            for rank in sorted(self.left):
                raise self._member.left_error(rank)
        except MultiWorldError as named:
            raise named from cause

    # Point to point.

    async def send(self, tensor: Tensor, *, dst: int, tag: int = 0) -> None:
        """Send one tensor, with its dtype and shape.

        Returns once the message has left this process, so that it arrives even if this
        process then computes for a long time, or is killed; the caller may change the
        tensor again. A small message usually does not wait for the receiver; a large
        one may.

        Args:
            tensor: Any dtype, shape and strides; on the host, or, in a c10d world for
                devices, on this world's device.
            dst: The receiver's rank in this world.
            tag: Messages of one tag arrive in the order in which they were sent; a
                receive takes only messages of its own tag.

        Raises:
            TensorMismatchError: The tensor's device, dtype or layout cannot be sent.

        Cancellation:
            ``direct`` finishes the fragment that is being written (at most 256 KiB over
            a socket, 512 KiB in shared memory) and withdraws the rest: the receiver
            gets the whole message or nothing. ``memory`` withdraws the message. A send
            by a c10d backend itself cannot be withdrawn, so the world breaks.
        """
        with self._operation(dst, tag):
            await self._member.backend.send(tensor, dst, tag)

    async def recv(
        self, out: Tensor | None = None, *, src: int, tag: int = 0
    ) -> Tensor:
        """Return one received tensor: ``out``, or a new one.

        Receives from one source are served in the order in which they were called. A
        broken world still delivers the messages that had arrived.

        Args:
            out: Tensor to fill, of the sent dtype and number of elements; any shape and
                strides. None: a new tensor of the sent dtype and shape, on this world's
                device.
            src: The sender's rank in this world.
            tag: Tag of the message.

        Raises:
            TensorMismatchError: The message does not fit ``out``, or is a bundle or an
                object. The message stays first in its queue; receive it with a call
                that fits.
            MemberLeftError: The sender has left, and all its messages were received.

        Cancellation:
            Loses no message, even one that has partly arrived; the content of ``out``
            is undefined. A receive by a c10d backend itself cannot be withdrawn, so the
            world breaks.
        """
        with self._receiving(src, tag):
            return (await self._member.backend.recv(out, src, tag)).tensor

    async def recv_any(
        self, out: Tensor | None = None, *, tag: int = 0
    ) -> tuple[int, Tensor]:
        """Return the sender's rank and the tensor of the first message that arrives.

        Args:
            out, tag: As for ``recv``.

        Raises:
            MemberLeftError: All other members have left.
            ConfigError: The world has no other members.

        Cancellation: As for ``recv``.
        """
        if self.size == 1:
            rule = (
                f"recv_any needs another member in world {self.name!r}: join it with "
            )
            raise ConfigError("size", self.size, rule + "size 2 or more")
        with self._receiving(None, tag):
            received = await self._member.backend.recv(out, None, tag)
            return received.source, received.tensor

    async def send_bundle(
        self,
        tensors: Mapping[str, Tensor],
        *,
        dst: int,
        meta: Mapping[str, Any] | None = None,
        tag: int = 0,
    ) -> None:
        """Send several named tensors and metadata as one message.

        Args:
            tensors: Tensors by name; any dtypes and shapes, on the host.
            dst, tag: As for ``send``.
            meta: JSON data: str, int, float, bool, None, lists and dicts.

        Raises:
            TensorMismatchError: A tensor cannot be sent.
            ConfigError: A name is not a str, or ``meta`` is not JSON data.

        Cancellation: As for ``send``.
        """
        with self._operation(dst, tag):
            await self._member.backend.send_bundle(tensors, meta or {}, dst, tag)

    async def recv_bundle(self, *, src: int | None = None, tag: int = 0) -> Bundle:
        """Return the tensors, metadata and source of a ``send_bundle`` message.

        Args:
            src, tag: As for ``recv``; ``src`` None: any member.

        Errors and Cancellation: As for ``recv``.
        """
        with self._receiving(src, tag):
            return await self._member.backend.recv_bundle(src, tag)

    async def send_object(self, obj: Any, *, dst: int, tag: int = 0) -> None:
        """Send small JSON data. Nothing is ever pickled.

        Args:
            obj: JSON data, as for ``meta`` of ``send_bundle``; otherwise
                ``ConfigError``.
            dst, tag: As for ``send``.

        Cancellation: As for ``send``.
        """
        with self._operation(dst, tag):
            await self._member.backend.send_object(obj, dst, tag)

    async def recv_object(self, *, src: int | None = None, tag: int = 0) -> Any:
        """Return data that ``send_object`` sent, with tuples as lists.

        Args:
            src, tag: As for ``recv_bundle``.

        Errors and Cancellation: As for ``recv``.
        """
        with self._receiving(src, tag):
            return await self._member.backend.recv_object(src, tag)

    def handle(
        self, handler: Handler, *, src: int, tag: int = 0, peek: Peek | None = None
    ) -> None:
        """Pass each tensor from a member to a function as it arrives.

        The function is called on the event loop, in the order of sending, until the
        world ends; it must be short and must not raise. Bundles and objects still wait
        for receives.

        Args:
            handler: Function of the tensor, which is new memory.
            src, tag: The sender's rank in this world, and the tag of the tensors.
            peek: Function of the bytes of a uint8 tensor, which may be called instead,
                to save a copy. The bytes are valid until it returns.

        Raises:
            UnsupportedOperationError: The backend is not ``direct`` or ``memory``.
        """
        self._check_rank(src, self_too=False)
        with self._operation(src, tag):
            self._member.backend.handle(src, tag, handler, peek)

    async def _call(self, call: Call) -> None:
        root = call.root if call.collective.has_root else None
        with self._operation(root, self_too=True):
            await self._collectives.run(call)

    # c10d.

    @property
    def process_group(self) -> ProcessGroup:
        """The c10d process group, which ends with this world.

        Raises:
            UnsupportedOperationError: This world's backend is not a c10d backend.
        """
        self._member.check()
        return self._member.backend.process_group

    def device_mesh(self, dim_name: str = "world") -> DeviceMesh:
        """Return a one-dimensional DeviceMesh over ``process_group``, for DTensor.

        Args:
            dim_name: Name of the mesh's dimension.
        """
        from multiworld.backends.c10d.registration import mesh_of

        return mesh_of(self.process_group, self._member.device, dim_name)

    # Changing size.

    @property
    def waiting(self) -> dict[int, int]:
        """World size that each waiting newcomer expects, by its rank; see ``grow``."""
        return dict(self._member.waiting)

    async def reform(self) -> World:
        """Return the next incarnation, without the members that are lost or have left.

        Every survivor must call it; no call returns before all have called. Survivors
        keep their order; their ranks become consecutive. The name stays and the epoch
        grows; this object stays broken. The store lets the first claims decide who
        survives, so two members that accuse each other do not both continue. If another
        member is lost during the call, the world continues without it, too. The next
        incarnation may have only this member. Called on an older incarnation, this acts
        on the newest one of the name.

        Raises:
            StaleEpochError: The others continued without this member; join again.
            JoinTimeoutError: A survivor did not call within ``WorldConfig.join_s``.
            ConfigError: No member is lost, and none has left.
            WorldClosedError: This process has closed the world.
            StoreUnreachableError: No store answered.

        Cancellation:
            Before the store admits the next incarnation, the claim is withdrawn and
            this world stays as it is. After the admission, this world is closed. If
            some members of the next incarnation had not connected yet, that incarnation
            is kept as broken, and ``manager.world(name).reform()`` recovers it;
            otherwise it is closed, too.
        """
        return await self._changes.reform(self.name)

    async def grow(self, *, to: int) -> World:
        """Return the next incarnation, with newcomers; this one stays open until then.

        A collective: every member calls ``grow`` with the same ``to``. Each newcomer
        joins as usual, with ``manager.join(name, rank=r, size=to, ...)`` and one of the
        new ranks; the event ``MemberWaiting`` notifies the members of each newcomer
        that waits. Members keep their ranks. Other worlds are not affected. This
        incarnation is closed, and messages that were not received are dropped.

        Args:
            to: The new world size.

        Raises:
            JoinTimeoutError: Not all members claimed their ranks within
                ``WorldConfig.join_s`` (this world then stays usable), or a member did
                not connect after its admission (this world is then closed).
            WorldBrokenError: A member was lost. If the store had already admitted the
                next incarnation, that incarnation is broken on every member:
                ``manager.world(name).reform()`` recovers it.
            ConfigError: ``to`` is not greater than the present size.
            JoinMismatchError: Members or newcomers give different sizes or settings.
            StoreUnreachableError: No store answered; this world stays usable.

        Cancellation: As for ``reform``.
        """
        self._member.check()
        return await self._changes.grow(self.name, to)

    # The end.

    async def close(self) -> None:
        """Leave gracefully: the others get all sent data, then ``MemberLeftError``.

        Waits at most ``WorldConfig.close_s`` for sent data to leave. May be repeated.

        Cancellation: The world is closed at once.
        """
        await self._member.close()

    # Checks.

    def _operation(
        self, peer: int | None = None, tag: int = 0, *, self_too: bool = False
    ) -> _Pending:
        """Check an operation's arguments; return the context that counts it."""
        self._member.check()
        if peer is not None:
            self._check_rank(peer, self_too=self_too)
        if not is_int(tag) or not 0 <= tag <= MAX_TAG:
            raise ConfigError("tag", tag, "give an int from 0 to 2**62-1")
        return self._pending

    def _receiving(self, src: int | None, tag: int) -> _Pending:
        """Check a receive; a broken world still delivers what has arrived."""
        if self._member.is_broken and self._member.has_message(src, tag):
            return self._pending
        return self._operation(src, tag)

    def _check_rank(self, rank: int, *, self_too: bool) -> None:
        if not is_int(rank) or not 0 <= rank < self.size:
            rule = f"world {self.name!r} has ranks 0 to {self.size - 1}"
            raise ConfigError("rank", rank, rule)
        if rank == self.rank and not self_too:
            rule = f"this is rank {rank} of world {self.name!r} itself"
            raise ConfigError("rank", rank, rule)
