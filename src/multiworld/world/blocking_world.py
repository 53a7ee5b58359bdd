"""The members of a world for programs without an event loop.

Written by ``python -m tests.meta.blocking_facade`` from ``multiworld.World``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from multiworld.backends.base import Bundle
from multiworld.config import WorldConfig
from multiworld.world.manager import WorldManager
from multiworld.world.world import World, WorldStatistics

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
W = TypeVar("W")


class BlockingWorld:
    """The properties and methods of a world; those that wait take ``timeout_s``."""

    _world: World

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine on the world's loop, and wait for it."""
        raise NotImplementedError

    def _next(self, step: Coroutine[Any, Any, World], timeout_s: float | None) -> Self:
        """Wait for the next incarnation."""
        raise NotImplementedError

    @property
    def is_ready(self) -> bool:
        """As ``multiworld.World.is_ready``."""
        return self._world.is_ready

    @property
    def is_broken(self) -> bool:
        """As ``multiworld.World.is_broken``."""
        return self._world.is_broken

    @property
    def is_closed(self) -> bool:
        """As ``multiworld.World.is_closed``."""
        return self._world.is_closed

    @property
    def left(self) -> frozenset[int]:
        """As ``multiworld.World.left``."""
        return self._world.left

    @property
    def lost(self) -> frozenset[int]:
        """As ``multiworld.World.lost``."""
        return self._world.lost

    def silent_s(self, rank: int) -> float:
        """As ``multiworld.World.silent_s``."""
        return self._world.silent_s(rank)

    @property
    def members(self) -> tuple[str, ...]:
        """As ``multiworld.World.members``."""
        return self._world.members

    def statistics(self) -> WorldStatistics:
        """As ``multiworld.World.statistics``."""
        return self._world.statistics()

    def wait_over(self, *, timeout_s: float | None = None) -> None:
        """As ``multiworld.World.wait_over``."""
        step = self._world.wait_over()
        self._wait(step, timeout_s)

    def wait_incomplete(self, *, timeout_s: float | None = None) -> None:
        """As ``multiworld.World.wait_incomplete``."""
        step = self._world.wait_incomplete()
        self._wait(step, timeout_s)

    def raise_if_over(self, cause: BaseException | None = None) -> None:
        """As ``multiworld.World.raise_if_over``."""
        self._world.raise_if_over(cause)

    def send(
        self, tensor: Tensor, *, dst: int, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """As ``multiworld.World.send``."""
        step = self._world.send(tensor, dst=dst, tag=tag)
        self._wait(step, timeout_s)

    def recv(
        self,
        out: Tensor | None = None,
        *,
        src: int,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> Tensor:
        """As ``multiworld.World.recv``."""
        step = self._world.recv(out, src=src, tag=tag)
        return self._wait(step, timeout_s)

    def recv_any(
        self, out: Tensor | None = None, *, tag: int = 0, timeout_s: float | None = None
    ) -> tuple[int, Tensor]:
        """As ``multiworld.World.recv_any``."""
        step = self._world.recv_any(out, tag=tag)
        return self._wait(step, timeout_s)

    def send_bundle(
        self,
        tensors: Mapping[str, Tensor],
        *,
        dst: int,
        meta: Mapping[str, Any] | None = None,
        tag: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """As ``multiworld.World.send_bundle``."""
        step = self._world.send_bundle(tensors, dst=dst, meta=meta, tag=tag)
        self._wait(step, timeout_s)

    def recv_bundle(
        self, *, src: int | None = None, tag: int = 0, timeout_s: float | None = None
    ) -> Bundle:
        """As ``multiworld.World.recv_bundle``."""
        step = self._world.recv_bundle(src=src, tag=tag)
        return self._wait(step, timeout_s)

    def send_object(
        self, obj: Any, *, dst: int, tag: int = 0, timeout_s: float | None = None
    ) -> None:
        """As ``multiworld.World.send_object``."""
        step = self._world.send_object(obj, dst=dst, tag=tag)
        self._wait(step, timeout_s)

    def recv_object(
        self, *, src: int | None = None, tag: int = 0, timeout_s: float | None = None
    ) -> Any:
        """As ``multiworld.World.recv_object``."""
        step = self._world.recv_object(src=src, tag=tag)
        return self._wait(step, timeout_s)

    @property
    def process_group(self) -> ProcessGroup:
        """As ``multiworld.World.process_group``."""
        return self._world.process_group

    def device_mesh(self, dim_name: str = "world") -> DeviceMesh:
        """As ``multiworld.World.device_mesh``."""
        return self._world.device_mesh(dim_name)

    @property
    def waiting(self) -> dict[int, int]:
        """As ``multiworld.World.waiting``."""
        return self._world.waiting

    def reform(self, *, timeout_s: float | None = None) -> Self:
        """As ``multiworld.World.reform``."""
        step = self._world.reform()
        return self._next(step, timeout_s)

    def grow(self, *, to: int, timeout_s: float | None = None) -> Self:
        """As ``multiworld.World.grow``."""
        step = self._world.grow(to=to)
        return self._next(step, timeout_s)

    def close(self, *, timeout_s: float | None = None) -> None:
        """As ``multiworld.World.close``."""
        step = self._world.close()
        self._wait(step, timeout_s)

    def broadcast(
        self, tensor: Tensor, *, src: int, timeout_s: float | None = None
    ) -> Tensor:
        """As ``multiworld.World.broadcast``."""
        step = self._world.broadcast(tensor, src=src)
        return self._wait(step, timeout_s)

    def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, *, timeout_s: float | None = None
    ) -> Tensor:
        """As ``multiworld.World.all_reduce``."""
        step = self._world.all_reduce(tensor, op)
        return self._wait(step, timeout_s)

    def reduce(
        self,
        tensor: Tensor,
        *,
        dst: int,
        op: Any = ReduceOp.SUM,
        timeout_s: float | None = None,
    ) -> Tensor:
        """As ``multiworld.World.reduce``."""
        step = self._world.reduce(tensor, dst=dst, op=op)
        return self._wait(step, timeout_s)

    def all_gather(
        self,
        tensor: Tensor,
        outs: Sequence[Tensor] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Tensor]:
        """As ``multiworld.World.all_gather``."""
        step = self._world.all_gather(tensor, outs)
        return self._wait(step, timeout_s)

    def gather(
        self,
        tensor: Tensor,
        *,
        dst: int,
        outs: Sequence[Tensor] | None = None,
        timeout_s: float | None = None,
    ) -> list[Tensor] | None:
        """As ``multiworld.World.gather``."""
        step = self._world.gather(tensor, dst=dst, outs=outs)
        return self._wait(step, timeout_s)

    def scatter(
        self,
        out: Tensor,
        tensors: Sequence[Tensor] | None = None,
        *,
        src: int,
        timeout_s: float | None = None,
    ) -> Tensor:
        """As ``multiworld.World.scatter``."""
        step = self._world.scatter(out, tensors, src=src)
        return self._wait(step, timeout_s)

    def reduce_scatter(
        self,
        out: Tensor,
        tensors: Sequence[Tensor],
        op: Any = ReduceOp.SUM,
        *,
        timeout_s: float | None = None,
    ) -> Tensor:
        """As ``multiworld.World.reduce_scatter``."""
        step = self._world.reduce_scatter(out, tensors, op)
        return self._wait(step, timeout_s)

    def all_to_all(
        self,
        outs: Sequence[Tensor],
        ins: Sequence[Tensor],
        *,
        timeout_s: float | None = None,
    ) -> list[Tensor]:
        """As ``multiworld.World.all_to_all``."""
        step = self._world.all_to_all(outs, ins)
        return self._wait(step, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """As ``multiworld.World.barrier``."""
        step = self._world.barrier()
        self._wait(step, timeout_s)


class BlockingManager(Generic[W]):
    """Methods of a manager; those that wait take ``timeout_s``. ``W``: world type."""

    _manager: WorldManager

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine on the manager's loop, and wait for it."""
        raise NotImplementedError

    def _next(self, step: Coroutine[Any, Any, World], timeout_s: float | None) -> W:
        """Wait for a world."""
        raise NotImplementedError

    def _each(self, worlds: AsyncIterator[World]) -> Iterator[W]:
        """Iterate over worlds, waiting for each one."""
        raise NotImplementedError

    def join(
        self,
        name: str,
        *,
        rank: int | None = None,
        size: int | None = None,
        store: str | None = None,
        backend: str = "direct",
        config: WorldConfig | None = None,
        device: torch.device | str = "cpu",
        timeout_s: float | None = None,
    ) -> W:
        """As ``multiworld.WorldManager.join``."""
        step = self._manager.join(
            name,
            rank=rank,
            size=size,
            store=store,
            backend=backend,
            config=config,
            device=device,
        )
        return self._next(step, timeout_s)

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
    ) -> Iterator[W]:
        """As ``multiworld.WorldManager.keep``."""
        return self._each(
            self._manager.keep(
                name,
                rank=rank,
                size=size,
                store=store,
                backend=backend,
                config=config,
                device=device,
            )
        )

    def leave(self, name: str, *, timeout_s: float | None = None) -> None:
        """As ``multiworld.WorldManager.leave``."""
        step = self._manager.leave(name)
        self._wait(step, timeout_s)
