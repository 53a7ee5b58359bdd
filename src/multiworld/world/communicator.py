"""The operations by a world's name, for programs written for pymultiworld. Shell."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.backends.collectives import CollectiveMethods
from multiworld.errors import BrokenWorldException, UnknownWorldError

if TYPE_CHECKING:
    from multiworld.world.world import World

__all__ = ["BrokenWorldException", "WorldCommunicator"]


class Worlds(Protocol):
    """What a communicator needs of a manager."""

    @property
    def worlds(self) -> Mapping[str, World]:
        """The open worlds, by name."""

    def world(self, name: str) -> World:
        """Return the open world of that name.

        Args:
            name: The name that it was joined under.

        Raises:
            UnknownWorldError: This process is not in such a world.
        """


class WorldCommunicator:
    """Operations on a manager's worlds, each with the world's name last.

    The name may be left out while the manager has exactly one world. Everything else
    is as on ``World``: what is raised, and what cancelling does.
    """

    def __init__(self, manager: Worlds) -> None:
        self._manager = manager

    def _world(self, name: str) -> World:
        worlds = self._manager.worlds
        if name == "" and name not in worlds:
            if len(worlds) == 1:
                return next(iter(worlds.values()))
            raise UnknownWorldError(
                f"this process is in {len(worlds)} worlds: name the one you mean",
                world=name,
            )
        return self._manager.world(name)

    def is_broken(self, world_name: str) -> bool:
        """Tell whether a world can carry no more traffic, or is unknown."""
        world = self._manager.worlds.get(world_name)
        return world is None or not world.is_ready or bool(world.left)

    async def send(self, tensor: Tensor, dst: int, world_name: str = "") -> None:
        """Send one tensor; see ``World.send``.

        Cancellation: as for ``World.send``.
        """
        await self._world(world_name).send(tensor, dst=dst)

    async def recv(self, tensor: Tensor, src: int, world_name: str = "") -> None:
        """Receive into ``tensor``; see ``World.recv``.

        Cancellation: as for ``World.recv``.
        """
        await self._world(world_name).recv(tensor, src=src)

    async def broadcast(self, tensor: Tensor, src: int, world_name: str = "") -> None:
        """Copy ``tensor`` of ``src`` to all; see ``World.broadcast``.

        Cancellation: as for ``World.broadcast``.
        """
        await self._world(world_name).broadcast(tensor, src=src)

    async def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, world_name: str = ""
    ) -> None:
        """Reduce into everybody's ``tensor``; see ``World.all_reduce``.

        Cancellation: as for ``World.broadcast``.
        """
        await self._world(world_name).all_reduce(tensor, op)

    async def reduce(
        self, tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, world_name: str = ""
    ) -> None:
        """Reduce into ``tensor`` of ``dst``; see ``World.reduce``.

        Cancellation: as for ``World.broadcast``.
        """
        await self._world(world_name).reduce(tensor, dst=dst, op=op)

    async def all_gather(
        self, tensors: Sequence[Tensor], tensor: Tensor, world_name: str = ""
    ) -> None:
        """Put every member's tensor into ``tensors``; see ``World.all_gather``.

        Cancellation: as for ``World.broadcast``.
        """
        await self._world(world_name).all_gather(tensor, tensors)

    async def gather(
        self,
        tensor: Tensor,
        gather_list: Sequence[Tensor] | None = None,
        dst: int = 0,
        world_name: str = "",
    ) -> None:
        """Put every member's tensor into ``gather_list`` of ``dst``.

        Cancellation: as for ``World.broadcast``.
        """
        await self._world(world_name).gather(tensor, dst=dst, outs=gather_list or None)

    async def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        world_name: str = "",
    ) -> None:
        """Put ``scatter_list[rank]`` of ``src`` into ``tensor``.

        Cancellation: as for ``World.broadcast``.
        """
        await self._world(world_name).scatter(tensor, scatter_list or None, src=src)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return any other collective of ``World``, with ``world_name`` by keyword."""
        if name.startswith("_") or not hasattr(CollectiveMethods, name):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

        def call(*args: Any, world_name: str = "", **options: Any) -> Any:
            return getattr(self._world(world_name), name)(*args, **options)

        return call
