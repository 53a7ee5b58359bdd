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
    """The collectives as methods that wait; see ``multiworld.World`` for each."""

    def __init__(self, collectives: CollectiveMethods) -> None:
        self._collectives = collectives

    def _wait(self, step: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine on the world's loop, and wait for it."""
        raise NotImplementedError

    def broadcast(
        self, tensor: Tensor, *, src: int, timeout_s: float | None = None
    ) -> Tensor:
        """Copy the tensor of ``src`` into every member's tensor.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
            src: The rank whose tensor is copied.
            timeout_s: Seconds to wait; None: without limit.

        Returns:
            ``tensor``.

        Raises:
            TensorMismatchError: The members did not call the same; the world breaks.
            TimeoutError: It took longer; this world is broken.
        """
        step = self._collectives.broadcast(tensor, src=src)
        return self._wait(step, timeout_s)

    def all_reduce(
        self, tensor: Tensor, op: Any = ReduceOp.SUM, *, timeout_s: float | None = None
    ) -> Tensor:
        """Reduce all members' tensors, element by element, into every member's tensor.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
            op: A ``torch.distributed.ReduceOp``.
            timeout_s: Seconds to wait; None: without limit.

        Returns:
            ``tensor``.

        Raises:
            UnsupportedOperationError: ``op`` does not exist for the dtype.
            TensorMismatchError: The members did not call the same; the world breaks.
            TimeoutError: It took longer; this world is broken.
        """
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
        """Reduce all members' tensors, element by element, into the tensor of ``dst``.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member. It
                changes at ``dst`` only.
            dst: The rank that gets the result.
            op: A ``torch.distributed.ReduceOp``.
            timeout_s: Seconds to wait; None: without limit.

        Returns:
            ``tensor``.

        Raises:
            UnsupportedOperationError: ``op`` does not exist for the dtype.
            TensorMismatchError: The members did not call the same; the world breaks.
            TimeoutError: It took longer; this world is broken.
        """
        step = self._collectives.reduce(tensor, dst=dst, op=op)
        return self._wait(step, timeout_s)

    def all_gather(
        self,
        tensor: Tensor,
        outs: Sequence[Tensor] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Tensor]:
        """Return every member's tensor, by rank.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
            outs: Tensors to fill, one for each rank; new ones by default.
            timeout_s: Seconds to wait; None: without limit.

        Returns:
            The tensors, by rank.

        Raises:
            TensorMismatchError: ``outs`` do not fit, or the members did not call the
                same; in the latter case the world breaks.
            TimeoutError: It took longer; this world is broken.
        """
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
        """Return every member's tensor, by rank, at ``dst``; None elsewhere.

        Args:
            tensor: Any shape; the same dtype and number of elements on every member.
            dst: The rank that gets the tensors.
            outs: Tensors to fill at ``dst``, one for each rank; new ones by default.
            timeout_s: Seconds to wait; None: without limit.

        Returns:
            The tensors, by rank, at ``dst``; None elsewhere.

        Raises:
            TensorMismatchError: ``outs`` do not fit, or the members did not call the
                same; in the latter case the world breaks.
            TimeoutError: It took longer; this world is broken.
        """
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
        """Receive this rank's element of the list that ``src`` gives.

        Args:
            out: The tensor to fill; dtype and number of elements as each of
                ``tensors``.
            tensors: One tensor for each rank; at ``src`` only.
            src: The rank that gives.
            timeout_s: Seconds to wait; None: without limit.

        Returns:
            ``out``.

        Raises:
            TensorMismatchError: ``tensors`` do not fit, or the members did not call the
                same; in the latter case the world breaks.
            TimeoutError: It took longer; this world is broken.
        """
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
        """Reduce ``tensors[i]`` of all members into ``out`` of rank i.

        Args:
            out: The tensor to fill; dtype and number of elements as each of
                ``tensors``.
            tensors: One tensor for each rank.
            op: A ``torch.distributed.ReduceOp``.
            timeout_s: Seconds to wait; None: without limit.

        Returns:
            ``out``.

        Raises:
            UnsupportedOperationError: ``op`` does not exist for the dtype.
            TensorMismatchError: ``tensors`` do not fit, or the members did not call the
                same; in the latter case the world breaks.
            TimeoutError: It took longer; this world is broken.
        """
        step = self._collectives.reduce_scatter(out, tensors, op)
        return self._wait(step, timeout_s)

    def all_to_all(
        self,
        outs: Sequence[Tensor],
        ins: Sequence[Tensor],
        *,
        timeout_s: float | None = None,
    ) -> list[Tensor]:
        """Send ``ins[i]`` to rank i, and receive what it sends here into ``outs[i]``.

        Args:
            outs: One tensor for each rank, all of one dtype and number of elements.
            ins: Likewise.
            timeout_s: Seconds to wait; None: without limit.

        Returns:
            ``outs``.

        Raises:
            TensorMismatchError: The lists do not fit, or the members did not call the
                same; in the latter case the world breaks.
            TimeoutError: It took longer; this world is broken.
        """
        step = self._collectives.all_to_all(outs, ins)
        return self._wait(step, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every member has called it.

        Args:
            timeout_s: Seconds to wait; None: without limit.

        Raises:
            TimeoutError: It took longer; this world is broken.
        """
        step = self._collectives.barrier()
        return self._wait(step, timeout_s)
