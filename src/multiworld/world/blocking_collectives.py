"""The collectives for programs without an event loop.

Written by ``python -m tests.meta.blocking_facade`` from ``backends.collectives``.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import ReduceOp

from multiworld.backends.collectives import CollectiveMethods

T = TypeVar("T")


class BlockingCollectives:
    """The collectives as methods that wait.

    Each takes ``timeout_s``, seconds to wait or None, and raises ``TimeoutError`` when
    they are over; the world is broken then.
    """

    def __init__(self, collectives: CollectiveMethods) -> None:
        self._collectives = collectives

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine on the world's loop, and wait for it."""
        raise NotImplementedError

    def broadcast(
        self, tensor: Tensor, *, src: int, timeout_s: float | None = None
    ) -> Tensor:
        """Wait for ``multiworld.World.broadcast``."""
        step = self._collectives.broadcast(tensor, src=src)
        return self._wait(step, timeout_s)

    def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, *, timeout_s: float | None = None
    ) -> Tensor:
        """Wait for ``multiworld.World.all_reduce``."""
        step = self._collectives.all_reduce(tensor, op)
        return self._wait(step, timeout_s)

    def reduce(
        self,
        tensor: Tensor,
        *,
        dst: int,
        op: Any = ReduceOp.SUM,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Wait for ``multiworld.World.reduce``."""
        step = self._collectives.reduce(tensor, dst=dst, op=op)
        return self._wait(step, timeout_s)

    def all_gather(
        self,
        tensor: Tensor,
        outs: Sequence[Tensor] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Tensor]:
        """Wait for ``multiworld.World.all_gather``."""
        step = self._collectives.all_gather(tensor, outs)
        return self._wait(step, timeout_s)

    def gather(
        self,
        tensor: Tensor,
        *,
        dst: int,
        outs: Sequence[Tensor] | None = None,
        timeout_s: float | None = None,
    ) -> list[Tensor] | None:
        """Wait for ``multiworld.World.gather``."""
        step = self._collectives.gather(tensor, dst=dst, outs=outs)
        return self._wait(step, timeout_s)

    def scatter(
        self,
        out: Tensor,
        tensors: Sequence[Tensor] | None = None,
        *,
        src: int,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Wait for ``multiworld.World.scatter``."""
        step = self._collectives.scatter(out, tensors, src=src)
        return self._wait(step, timeout_s)

    def reduce_scatter(
        self,
        out: Tensor,
        tensors: Sequence[Tensor],
        op: Any = ReduceOp.SUM,
        *,
        timeout_s: float | None = None,
    ) -> Tensor:
        """Wait for ``multiworld.World.reduce_scatter``."""
        step = self._collectives.reduce_scatter(out, tensors, op)
        return self._wait(step, timeout_s)

    def all_to_all(
        self,
        outs: Sequence[Tensor],
        ins: Sequence[Tensor],
        *,
        timeout_s: float | None = None,
    ) -> list[Tensor]:
        """Wait for ``multiworld.World.all_to_all``."""
        step = self._collectives.all_to_all(outs, ins)
        return self._wait(step, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait for ``multiworld.World.barrier``."""
        step = self._collectives.barrier()
        return self._wait(step, timeout_s)
