"""The worlds of one process: joining, finding, closing them. Shell.

A ``WorldManager`` belongs to one event loop. It owns the listener, the links and the
heartbeat of the process (``WatchDog``), its sessions with the stores (``Meeting``) and
its worlds. Joining, leaving or losing one world touches no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import weakref
from collections.abc import AsyncIterator
from types import TracebackType

import torch

from multiworld.backends.base import Lingering
from multiworld.config import WorldConfig
from multiworld.errors import (
    ConfigError,
    JoinTimeoutError,
    MemberLostError,
    UnknownWorldError,
    UsedAfterForkError,
    WorldBrokenError,
    WorldClosedError,
    WorldExistsError,
)
from multiworld.events import Event, EventHub
from multiworld.lifecycle import CloseAsked, Phase
from multiworld.membership import Member
from multiworld.rendezvous.address import StoreAddress, parse_store
from multiworld.rendezvous.meeting import Claim, Meeting, meet
from multiworld.watchdog import MemberUnreachableError, WatchDog
from multiworld.world import World
from multiworld.world_communicator import BrokenWorldException, WorldCommunicator
from multiworld.world_life import Surroundings, WorldLife

__all__ = ["BrokenWorldException", "WorldManager"]

DEFAULT_PORT = 29500
"""What ``port=-1`` means: torch's own default for a store."""

_managers: weakref.WeakSet[WorldManager] = weakref.WeakSet()
_fork_hook_installed = False


