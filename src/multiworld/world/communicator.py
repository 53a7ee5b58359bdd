"""Operations by a world's name, for programs written for pymultiworld."""

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
    """Access to the worlds of a manager."""

    @property
    def worlds(self) -> Mapping[str, World]:
        """The open worlds, by name."""

    def world(self, name: str) -> World:
        """Return the open world of that name.

        Args:
            name: The world's name.
        """


class WorldCommunicator:
    """Operations on a manager's worlds; each takes the world's name last.

    ``world_name`` may be omitted while the manager has exactly one world. The
    operations raise the errors of ``World``, and ``UnknownWorldError`` if the name is
    unknown, or omitted without exactly one world.
    """

    def __init__(self, manager: Worlds) -> None:
        self._manager = manager

    def _world(self, name: str) -> World:
        worlds = self._manager.worlds
        if name == "" and name not in worlds:
            if len(worlds) == 1:
                return next(iter(worlds.values()))
            raise UnknownWorldError(
                f"this process is in {len(worlds)} worlds; pass world_name", world=name
            )
        return self._manager.world(name)

    def is_broken(self, world_name: str) -> bool:
        """Return True if a world is broken, closed or unknown, or a member has left.

        Args:
            world_name: The world's name.
        """
        world = self._manager.worlds.get(world_name)
        return world is None or not world.is_ready or bool(world.left)

    async def send(self, tensor: Tensor, dst: int, world_name: str = "") -> None:
        """Send one tensor; see ``World.send``. Cancellation: As there.

        Args:
            tensor, dst, world_name: The tensor, the receiver's rank, and the world.
        """
        await self._world(world_name).send(tensor, dst=dst)

    async def recv(self, tensor: Tensor, src: int, world_name: str = "") -> None:
        """Receive into ``tensor``; see ``World.recv``. Cancellation: As there.

        Args:
            tensor, src, world_name: Tensor to fill, the sender's rank, and the world.
        """
        await self._world(world_name).recv(tensor, src=src)

    async def broadcast(self, tensor: Tensor, src: int, world_name: str = "") -> None:
        """Copy a tensor to all; see ``World.broadcast``. Cancellation: As there.

        Args:
            tensor, src, world_name: Tensor, the rank that it comes from, and the world.
        """
        await self._world(world_name).broadcast(tensor, src=src)

    async def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, world_name: str = ""
    ) -> None:
        """Reduce on every member; see ``World.all_reduce``. Cancellation: As there.

        Args:
            tensor, op, world_name: Operand and result, the ``ReduceOp``, and the world.
        """
        await self._world(world_name).all_reduce(tensor, op)

    async def reduce(
        self, tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, world_name: str = ""
    ) -> None:
        """Reduce on ``dst``; see ``World.reduce``. Cancellation: As there.

        Args:
            tensor, dst, op, world_name: As for ``all_reduce``; ``dst`` gets the result.
        """
        await self._world(world_name).reduce(tensor, dst=dst, op=op)

    async def all_gather(
        self, tensors: Sequence[Tensor], tensor: Tensor, world_name: str = ""
    ) -> None:
        """Gather on every member; see ``World.all_gather``. Cancellation: As there.

        Args:
            tensors, tensor, world_name: Tensors to fill, this member's, and the world.
        """
        await self._world(world_name).all_gather(tensor, tensors)

    async def gather(
        self,
        tensor: Tensor,
        gather_list: Sequence[Tensor] | None = None,
        dst: int = 0,
        world_name: str = "",
    ) -> None:
        """Gather all tensors on ``dst``; see ``World.gather``. Cancellation: As there.

        Args:
            tensor, dst, world_name: This member's tensor, the root, and the world.
            gather_list: On ``dst``, one tensor for each rank to fill.
        """
        await self._world(world_name).gather(tensor, dst=dst, outs=gather_list or None)

    async def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        world_name: str = "",
    ) -> None:
        """Send one tensor to each; see ``World.scatter``. Cancellation: As there.

        Args:
            tensor, src, world_name: Tensor to fill, the root, and the world.
            scatter_list: On ``src``, one tensor for each rank.
        """
        await self._world(world_name).scatter(tensor, scatter_list or None, src=src)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return another collective of ``World``; pass ``world_name`` by keyword."""
        if name.startswith("_") or not hasattr(CollectiveMethods, name):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

        def call(*args: Any, world_name: str = "", **options: Any) -> Any:
            return getattr(self._world(world_name), name)(*args, **options)

        return call
