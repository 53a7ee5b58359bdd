"""A world: a process group, its health, and the operations on it. Shell.

``World`` carries out what ``lifecycle`` decides and hands the operations to its
backend. A broken world stays broken: the same name is joined again as the next epoch,
and that is another ``World``.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from multiworld.backends import make_backend
from multiworld.backends.base import Bundle, Lingering
from multiworld.config import WorldConfig
from multiworld.errors import ConfigError, MemberLeftError, WorldClosedError
from multiworld.events import Event
from multiworld.lifecycle import (
    CloseAsked,
    Failed,
    FailMember,
    FailOperations,
    Happening,
    Life,
    Opened,
    Phase,
    Publish,
    SaidLeft,
    TellBroken,
    TellLeft,
    WasLost,
    handle,
)
from multiworld.liveness import Verdict
from multiworld.membership import Incarnation
from multiworld.rendezvous.address import StoreAddress
from multiworld.watchdog import WatchDog

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Bundle", "World", "WorldStatistics"]

MAX_TAG = 2**63 - 1

LINK_GRACE_S = 1.0
"""How long a world waits, when a data connection has ended, for the control link to
tell why. Both end together when a process dies; the link's word only has to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldStatistics:
    """A snapshot of one world.

    Attributes:
        phase: "joining", "ready", "broken" or "closed".
        left: Ranks that have left politely.
        pending: Operations that wait right now.
        completed: Operations that have completed since the world was made.
    """

    world: str
    epoch: int
    rank: int
    size: int
    phase: str
    left: frozenset[int]
    pending: int
    completed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a manager gives each of its worlds."""

    watchdog: WatchDog
    store: StoreAddress
    publish: Callable[[Event], None]
    over: Callable[[World], None]
    linger: Callable[[Lingering], None]


class World:
    """One incarnation of a world, seen by one member. Made by ``WorldManager.join``.

    All methods are for the manager's event loop only (``multiworld.blocking`` is for
    threads). Any number of operations may be pending at once, on one world and on many.

    Every operation raises ``WorldBrokenError`` (``MemberLostError`` where a member is
    known to be lost) if the world is or becomes broken, ``WorldClosedError`` if this
    process has left it, ``MemberLeftError`` if a member that it needs has left, and
    ``ConfigError`` for a rank or tag that cannot be.

    Attributes:
        name: The world's name.
        epoch: Its incarnation.
        rank: This member's rank.
        size: World size.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        rank: int,
        backend: str,
        config: WorldConfig,
        device: torch.device,
        around: Surroundings,
    ) -> None:
        self.name, self.epoch = incarnation.world, incarnation.epoch
        self.rank, self.size = rank, incarnation.size
        self.device, self.backend_name = device, backend
        self._around = around
        self._loop = asyncio.get_running_loop()
        self._life = Life(world=self.name, epoch=self.epoch, rank=rank, size=self.size)
        self._over = self._loop.create_future()
        self._ready_ranks = {rank}
        self._all_ready = self._loop.create_future()
        self._grace: dict[int | None, asyncio.TimerHandle] = {}
        self._pending = self._completed = 0
        self._is_forked = False
        self._view = _View(self, incarnation, config, around)
        self._backend = make_backend(backend, self._view)

    def __repr__(self) -> str:
        state = self._life.phase.value
        place = f"rank {self.rank}/{self.size} epoch {self.epoch}"
        return f"<World {self.name!r} {state} {place} {self.backend_name}>"

    # Health.

    @property
    def is_ready(self) -> bool:
        """True while traffic may flow."""
        return self._life.phase is Phase.READY

    @property
    def is_broken(self) -> bool:
        """True once something outside has ended it."""
        return self._life.phase is Phase.BROKEN

    @property
    def is_closed(self) -> bool:
        """True once this process has left it."""
        return self._life.phase is Phase.CLOSED

    @property
    def left(self) -> frozenset[int]:
        """Ranks that have left politely."""
        return self._life.left

    @property
    def members(self) -> tuple[str, ...]:
        """Who is in it, by rank, for messages to people."""
        return tuple(map(str, self._view.incarnation.members))

    def statistics(self) -> WorldStatistics:
        """Return a snapshot."""
        return WorldStatistics(
            world=self.name,
            epoch=self.epoch,
            rank=self.rank,
            size=self.size,
            phase=self._life.phase.value,
            left=self._life.left,
            pending=self._pending,
            completed=self._completed,
        )

    async def wait_over(self) -> None:
        """Wait until the world is broken or closed.

        Cancellation: safe.
        """
        await asyncio.shield(self._over)

    # Point to point.

    async def send(self, tensor: Tensor, *, dst: int, tag: int = 0) -> None:
        """Send one tensor; its dtype and shape travel with it.

        Returns when the tensor may be used again. Messages of up to
        ``WorldConfig.eager_bytes`` do not wait for the receiver; larger ones may.

        Args:
            tensor: Any dtype, shape and strides; on the host, or, on a c10d world for
                devices, on this world's device.
            dst: The receiver's rank in this world.
            tag: Messages of one tag arrive in the order they were sent; a receive takes
                only those of its own tag.

        Raises:
            TensorMismatchError: The tensor cannot be sent (device, layout).

        Cancellation: ``direct`` finishes the fragment that is being written (at most
        256 KiB) and withdraws the rest: the receiver sees the whole message or nothing.
        ``memory`` withdraws. A c10d backend's own send cannot be withdrawn: the world
        breaks.
        """
        with self._operation(dst, tag):
            await self._backend.send(tensor, dst, tag)

    async def recv(
        self, out: Tensor | None = None, *, src: int, tag: int = 0
    ) -> Tensor:
        """Receive one tensor.

        Several receives from one source are served in the order they were called.

        Args:
            out: Where to put it: of the sent dtype and number of elements, any shape
                and strides. None: a new tensor of the sent dtype and shape.
            src: The sender's rank in this world.
            tag: Only messages of this tag.

        Returns:
            ``out``, or the new tensor.

        Raises:
            TensorMismatchError: The message does not fit ``out``, or is a bundle or an
                object. It stays at the head: receive it another way.

        Cancellation: no message is lost, at whatever byte it is; the content of ``out``
        is undefined. A c10d backend's own receive cannot be withdrawn: the world
        breaks.
        """
        with self._operation(src, tag):
            return (await self._backend.recv(out, src, tag)).tensor

    async def recv_any(
        self, out: Tensor | None = None, *, tag: int = 0
    ) -> tuple[int, Tensor]:
        """Receive one tensor from whichever member is first.

        Returns:
            The sender's rank, and the tensor as ``recv`` returns it.

        Raises:
            MemberLeftError: All other members have left.

        Cancellation: as for ``recv``.
        """
        with self._operation(None, tag):
            received = await self._backend.recv(out, None, tag)
            return received.source, received.tensor

    async def send_bundle(
        self,
        tensors: Mapping[str, Tensor],
        *,
        dst: int,
        meta: Mapping[str, Any] | None = None,
        tag: int = 0,
    ) -> None:
        """Send several named tensors and a little metadata as one message.

        Args:
            tensors: By name; any dtypes and shapes, on the host.
            dst: The receiver's rank in this world.
            meta: What JSON can say.
            tag: As for ``send``.

        Cancellation: as for ``send``.
        """
        with self._operation(dst, tag):
            await self._backend.send_bundle(tensors, meta or {}, dst, tag)

    async def recv_bundle(self, *, src: int | None = None, tag: int = 0) -> Bundle:
        """Receive what ``send_bundle`` sent; from anybody if ``src`` is None.

        Cancellation: as for ``recv``.
        """
        with self._operation(src, tag):
            return await self._backend.recv_bundle(src, tag)

    async def send_object(self, obj: Any, *, dst: int, tag: int = 0) -> None:
        """Send small plain data: what JSON can say. Nothing is ever unpickled.

        Cancellation: as for ``send``.
        """
        with self._operation(dst, tag):
            await self._backend.send_object(obj, dst, tag)

    async def recv_object(self, *, src: int | None = None, tag: int = 0) -> Any:
        """Receive what ``send_object`` sent; from anybody if ``src`` is None.

        Cancellation: as for ``recv``.
        """
        with self._operation(src, tag):
            return await self._backend.recv_object(src, tag)

    # Collectives.

    async def broadcast(self, tensor: Tensor, *, src: int) -> Tensor:
        """Copy ``tensor`` of ``src`` into everybody's ``tensor``, and return it.

        Every member calls it with equal dtype and number of elements.

        Raises:
            TensorMismatchError: The members called different things; the world breaks.

        Cancellation: cannot be withdrawn, since the others count on this member: the
        world breaks, and no other. So for every collective.
        """
        with self._operation(src, self_too=True):
            await self._backend.broadcast(tensor, src)
        return tensor

    async def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """Reduce everybody's ``tensor`` into everybody's ``tensor``, and return it.

        Args:
            tensor: Of equal dtype and number of elements on every member.
            op: A ``torch.distributed.ReduceOp``.

        Raises:
            UnsupportedOperationError: ``op`` does not exist for the dtype.

        Cancellation: as for ``broadcast``.
        """
        with self._operation():
            await self._backend.all_reduce(tensor, op)
        return tensor

    async def reduce(
        self, tensor: Tensor, *, dst: int, op: Any = ReduceOp.SUM
    ) -> Tensor:
        """Reduce everybody's ``tensor`` into that of ``dst``, and return it.

        The other members' tensors stay as they are.

        Cancellation: as for ``broadcast``.
        """
        with self._operation(dst, self_too=True):
            await self._backend.reduce(tensor, dst, op)
        return tensor

    async def all_gather(
        self, tensor: Tensor, outs: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Return every member's tensor, by rank (in ``outs`` if given).

        Cancellation: as for ``broadcast``.
        """
        with self._operation():
            outs = self._like(tensor) if outs is None else outs
            await self._backend.all_gather(outs, tensor)
        return list(outs)

    async def gather(
        self, tensor: Tensor, *, dst: int, outs: Sequence[Tensor] | None = None
    ) -> list[Tensor] | None:
        """Return every member's tensor, by rank, at ``dst``; None elsewhere.

        Cancellation: as for ``broadcast``.
        """
        with self._operation(dst, self_too=True):
            if self.rank != dst:
                outs = None
            elif outs is None:
                outs = self._like(tensor)
            await self._backend.gather(tensor, outs, dst)
        return None if outs is None else list(outs)

    async def scatter(
        self, out: Tensor, tensors: Sequence[Tensor] | None = None, *, src: int
    ) -> Tensor:
        """Receive into ``out`` this rank's element of ``tensors`` of ``src``.

        Args:
            out: Of the dtype and number of elements of each of ``tensors``.
            tensors: One for each rank; at ``src`` only.
            src: The rank that gives.

        Cancellation: as for ``broadcast``.
        """
        with self._operation(src, self_too=True):
            await self._backend.scatter(out, tensors if self.rank == src else None, src)
        return out

    async def reduce_scatter(
        self, out: Tensor, tensors: Sequence[Tensor], op: Any = ReduceOp.SUM
    ) -> Tensor:
        """Reduce ``tensors[i]`` of all members into ``out`` of member i.

        Cancellation: as for ``broadcast``.
        """
        with self._operation():
            await self._backend.reduce_scatter(out, tensors, op)
        return out

    async def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor]
    ) -> list[Tensor]:
        """Send ``ins[i]`` to member i; return what each sent here, in ``outs``.

        Args:
            outs: One for each rank, all of one dtype and number of elements.
            ins: Likewise.

        Cancellation: as for ``broadcast``.
        """
        with self._operation():
            await self._backend.all_to_all(outs, ins)
        return list(outs)

    async def barrier(self) -> None:
        """Wait until every member has called it.

        Cancellation: as for ``broadcast``.
        """
        with self._operation():
            await self._backend.barrier()

    # c10d.

    @property
    def process_group(self) -> ProcessGroup:
        """The c10d group, for code that wants one: ``torch.distributed`` functions,
        functional collectives, DeviceMesh, DTensor. It dies with this world.

        Raises:
            UnsupportedOperationError: The backend is not one of c10d's.
        """
        self._check()
        return self._backend.process_group

    def device_mesh(self, dim_name: str = "world") -> DeviceMesh:
        """Return a one-dimensional DeviceMesh over this world, for DTensor.

        Raises:
            UnsupportedOperationError: The backend is not one of c10d's.
        """
        from multiworld.backends.c10d.registration import mesh_of

        return mesh_of(self.process_group, self.device, dim_name)

    # The end.

    async def close(self) -> None:
        """Leave politely: the others get what was sent, then ``MemberLeftError``.

        Waits at most ``WorldConfig.close_s`` for what was sent to leave this process.
        Safe to repeat, and on a broken world.

        Cancellation: the world is closed all the same, at once.
        """
        is_first = not self.is_closed
        self._happen(CloseAsked())
        if not is_first:
            return
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._view.config.close_s):
                    await self._backend.close()
        finally:
            self._free()

    def close_nowait(self) -> None:
        """Leave politely, without waiting for what the network has not taken."""
        is_first = not self.is_closed
        self._happen(CloseAsked())
        if is_first:
            self._free()

    def abandon_after_fork(self) -> None:
        """Make every operation of this copy in a forked child fail."""
        self._is_forked = True

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        return self._backend.filenos()

    # Joining, for the manager.

    async def open(self) -> None:
        """Connect to every member and wait until all have done so.

        Raises:
            WorldBrokenError: A member was lost meanwhile.
            OSError: A member could not be reached.

        Cancellation: the caller closes the world.
        """
        view = self._view
        await view.watchdog.attach(
            view.incarnation,
            self.rank,
            self,
            silence_s=view.config.silence_s,
            mode=view.config.heartbeat,
        )
        if self._life.breakage is not None:
            raise self._life.breakage.error()
        await self._until_over(self._backend.open())
        for rank in self._others():
            view.watchdog.tell(view.incarnation.nonce, rank, {"op": "ready"})
        self._check_ready()
        await self._until_over(self._wait_ready())
        self._happen(Opened())

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not said that they are ready."""
        return tuple(r for r in range(self.size) if r not in self._ready_ranks)

    async def _wait_ready(self) -> None:
        await asyncio.shield(self._all_ready)

    async def _until_over(self, step: Any) -> None:
        """Await ``step``, or raise why the world is over, whichever is first."""
        task = asyncio.ensure_future(step)
        try:
            await asyncio.wait((task, self._over), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._life.is_over:
            raise self._over_error()

    def _check_ready(self) -> None:
        if len(self._ready_ranks) == self.size and not self._all_ready.done():
            self._all_ready.set_result(None)

    # WorldPort: what the watchdog tells.

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Take a control message of a member."""
        match message.get("op"):
            case "ready":
                self._ready_ranks.add(rank)
                self._check_ready()
            case "left":
                self._happen(SaidLeft(rank))
            case "broken":
                self._on_broken(rank, message)
            case "backend":
                if not self._life.is_over:
                    self._backend.on_message(rank, message["body"])

    def _on_broken(self, rank: int, message: dict[str, Any]) -> None:
        if message["rank"] is None:
            told = Failed(message["reason"], message["evidence"], told_by=rank)
        elif message["rank"] == self.rank:
            # We are accused, and live: to the others this world is over.
            told = Failed(
                f"rank {rank} declared this process lost: {message['reason']}",
                message["evidence"],
                told_by=rank,
            )
        else:
            prefix = f"rank {message['rank']} was lost: "
            self._happen(
                WasLost(
                    int(message["rank"]),
                    str(message["reason"]).removeprefix(prefix),
                    f"told by rank {rank}: {message['evidence']}",
                    float(message["silent_s"]),
                    told_by=rank,
                )
            )
            return
        self._happen(told)

    def on_lost(self, rank: int, verdict: Verdict) -> None:
        """Take the watchdog's own verdict."""
        self._happen(WasLost(rank, verdict.reason, verdict.evidence, verdict.silent_s))

    # Deciding and acting.

    def _happen(self, happening: Happening) -> None:
        self._life, actions = handle(self._life, happening)
        for action in actions:
            match action:
                case Publish(event):
                    self._around.publish(event)
                case FailMember(rank):
                    self._cancel_grace(rank)
                    self._backend.member_left(rank)
                case FailOperations():
                    self._backend.abort()
                    self._free()
                case TellBroken(breakage):
                    self._tell_all(
                        {
                            "op": "broken",
                            "rank": breakage.rank,
                            "reason": breakage.reason,
                            "evidence": breakage.evidence,
                            "silent_s": breakage.silent_s,
                        }
                    )
                case TellLeft():
                    self._backend.begin_close()
                    self._tell_all({"op": "left"})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for rank in self._others():
            self._around.watchdog.tell(self._view.incarnation.nonce, rank, message)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _free(self) -> None:
        """Give everything back; once."""
        if self._over.done():
            return
        self._over.set_result(None)
        for rank in list(self._grace):
            self._cancel_grace(rank)
        self._backend.close_nowait()
        self._around.watchdog.detach(self._view.incarnation.nonce)
        self._around.over(self)

    def data_trouble(self, rank: int | None, evidence: str) -> None:
        """Give the control link time to tell whose fault it is."""
        if self._life.is_over or rank in self._life.left or rank in self._grace:
            return
        self._grace[rank] = self._loop.call_later(
            LINK_GRACE_S, self._grace_over, rank, evidence
        )

    def _grace_over(self, rank: int | None, evidence: str) -> None:
        self._grace.pop(rank, None)
        what = "a data connection" if rank is None else f"the connection to rank {rank}"
        self._happen(Failed(f"{what} failed, though every member lives", evidence))

    def _cancel_grace(self, rank: int | None) -> None:
        timer = self._grace.pop(rank, None)
        if timer is not None:
            timer.cancel()

    # Checks.

    @contextlib.contextmanager
    def _operation(
        self, peer: int | None = None, tag: int = 0, *, self_too: bool = False
    ) -> Any:
        """Check what every operation needs, and count it."""
        self._check()
        if peer is not None:
            self._check_rank(peer, self_too=self_too)
        if not isinstance(tag, int) or not 0 <= tag <= MAX_TAG:
            raise ConfigError("tag", tag, "an int from 0 to 2**63-1")
        self._pending += 1
        try:
            yield
        finally:
            self._pending -= 1
        self._completed += 1

    def _check(self) -> None:
        if self._is_forked:
            raise self._forked_error()
        if self._life.phase is not Phase.READY:
            raise self._over_error()

    def _check_rank(self, rank: int, *, self_too: bool) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            rule = f"world {self.name!r} has ranks 0 to {self.size - 1}"
            raise ConfigError("rank", rank, rule)
        if rank == self.rank and not self_too:
            rule = f"this is rank {rank} of world {self.name!r} itself"
            raise ConfigError("rank", rank, rule)

    def _over_error(self) -> Exception:
        breakage = self._life.breakage
        if breakage is not None:
            return breakage.error()
        return WorldClosedError(
            f"world {self.name!r} was closed by this process; join it again to use it",
            world=self.name,
            epoch=self.epoch,
        )

    def _forked_error(self) -> Exception:
        from multiworld.errors import UsedAfterForkError

        return UsedAfterForkError(
            f"world {self.name!r} belongs to the parent process; make a WorldManager "
            "in the child and join there",
            world=self.name,
            epoch=self.epoch,
        )

    def left_error(self, rank: int) -> MemberLeftError:
        """Return a fresh error for an operation that needs ``rank``."""
        return MemberLeftError(
            f"rank {rank} has left world {self.name!r}; close it, and join again when "
            "the member is back",
            world=self.name,
            epoch=self.epoch,
            rank=rank,
        )

    def _like(self, tensor: Tensor) -> list[Tensor]:
        return [torch.empty_like(tensor) for _ in range(self.size)]


class _View:
    """What the backend sees of the world; see ``WorldView``."""

    def __init__(
        self,
        world: World,
        incarnation: Incarnation,
        config: WorldConfig,
        around: Surroundings,
    ) -> None:
        self._world = world
        self.incarnation, self.rank, self.config = incarnation, world.rank, config
        self.device = world.device
        self.watchdog, self.store = around.watchdog, around.store
        self.linger = around.linger

    async def lane(self, rank: int, channel: str) -> socket.socket:
        return await self.watchdog.lane(self.incarnation, self.rank, rank, channel)

    def dials(self, rank: int) -> bool:
        return self.watchdog.dials(self.incarnation.members[rank])

    def report(self, happening: Happening) -> None:
        self._world._happen(happening)

    def trouble(self, rank: int | None, evidence: str) -> None:
        self._world.data_trouble(rank, evidence)

    async def wait_over(self) -> None:
        await self._world.wait_over()

    def has_left(self, rank: int) -> bool:
        return rank in self._world.left

    def tell(self, rank: int, message: dict[str, Any]) -> None:
        nonce = self.incarnation.nonce
        self.watchdog.tell(nonce, rank, {"op": "backend", "body": message})

    def broken_error(self) -> Exception:
        return self._world._over_error()

    def left_error(self, rank: int) -> Exception:
        return self._world.left_error(rank)