class WorldManager:
    """Makes worlds and keeps them.

    Make it inside a running event loop; use it with ``async with``, or call
    ``await close()`` (or ``cleanup()``) at the end. All its methods are for that loop's
    thread only.

    Args:
        enable_monitor: False switches silence detection off; a member whose process
            ends is still noticed.
        config: Settings of the worlds that are joined without their own.

    Raises:
        RuntimeError: There is no running event loop.
    """

    def __init__(
        self, enable_monitor: bool = True, *, config: WorldConfig | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config or WorldConfig()
        self._uid = secrets.token_hex(16)
        self._watchdog = WatchDog(
            self._uid, is_enabled=enable_monitor, mode=self._config.heartbeat
        )
        self._meeting = Meeting(self._holds)
        self._worlds: dict[str, World] = {}
        self._joining: dict[str, asyncio.Task[World] | None] = {}
        self._reserved: dict[str, str] = {}
        self._lives: dict[str, WorldLife] = {}
        self._met: set[WorldLife] = set()  # those that use a session with a store
        self._seen: dict[str, int] = {}
        self._hub = EventHub()
        self._lingering: set[Lingering] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._is_forked = False
        self._communicator = WorldCommunicator(self)
        _install_fork_hook()
        _managers.add(self)

    def __repr__(self) -> str:
        ready = sum(world.is_ready for world in self._worlds.values())
        links = self._watchdog.link_count
        return f"<WorldManager {ready}/{len(self._worlds)} worlds ready, {links} links>"

    async def __aenter__(self) -> WorldManager:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # Finding.

    @property
    def communicator(self) -> WorldCommunicator:
        """The operations by a world's name, as programs for pymultiworld use them."""
        return self._communicator

    @property
    def watchdog(self) -> WatchDog:
        """Who watches the peers of this manager's worlds."""
        return self._watchdog

    @property
    def worlds(self) -> dict[str, World]:
        """The worlds by name, broken ones included until they are replaced."""
        return dict(self._worlds)

    def world(self, name: str) -> World:
        """Return the world ``name``.

        Raises:
            UnknownWorldError: There is none.
        """
        world = self._worlds.get(name)
        if world is None:
            known = ", ".join(sorted(self._worlds)) or "none"
            raise UnknownWorldError(
                f"this process is in no world {name!r} (it is in: {known}); join it "
                "first",
                world=name,
            )
        return world

    def events(self) -> AsyncIterator[Event]:
        """Iterate over what happens to this manager's worlds from now on.

        Ends when the manager is closed. A reader that is 1,024 events behind loses the
        oldest and is told how many (``EventsDropped``).

        Cancellation: safe.
        """
        return self._hub.subscribe().events()

    # Joining.

    async def join(
        self,
        name: str,
        *,
        rank: int,
        size: int,
        store: str,
        backend: str = "direct",
        config: WorldConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> World:
        """Join a world and wait until every member has done so.

        The members may start in any order. If this name was joined before and has
        broken since, this opens its next epoch.

        Args:
            name: The world's name, the same on every member.
            rank: This member's rank, 0 to ``size`` - 1.
            size: World size, the same on every member.
            store: Where to meet: ``tcp://HOST:PORT``, or ``memory://NAME`` for
                ``backend="memory"``. If nobody serves the address and it is one of
                this host's, rank 0 embeds the store.
            backend: ``direct``, ``memory``, ``gloo``, ``nccl``, or any other that
                ``torch.distributed`` knows.
            config: Settings; the manager's by default.
            device: Where a c10d backend's tensors are.

        Raises:
            ConfigError: An argument cannot work.
            WorldExistsError: This manager is in that world, or is joining it.
            JoinTimeoutError: Somebody did not come within ``config.join_s``.
            RankTakenError: Another live process holds the rank.
            JoinMismatchError: The members asked for different worlds.
            StoreUnreachableError, ProtocolVersionError: The store cannot be used.
            MemberLostError: A member was lost while all were connecting.

        Cancellation: safe; the claim is withdrawn and nothing stays behind.
        """
        self._check_usable(name)
        settings = config or self._config
        where = parse_store(store)
        target = torch.device(device)
        _check_join(name, rank, size, backend, where, target)
        self._reserve(name)
        joining = self._loop.create_task(
            self._join(name, rank, size, where, backend, settings, target),
            name=f"multiworld join {name}",
        )
        self._joining[name] = joining
        try:
            return await joining
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise self._closed_error(name) from None
            raise
        finally:
            self._joining.pop(name, None)

    def _check_usable(self, name: str) -> None:
        if self._is_forked:
            raise UsedAfterForkError(
                "this WorldManager belongs to the parent; make one in the child",
                world=name,
            )
        if self._is_closed:
            raise self._closed_error(name)

    def _closed_error(self, name: str) -> WorldClosedError:
        return WorldClosedError(
            "this WorldManager is closed; make a new one", world=name
        )

    def _reserve(self, name: str) -> None:
        world = self._worlds.get(name)
        if name in self._joining:
            raise WorldExistsError(
                f"this process is joining world {name!r} already", world=name
            )
        if world is not None and not _is_spent(world):
            raise WorldExistsError(
                f"this process is in world {name!r} already (rank {world.rank}, epoch "
                f"{world.epoch}); close it before joining again",
                world=name,
                epoch=world.epoch,
            )
        self._joining[name] = None

    async def _join(
        self,
        name: str,
        rank: int,
        size: int,
        where: StoreAddress,
        backend: str,
        config: WorldConfig,
        device: torch.device,
    ) -> World:
        deadline = self._loop.time() + config.join_s
        may_host = rank == 0
        session = await self._meeting.enter(
            where, may_host=may_host, world=name, deadline=deadline
        )
        life: WorldLife | None = None
        try:
            if name in self._worlds:  # spent: its next epoch takes its place
                await self._end(self._lives[name])
            address = self._watchdog.listen(session.local_host)
            member = Member(rank=rank, uid=self._uid, pid=os.getpid(), address=address)
            claim = Claim(
                world=name,
                rank=rank,
                size=size,
                terms=f"backend {backend}, host_p2p {config.host_p2p}",
                seen=self._seen.get(name, 0),
            )
            session, incarnation = await meet(
                self._meeting, session, claim, member, deadline, may_host=may_host
            )
            self._seen[name] = incarnation.epoch
            around = Surroundings(
                watchdog=self._watchdog,
                store=where,
                publish=self._hub.publish,
                over=self._over,
                linger=self._linger,
            )
            life = WorldLife(incarnation, rank, backend, config, device, around)
            self._lives[name] = life
            self._met.add(life)
            await self._open(life, deadline)
        except BaseException:
            if life is None:
                self._meeting.leave(where)
            else:
                life.close_nowait()
                self._release(life)
            raise
        self._worlds[name] = world = World(life)
        return world

    async def _open(self, life: WorldLife, deadline: float) -> None:
        name, epoch = life.incarnation.world, life.incarnation.epoch
        try:
            async with asyncio.timeout_at(deadline):
                await life.open()
        except TimeoutError as error:
            missing = life.missing
            size = life.incarnation.size
            present = tuple(r for r in range(size) if r not in missing)
            raise JoinTimeoutError(
                f"world {name!r}: rank {', '.join(map(str, missing))} was admitted but "
                "did not connect in time; its process may be gone, or a firewall is in "
                "the way",
                world=name,
                epoch=epoch,
                present=present,
                missing=missing,
            ) from error
        except MemberUnreachableError as error:
            raise MemberLostError(
                name,
                f"rank {error.rank} was lost while joining",
                epoch=epoch,
                evidence=str(error),
                rank=error.rank,
            ) from error
        except OSError as error:
            raise WorldBrokenError(
                name, "it could not be opened", epoch=epoch, evidence=str(error)
            ) from error

    def _holds(self, name: str, epoch: int, rank: int) -> bool:
        """Answer the store: does this process hold that rank?"""
        life = self._lives.get(name)
        if life is None or life.phase in (Phase.BROKEN, Phase.CLOSED):
            return False
        return (life.incarnation.epoch, life.rank) == (epoch, rank)

    def _over(self, life: WorldLife) -> None:
        """Tell the store that a world of ours is over; forget it if it was closed."""
        session = self._meeting.session(life.store)
        if session is not None:
            where = life.incarnation
            session.left(where.world, where.epoch, life.rank)
        if life.phase is Phase.CLOSED:
            self._release(life)

    def _release(self, life: WorldLife) -> None:
        """Drop a world that is closed; safe to repeat."""
        name = life.incarnation.world
        if self._lives.get(name) is life:
            del self._lives[name]
            self._worlds.pop(name, None)
        if life in self._met:
            self._met.discard(life)
            self._meeting.leave(life.store)

    # Leaving.

    async def close(self) -> None:
        """Leave every world politely and free everything.

        Cancellation: everything is freed all the same, at once.
        """
        if self._is_closed:
            return
        self._is_closed = True
        joining = self._cancel_joins()
        try:
            await asyncio.gather(*joining, return_exceptions=True)
            await asyncio.gather(*(life.close() for life in self._lives.values()))
            await asyncio.gather(*self._closing, return_exceptions=True)
            # These close by themselves, at the latest after ``close_s``; to cut them
            # now would take from others what they have not read.
            await asyncio.gather(*(lane.wait_closed() for lane in self._lingering))
        finally:
            self._free()
        await self._watchdog.close()

    def cleanup(self) -> None:
        """Leave every world and free everything, without waiting.

        For programs written for pymultiworld, which call it last. What was sent and
        not yet taken by the network may be lost; ``close`` waits for it.
        """
        if self._is_closed or self._is_forked:
            return
        self._is_closed = True
        self._cancel_joins()
        self._free()

    def _free(self) -> None:
        for life in list(self._met):
            life.close_nowait()
        self._worlds.clear()
        self._lives.clear()
        for connection in self._lingering:
            connection.close_nowait()
        self._lingering.clear()
        self._meeting.close_nowait()
        self._watchdog.close_nowait()
        self._hub.close()
        _managers.discard(self)

    def _cancel_joins(self) -> list[asyncio.Task[World]]:
        joining = [task for task in self._joining.values() if task is not None]
        for task in joining:
            task.cancel()
        return joining

    async def leave(self, name: str) -> None:
        """Leave one world politely and forget it.

        Raises:
            UnknownWorldError: There is none.

        Cancellation: the world is left all the same.
        """
        self.world(name)
        await self._end(self._lives[name])

    async def _end(self, life: WorldLife) -> None:
        try:
            await life.close()
        finally:
            self._release(life)

    def _linger(self, connection: Lingering) -> None:
        self._lingering = {c for c in self._lingering if c.fileno() >= 0}
        self._lingering.add(connection)

    # The original's names.

    async def initialize_world(
        self,
        world_name: str,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        addr: str = "127.0.0.1",
        port: int = -1,
        timeout: float = 30,
        device: torch.device | str = "cpu",
    ) -> None:
        """Join a world whose store rank 0 hosts on ``addr``:``port``.

        Args:
            world_name: The world's name.
            rank: This member's rank.
            world_size: World size.
            backend: As for ``join``.
            addr: Rank 0's address, as every member reaches it.
            port: Rank 0's port; -1 is 29500.
            timeout: Seconds to wait for the other members.
            device: As for ``join``.

        Raises:
            As ``join``.

        Cancellation: as for ``join``.
        """
        host = f"[{addr}]" if ":" in addr else addr
        reserved = self._reserved.pop(world_name, None)
        try:
            await self.join(
                world_name,
                rank=rank,
                size=world_size,
                store=f"tcp://{host}:{DEFAULT_PORT if port == -1 else port}",
                backend=backend,
                config=self._config.replace(join_s=timeout),
                device=device,
            )
        except BaseException:
            if reserved is not None:
                self._reserved[world_name] = reserved
            raise

    def add_world(self, world_name: str, backend: str) -> None:
        """Reserve a name; ``initialize_world`` joins it.

        Raises:
            WorldExistsError: The name is in use (a ``ValueError``).
        """
        if world_name in self._worlds or world_name in self._reserved:
            raise WorldExistsError(
                f"this process has a world {world_name!r} already", world=world_name
            )
        self._reserved[world_name] = backend

    def remove_world(self, world_name: str) -> None:
        """Leave a world politely and forget it; what was sent leaves in the background.

        Raises:
            UnknownWorldError: There is none (a ``ValueError``).
        """
        if self._reserved.pop(world_name, None) is not None:
            return
        self.world(world_name)
        life = self._lives.pop(world_name)
        del self._worlds[world_name]
        life.report(CloseAsked())  # the others are told now, whatever the loop does
        task = self._loop.create_task(
            self._end(life), name=f"multiworld leave {world_name}"
        )
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # Forks.

    def _close_after_fork(self) -> None:
        """In a forked child: close every descriptor, so as not to hide the parent's
        death from its peers. The loop's selector is the parent's: leave it alone."""
        self._is_forked = True
        found = self._watchdog.filenos() + self._meeting.filenos()
        for life in self._met:
            found += life.filenos()
            life.abandon_after_fork()
        found += [connection.fileno() for connection in self._lingering]
        for fd in found:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)


def _install_fork_hook() -> None:
    global _fork_hook_installed
    if not _fork_hook_installed:
        _fork_hook_installed = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for manager in list(_managers):
        manager._close_after_fork()


def _is_spent(world: World) -> bool:
    """Tell whether a world may be replaced by its next epoch."""
    return world.is_broken or world.is_closed or bool(world.left)


def _check_join(
    name: str,
    rank: int,
    size: int,
    backend: str,
    where: StoreAddress,
    device: torch.device,
) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigError("name", name, "a non-empty str")
    if not isinstance(size, int) or size < 1:
        raise ConfigError("size", size, "an int, 1 or more")
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise ConfigError("rank", rank, f"an int from 0 to size - 1, here {size - 1}")
    if (backend == "memory") != where.is_local:
        raise ConfigError(
            "store",
            str(where),
            "backend 'memory' meets at memory://NAME, the others at tcp://HOST:PORT",
        )
    if backend in ("direct", "memory", "gloo") and device.type != "cpu":
        raise ConfigError(
            "device", str(device), f"backend {backend!r} carries host tensors: 'cpu'"
        )
    if backend not in ("direct", "memory"):
        from multiworld.backends.c10d.backend import check_backend

        check_backend(backend, device)
