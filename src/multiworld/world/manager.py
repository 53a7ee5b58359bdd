"""Manager of a process's worlds: joins, finds and closes them. A manager belongs to one
event loop and owns the listener, links and heartbeats (``WatchDog``) and the sessions
with stores (``Joiner``)."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import weakref
from collections.abc import AsyncIterator

import torch

from multiworld import errors
from multiworld.backends.base import Lingering
from multiworld.config import WorldConfig
from multiworld.incarnation.event_hub import EventHub
from multiworld.incarnation.events import Event
from multiworld.incarnation.lifecycle import CloseAsked
from multiworld.liveness.watchdog import WatchDog
from multiworld.net.security import Security
from multiworld.world.communicator import BrokenWorldException, WorldCommunicator
from multiworld.world.join_request import request_of
from multiworld.world.joining import Admission
from multiworld.world.local_member import ManagerServices
from multiworld.world.rejoin import keep
from multiworld.world.world import World

__all__ = ["BrokenWorldException", "WorldManager"]

DEFAULT_PORT = 29500  # port for ``port=-1``: torch's default port of a store

_managers: weakref.WeakSet[WorldManager] = weakref.WeakSet()


class WorldManager:
    """Manager of this process's worlds.

    Create it inside a running event loop (else ``RuntimeError``). Use it with ``async
    with``, or call ``await close()`` (or ``cleanup()``) at the end. Call its methods
    only from the thread of that loop.

    Args:
        enable_monitor: False disables the detection of silent members; the end of a
            member's process is still detected.
        config: Default settings, for worlds whose ``join`` gets no ``config``.
        security: Secret and TLS; by default from ``Security.from_environment``, which
            may raise ``ConfigError``.
    """

    def __init__(
        self,
        enable_monitor: bool = True,
        *,
        config: WorldConfig | None = None,
        security: Security | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config or WorldConfig()
        self._uid = secrets.token_hex(16)
        self._security = security or Security.from_environment()
        self._watchdog = WatchDog(
            self._uid,
            is_enabled=enable_monitor,
            mode=self._config.heartbeat,
            heartbeat_s=self._config.heartbeat_s,
            security=self._security,
        )
        self._joining: dict[str, asyncio.Task[World] | None] = {}
        self._reserved: dict[str, str] = {}
        self._hub = EventHub()
        self._lingering: set[Lingering] = set()
        self._closing: set[asyncio.Task[None]] = set()
        services = ManagerServices(
            watchdog=self._watchdog,
            publish=self._hub.publish,
            linger=self._linger,
            closing=self._closing,
        )
        self._admission = Admission(self._uid, self._watchdog, services, self)
        self._is_closed = False
        self._is_forked = False
        self._communicator = WorldCommunicator(self)
        _install_fork_hook()
        _managers.add(self)

    def __repr__(self) -> str:
        worlds = self.worlds
        ready = sum(world.is_ready for world in worlds.values())
        links = self._watchdog.link_count
        return f"<WorldManager {ready}/{len(worlds)} worlds ready, {links} links>"

    async def __aenter__(self) -> WorldManager:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # Finding.

    @property
    def communicator(self) -> WorldCommunicator:
        """Operations by a world's name, as in pymultiworld."""
        return self._communicator

    @property
    def watchdog(self) -> WatchDog:
        """The watchdog of the peers of this manager's worlds."""
        return self._watchdog

    @property
    def refused(self) -> dict[str, int]:
        """Number of refused connections by kind: "version", "secret", "tls",
        "malformed", "slow", "crowded", "refused"."""
        return dict(self._watchdog.refused)

    @property
    def worlds(self) -> dict[str, World]:
        """Worlds by name; a broken one stays until it is closed or joined again."""
        return self._admission.worlds

    def world(self, name: str) -> World:
        """Return a world by its name, or raise ``UnknownWorldError``.

        Args:
            name: The world's name.
        """
        world = self.worlds.get(name)
        if world is None:
            known = ", ".join(sorted(self.worlds)) or "none"
            raise errors.UnknownWorldError(
                f"this process is not in world {name!r} (it is in: {known}); join it "
                "first",
                world=name,
            )
        return world

    def events(self) -> AsyncIterator[Event]:
        """Return an iterator over the events of this manager's worlds from now on.

        The iterator ends when the manager is closed. A reader that is 1,024 events
        behind loses the oldest ones; ``EventsDropped`` reports how many. Cancelling
        loses unread events.
        """
        return self._hub.subscribe().events()

    # Joining.

    async def join(
        self,
        name: str,
        *,
        rank: int | None = None,
        size: int | None = None,
        store: str | None = None,
        backend: str = "direct",
        config: WorldConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> World:
        """Return a world, ready for traffic, once every member has joined.

        The members may start in any order. If this process was in a world of that name
        that has broken since, the join opens the next epoch.

        Args:
            name: The world's name, the same on every member.
            rank: This member's rank, 0 to ``size`` - 1; by default ``RANK`` in the
                environment, as torchrun sets it.
            size: World size, the same on every member; by default ``WORLD_SIZE``.
            store: Address of the store: ``tcp://HOST:PORT``, or ``memory://NAME`` for
                ``backend="memory"``. The default is ``MULTIWORLD_STORE`` in the
                environment, or else ``MASTER_ADDR`` and ``MASTER_PORT`` (under
                torchrun, the port after ``MASTER_PORT``, which torchrun's own store
                uses). If nobody serves the address and it belongs to this host, rank 0
                embeds the store.
                Commas separate several addresses, in the same order on every member;
                the first store that answers is used, and none is embedded.
            backend: ``direct``, ``memory``, ``gloo``, ``nccl``, or any other backend of
                ``torch.distributed``.
            config: The world's settings; the manager's by default.
            device: Device of a c10d backend's tensors.

        Raises:
            ConfigError: An argument is not valid.
            WorldExistsError: This manager is in that world, or is joining it.
            WorldClosedError: This manager is closed.
            UsedAfterForkError: This manager belongs to the parent process.
            JoinTimeoutError: Some members did not join within ``config.join_s``.
            RankTakenError: Another live process holds the rank.
            JoinMismatchError: The members asked for different worlds.
            StoreUnreachableError: No store answered.
            ProtocolVersionError: The store or a member speaks another version.
            WrongSecretError: The store or a member holds another secret.
            MemberLostError: A member was lost while the members connected.

        Cancellation: Safe; the claim is withdrawn and no state is left.
        """
        self._check_usable(name)
        config = self._config if config is None else config
        request = request_of(name, rank, size, store, backend, config, device)
        self._security.check_backend(backend)
        self._reserve(name)
        joining = self._loop.create_task(
            self._admission.join(request), name=f"multiworld join {name}"
        )
        try:
            return await self._exclusively(name, joining)
        except BaseException:
            is_over = joining.done() and not joining.cancelled()
            made = joining.result() if is_over and not joining.exception() else None
            # Remove a world whose join completed before the caller was cancelled: the
            # caller never received it.
            if made is not None and self.worlds.get(name) is made:
                self.remove_world(name)
            raise

    async def reform(self, name: str) -> World:
        """Return the smaller world; see ``World.reform``. Cancellation: As there.

        Args:
            name: The world's name.
        """
        self._check_usable(name)
        self._check_free(name)
        changing = self._loop.create_task(self._admission.reform(name))
        return await self._exclusively(name, changing)

    async def grow(self, name: str, to: int) -> World:
        """Return the larger world; see ``World.grow``. Cancellation: As there.

        Args:
            name, to: The world's name, and its new size.
        """
        self._check_usable(name)
        self._check_free(name)
        changing = self._loop.create_task(self._admission.grow(name, to))
        return await self._exclusively(name, changing)

    async def _exclusively(self, name: str, joining: asyncio.Task[World]) -> World:
        """Run one change of a world at a time, and none after the manager is closed."""
        self._joining[name] = joining
        try:
            return await joining
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            if self._is_closed:
                raise self._closed_error(name) from None
            raise errors.WorldClosedError(
                f"this process left world {name!r} during this call", world=name
            ) from None
        finally:
            if self._joining.get(name) in (joining, None):
                self._joining.pop(name, None)

    def keep(
        self,
        name: str,
        *,
        rank: int | None = None,
        size: int | None = None,
        store: str | None = None,
        backend: str = "direct",
        config: WorldConfig | None = None,
        device: torch.device | str = "cpu",
    ) -> AsyncIterator[World]:
        """Yield a ready world: join, and join again after every fault.

        ::

            async for world in manager.keep("w", rank=1, size=2):
                try:
                    while True:
                        await world.send(await world.recv(src=0), dst=0)
                except (multiworld.WorldBrokenError, multiworld.WorldClosedError):
                    pass  # the next iteration has the next incarnation

        When the yielded world is broken or a member has left, this joins again, with a
        backoff from 0.1 to 5 s. The iteration ends when the program leaves the loop,
        closes the manager, or leaves the world with ``leave``.

        Args:
            name, rank, size, store, backend, config, device: As for ``join``.

        Raises:
            MultiWorldError: As for ``join``, except the errors that another attempt may
                cure: ``JoinTimeoutError``, ``RankTakenError``,
                ``StoreUnreachableError`` and ``WorldBrokenError``.

        Cancellation: Safe; a world that was yielded stays as it is.
        """

        self._check_usable(name)

        async def join() -> World:
            return await self.join(
                name,
                rank=rank,
                size=size,
                store=store,
                backend=backend,
                config=config,
                device=device,
            )

        return keep(
            name,
            join,
            lambda: self.worlds.get(name),
            lambda: self._admission.has_failed(name),
        )

    def _check_usable(self, name: str) -> None:
        if self._is_forked:
            raise errors.UsedAfterForkError(
                "this WorldManager belongs to the parent process; create one in the "
                "child",
                world=name,
            )
        if self._is_closed:
            raise self._closed_error(name)

    def _closed_error(self, name: str) -> errors.WorldClosedError:
        return errors.WorldClosedError(
            "this WorldManager is closed; create a new one", world=name
        )

    def _check_free(self, name: str) -> None:
        if name in self._joining:
            raise errors.WorldExistsError(
                f"this process is joining or changing world {name!r} already; wait "
                "until that is done",
                world=name,
            )

    def _reserve(self, name: str) -> None:
        world = self.worlds.get(name)
        self._check_free(name)
        if world is not None and not _is_spent(world):
            raise errors.WorldExistsError(
                f"this process is in world {name!r} already (rank {world.rank}, epoch "
                f"{world.epoch}); close it before joining again",
                world=name,
                epoch=world.epoch,
            )
        self._joining[name] = None

    # Leaving.

    async def close(self) -> None:
        """Leave every world gracefully and free all resources.

        Cancellation: All resources are freed at once.
        """
        if self._is_closed or self._is_forked:
            return
        self._is_closed = True
        joining = self._cancel_joins()
        try:
            await asyncio.gather(*joining, return_exceptions=True)
            local_members = self._admission.local_members()
            await asyncio.gather(*(local.close() for local in local_members))
            await asyncio.gather(*self._closing, return_exceptions=True)
            # Lingering connections close by themselves after ``close_s`` at the latest.
            # Closing them now would lose data that the other members have not read.
            await asyncio.gather(*(lane.wait_closed() for lane in self._lingering))
        finally:
            self._free()
        await self._watchdog.close()

    def cleanup(self) -> None:
        """Leave every world and free all resources, without waiting.

        For programs written for pymultiworld, which call it last. Sent data that the
        network has not taken may be lost; ``close`` waits for it.
        """
        if self._is_closed or self._is_forked:
            return
        self._is_closed = True
        self._cancel_joins()
        self._free()

    def _free(self) -> None:
        self._admission.close_nowait()
        for connection in self._lingering:
            connection.close_nowait()
        self._lingering.clear()
        self._watchdog.close_nowait()
        self._hub.close()
        _managers.discard(self)

    def _cancel_joins(self) -> list[asyncio.Task[World]]:
        joining = [task for task in self._joining.values() if task is not None]
        for task in joining:
            task.cancel()
        return joining

    async def leave(self, name: str) -> None:
        """Leave one world gracefully and remove it; ``UnknownWorldError`` if unknown.

        Args:
            name: The world's name.

        Cancellation: Once closing has begun, the world is closed at once.
        """
        if self._is_forked:
            return
        if name not in self._joining:
            self.world(name)
        changing = self._joining.get(name)
        if changing is not None:
            changing.cancel()
            await asyncio.gather(changing, return_exceptions=True)
        if name in self.worlds:
            await self._admission.end(self._admission.local_member(name))

    def _linger(self, connection: Lingering) -> None:
        self._lingering = {c for c in self._lingering if c.fileno() >= 0}
        self._lingering.add(connection)

    # Names of pymultiworld.

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
        """Join a world whose store rank 0 hosts. Cancellation: As for ``join``.

        Args:
            world_name, rank, world_size, backend, device: As for ``join``.
            addr, port: Rank 0's address, as every member reaches it; port -1 is 29500.
            timeout: Seconds to wait for the other members.

        Raises:
            MultiWorldError: As for ``join``.
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
        """Reserve a name, which ``initialize_world`` joins later.

        Args:
            world_name: The name; ``WorldExistsError`` (a ``ValueError``) if it is in
                use.
            backend: Accepted for compatibility; ``initialize_world`` sets the backend.
        """
        if world_name in self.worlds or world_name in self._reserved:
            raise errors.WorldExistsError(
                f"this process has a world {world_name!r} already; choose another name",
                world=world_name,
            )
        self._reserved[world_name] = backend

    def remove_world(self, world_name: str) -> None:
        """Leave a world gracefully and remove it; sent data leaves in the background.

        Args:
            world_name: The world's name; ``UnknownWorldError`` (a ``ValueError``) if
                unknown.
        """
        if self._is_forked or self._reserved.pop(world_name, None) is not None:
            return
        changing = self._joining.get(world_name)
        if changing is not None:
            changing.cancel()
            if world_name not in self.worlds:
                return
        self.world(world_name)
        local = self._admission.take_out(world_name)
        # Send the notice now, in case the loop stops before the task below runs.
        local.report(CloseAsked())
        task = self._loop.create_task(
            self._admission.end(local), name=f"multiworld leave {world_name}"
        )
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # Forks.

    def _abandon_after_fork(self) -> None:
        """Make every operation fail in this forked child's copy."""
        self._is_forked = True  # the inherited event loop's selector stays as it is
        for local in self._admission.local_members():
            local.abandon_after_fork()


@functools.cache
def _install_fork_hook() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for manager in list(_managers):
        manager._abandon_after_fork()


def _is_spent(world: World) -> bool:
    """Return whether the next epoch may replace a world."""
    return world.is_broken or world.is_closed or bool(world.left)
