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

        Raises:
            UnknownWorldError: This process is in no world of that name.
        """


class WorldCommunicator:
    """Operations on a manager's worlds; each takes the world's name last.

    The name may be omitted while the manager has exactly one world. The operations
    raise the same errors as those of ``World``, and ``UnknownWorldError`` if the name
    is unknown, or if it is omitted and the manager has no world or several.

    Args:
        manager: The manager.
    """

    def __init__(self, manager: Worlds) -> None:
        self._manager = manager

    def _world(self, name: str) -> World:
        worlds = self._manager.worlds
        if name == "" and name not in worlds:
            if len(worlds) == 1:
                return next(iter(worlds.values()))
            raise UnknownWorldError(
                f"this process is in {len(worlds)} worlds; pass world_name",
                world=name,
            )
        return self._manager.world(name)

    def is_broken(self, world_name: str) -> bool:
        """Tell whether operations on a world fail.

        Args:
            world_name: The world's name.

        Returns:
            True if the world is broken, closed or unknown, or a member has left.
        """
        world = self._manager.worlds.get(world_name)
        return world is None or not world.is_ready or bool(world.left)

    async def send(self, tensor: Tensor, dst: int, world_name: str = "") -> None:
        """Send one tensor; see ``World.send``.

        Args:
            tensor: Any dtype, shape and strides.
            dst: The receiver's rank.
            world_name: The world's name.

        Cancellation: As for ``World.send``.
        """
        await self._world(world_name).send(tensor, dst=dst)

    async def recv(self, tensor: Tensor, src: int, world_name: str = "") -> None:
        """Receive into ``tensor``; see ``World.recv``.

        Args:
            tensor: Tensor to fill, of the sent dtype and number of elements.
            src: The sender's rank.
            world_name: The world's name.

        Cancellation: As for ``World.recv``.
        """
        await self._world(world_name).recv(tensor, src=src)

    async def broadcast(self, tensor: Tensor, src: int, world_name: str = "") -> None:
        """Copy the tensor of ``src`` to all members; see ``World.broadcast``.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
            src: The rank whose tensor is copied.
            world_name: The world's name.

        Cancellation: As for ``World.broadcast``.
        """
        await self._world(world_name).broadcast(tensor, src=src)

    async def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, world_name: str = ""
    ) -> None:
        """Reduce all tensors into every member's; see ``World.all_reduce``.

        Args:
            tensor: The operand, then the result; the same dtype and number of elements
                on every member.
            op: A ``torch.distributed.ReduceOp``.
            world_name: The world's name.

        Cancellation: As for ``World.broadcast``.
        """
        await self._world(world_name).all_reduce(tensor, op)

    async def reduce(
        self, tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, world_name: str = ""
    ) -> None:
        """Reduce all tensors into the one of ``dst``; see ``World.reduce``.

        Args:
            tensor: The operand, and on ``dst`` the result; the same dtype and number of
                elements on every member.
            dst: The rank that gets the result.
            op: A ``torch.distributed.ReduceOp``.
            world_name: The world's name.

        Cancellation: As for ``World.broadcast``.
        """
        await self._world(world_name).reduce(tensor, dst=dst, op=op)

    async def all_gather(
        self, tensors: Sequence[Tensor], tensor: Tensor, world_name: str = ""
    ) -> None:
        """Gather all tensors on every member; see ``World.all_gather``.

        Args:
            tensors: One tensor for each rank to fill, like ``tensor``.
            tensor: This member's tensor; the same dtype and number of elements on every
                member.
            world_name: The world's name.

        Cancellation: As for ``World.broadcast``.
        """
        await self._world(world_name).all_gather(tensor, tensors)

    async def gather(
        self,
        tensor: Tensor,
        gather_list: Sequence[Tensor] | None = None,
        dst: int = 0,
        world_name: str = "",
    ) -> None:
        """Gather all tensors on ``dst``; see ``World.gather``.

        Args:
            tensor: This member's tensor; the same dtype and number of elements on every
                member.
            gather_list: On ``dst``, one tensor for each rank to fill.
            dst: The rank that gets the tensors.
            world_name: The world's name.

        Cancellation: As for ``World.broadcast``.
        """
        await self._world(world_name).gather(tensor, dst=dst, outs=gather_list or None)

    async def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        world_name: str = "",
    ) -> None:
        """Send one tensor of ``src`` to each member; see ``World.scatter``.

        Args:
            tensor: Tensor to fill; the same dtype and number of elements on every
                member.
            scatter_list: On ``src``, one tensor for each rank.
            src: The rank whose tensors are sent.
            world_name: The world's name.

        Cancellation: As for ``World.broadcast``.
        """
        await self._world(world_name).scatter(tensor, scatter_list or None, src=src)

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        """Return any other collective of ``World``, with ``world_name`` by keyword."""
        if name.startswith("_") or not hasattr(CollectiveMethods, name):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

        def call(*args: Any, world_name: str = "", **options: Any) -> Any:
            return getattr(self._world(world_name), name)(*args, **options)

        return call
