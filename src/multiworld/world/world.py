"""A world: the operations on one incarnation. Thin: checks, then the backend.

A broken world stays broken: the same name is joined again as the next epoch, and that
is another ``World``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from multiworld.backends.base import Bundle
from multiworld.backends.collective import Call
from multiworld.backends.collectives import CollectiveMethods
from multiworld.errors import ConfigError
from multiworld.incarnation.lifecycle import Phase
from multiworld.world.local_member import LocalMember

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Bundle", "World", "WorldStatistics"]

MAX_TAG = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldStatistics:
    """A snapshot of one world.

    Attributes:
        phase: "joining", "ready", "broken" or "closed".
        left: Ranks that have left politely.
        pending: Operations that wait right now.
        started: Operations that were started since the world was made.
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
    """Counts operations while they run; a class, as it is entered for each message."""

    __slots__ = ("count", "started")

    def __init__(self) -> None:
        self.count = self.started = 0

    def __enter__(self) -> None:
        self.count += 1
        self.started += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.count -= 1


class Changes(Protocol):
    """Who makes the next incarnation of a world."""

    async def reform(self, name: str) -> World:
        """Go on without the lost."""

    async def grow(self, name: str, to: int) -> World:
        """Let newcomers in."""


class World(CollectiveMethods):
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

    def __init__(self, life: LocalMember, changes: Changes) -> None:
        self._changes = changes
        incarnation = life.incarnation
        self.name, self.epoch = incarnation.world, incarnation.epoch
        self.rank, self.size = life.rank, incarnation.size
        self.backend_name = life.backend_name
        self._life = life
        self._collectives = life.backend.collectives
        self._pending = _Pending()

    def __repr__(self) -> str:
        place = f"rank {self.rank}/{self.size} epoch {self.epoch}"
        state = self._life.phase.value
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
    def lost(self) -> frozenset[int]:
        """Ranks known to be lost; it may grow after the world broke."""
        return self._life.lost

    def silent_s(self, rank: int) -> float:
        """Return for how long a member has given no sign of life; 0 for this process.

        A verdict takes ``WorldConfig.silence_s``. Whoever hands out work can act long
        before: a beat comes every tenth of a second, and is looked at as often, so that
        from 0.3 s on something is odd. A stopped process gives no sign, though its
        helper tells that it is there.
        """
        self._check_rank(rank, self_too=True)
        return self._life.silent_s(rank)

    @property
    def members(self) -> tuple[str, ...]:
        """Who is in it, by rank, for messages to people."""
        return tuple(map(str, self._life.incarnation.members))

    def statistics(self) -> WorldStatistics:
        """Return a snapshot."""
        return WorldStatistics(
            world=self.name,
            epoch=self.epoch,
            rank=self.rank,
            size=self.size,
            phase=self._life.phase.value,
            left=self._life.left,
            pending=self._pending.count,
            started=self._pending.started,
        )

    async def wait_over(self) -> None:
        """Wait until the world is broken or closed.

        Cancellation: safe.
        """
        await self._life.wait_over()

    async def wait_incomplete(self) -> None:
        """Wait until the world is broken or closed, or a member has left.

        Cancellation: safe.
        """
        await self._life.wait_incomplete()

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
            await self._life.backend.send(tensor, dst, tag)

    async def recv(
        self, out: Tensor | None = None, *, src: int, tag: int = 0
    ) -> Tensor:
        """Receive one tensor.

        Several receives from one source are served in the order they were called.

        Args:
            out: Where to put it: of the sent dtype and number of elements, any shape
                and strides. None: a new tensor of the sent dtype and shape, on this
                world's device.
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
            return (await self._life.backend.recv(out, src, tag)).tensor

    async def recv_any(
        self, out: Tensor | None = None, *, tag: int = 0
    ) -> tuple[int, Tensor]:
        """Receive one tensor from whichever member is first.

        Returns:
            The sender's rank, and the tensor as ``recv`` returns it.

        Raises:
            MemberLeftError: All other members have left.
            ConfigError: There are no other members.

        Cancellation: as for ``recv``.
        """
        if self.size == 1:
            raise ConfigError("recv_any", self.size, "a world with other members")
        with self._operation(None, tag):
            received = await self._life.backend.recv(out, None, tag)
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
            await self._life.backend.send_bundle(tensors, meta or {}, dst, tag)

    async def recv_bundle(self, *, src: int | None = None, tag: int = 0) -> Bundle:
        """Receive what ``send_bundle`` sent; from anybody if ``src`` is None.

        Cancellation: as for ``recv``.
        """
        with self._operation(src, tag):
            return await self._life.backend.recv_bundle(src, tag)

    async def send_object(self, obj: Any, *, dst: int, tag: int = 0) -> None:
        """Send small plain data: what JSON can say. Nothing is ever unpickled.

        Cancellation: as for ``send``.
        """
        with self._operation(dst, tag):
            await self._life.backend.send_object(obj, dst, tag)

    async def recv_object(self, *, src: int | None = None, tag: int = 0) -> Any:
        """Receive what ``send_object`` sent; from anybody if ``src`` is None.

        Cancellation: as for ``recv``.
        """
        with self._operation(src, tag):
            return await self._life.backend.recv_object(src, tag)

    async def _call(self, call: Call) -> None:
        root = call.root if call.collective.has_root else None
        with self._operation(root, self_too=True):
            await self._collectives.run(call)

    # c10d.

    @property
    def process_group(self) -> ProcessGroup:
        """The c10d group, for code that wants one: ``torch.distributed`` functions,
        functional collectives, DeviceMesh, DTensor. It dies with this world.

        Raises:
            UnsupportedOperationError: The backend is not one of c10d's.
        """
        self._life.check()
        return self._life.backend.process_group

    def device_mesh(self, dim_name: str = "world") -> DeviceMesh:
        """Return a one-dimensional DeviceMesh over this world, for DTensor.

        Raises:
            UnsupportedOperationError: The backend is not one of c10d's.
        """
        from multiworld.backends.c10d.registration import mesh_of

        return mesh_of(self.process_group, self._life.device, dim_name)

    # Changing size.

    @property
    def waiting(self) -> dict[int, int]:
        """Ranks that strangers claim in the next incarnation, and the world size that
        each expects; see ``grow`` and the event ``MemberWaiting``."""
        return dict(self._life.waiting)

    async def reform(self) -> World:
        """Go on in a smaller world, without the members that are lost or have left.

        Every survivor calls it; all of them return when the last has. Ranks are
        compacted in their old order. The name stays, the epoch grows; this object stays
        broken. Who survives is settled at the store by the first who come: members
        that accused each other do not both go on. If one more is lost meanwhile, it
        goes on without that one too. On an object that is not the newest of its name
        it acts on the newest.

        Returns:
            The next incarnation, which may have only this member.

        Raises:
            StaleEpochError: The others went on without this member; join again.
            JoinTimeoutError: A survivor did not call within ``join_s``.
            ConfigError: Nobody is lost and nobody has left.
            WorldClosedError: This process has closed the world.
            StoreUnreachableError: The store is needed for this.

        Cancellation: the claim is withdrawn; the world stays as it is.
        """
        return await self._changes.reform(self.name)

    async def grow(self, *, to: int) -> World:
        """Let newcomers into this world, while it lives.

        A collective: every member calls it with the same ``to``, and each newcomer
        joins as usual, ``manager.join(name, rank=r, size=to, ...)``, with one of the
        ranks that are new; ``MemberWaiting`` tells the members that one wants in.
        Members keep their ranks. No other world is touched. Messages of this
        incarnation that were not received before are dropped, and so is this object.

        Args:
            to: The new world size.

        Returns:
            The next incarnation.

        Raises:
            JoinTimeoutError: Not everybody came within ``join_s``; this world lives on.
            WorldBrokenError: A member was lost. If this happened after all had been
                admitted, the next incarnation is the one that broke, on every member:
                ``manager.world(name).reform()`` goes on.
            ConfigError: ``to`` is not more than the present size.
            StoreUnreachableError: The store is needed for this; this world lives on.

        Cancellation: the claim is withdrawn; the world stays as it is.
        """
        self._life.check()
        return await self._changes.grow(self.name, to)

    # The end.

    async def close(self) -> None:
        """Leave politely: the others get what was sent, then ``MemberLeftError``.

        Waits at most ``WorldConfig.close_s`` for what was sent to leave this process.
        Safe to repeat, and on a broken world.

        Cancellation: the world is closed all the same, at once.
        """
        await self._life.close()

    # Checks.

    def _operation(
        self, peer: int | None = None, tag: int = 0, *, self_too: bool = False
    ) -> _Pending:
        """Check what every operation needs; what is returned counts it."""
        self._life.check()
        if peer is not None:
            self._check_rank(peer, self_too=self_too)
        if not isinstance(tag, int) or not 0 <= tag <= MAX_TAG:
            raise ConfigError("tag", tag, "an int from 0 to 2**63-1")
        return self._pending

    def _check_rank(self, rank: int, *, self_too: bool) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            rule = f"world {self.name!r} has ranks 0 to {self.size - 1}"
            raise ConfigError("rank", rank, rule)
        if rank == self.rank and not self_too:
            rule = f"this is rank {rank} of world {self.name!r} itself"
            raise ConfigError("rank", rank, rule)
