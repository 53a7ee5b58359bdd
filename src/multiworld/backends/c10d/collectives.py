"""Collectives on a native group. Shell.

Before each collective the members compare their calls over the direct data path. Gloo
kills the process if two members' sizes differ, and hangs if their operations differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from multiworld.backends.base import WorldView
from multiworld.backends.c10d.flat import (
    as_bytes,
    flat_of,
    on_device,
    write_back,
    write_back_all,
)
from multiworld.backends.c10d.gloo_reduction import Reduction
from multiworld.backends.c10d.work_runner import WorkRunner
from multiworld.backends.collectives import KINDS
from multiworld.backends.direct.backend import DirectBackend
from multiworld.backends.dtypes import CODES, DTYPES, require_alike
from multiworld.backends.offload import offload, size_of
from multiworld.backends.reduction import OP_CODES, OP_NAMES, op_name
from multiworld.errors import TensorMismatchError
from multiworld.incarnation.lifecycle import Failed


class GroupCollectives:
    """Collectives of one world on its native group, run one after the other.

    Cancelling one breaks the world, even before its turn: the other members cannot know
    how far this member took part.

    Args:
        view: The world.
        direct: Data path over which the members compare their calls.
        runner: Runs the works of the native group.
    """

    def __init__(
        self, view: WorldView, direct: DirectBackend, runner: WorkRunner
    ) -> None:
        self._view, self._direct, self._runner = view, direct, runner
        self._rank, self._size = view.rank, view.incarnation.size
        self._turn = asyncio.Lock()
        self._limit = timedelta(seconds=view.config.operation_s)

    # Arguments are checked when a collective is called. It is prepared, run and
    # finished in its turn; large copies run in a thread.

    async def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy the ``tensor`` of rank ``src`` into the ``tensor`` of every member.

        Cancellation: breaks the world.
        """
        options = self._options(dist.BroadcastOptions())
        options.rootRank = src
        await self._collective(
            "broadcast",
            self._checked(tensor),
            prepare=lambda: [flat_of(tensor)],
            start=lambda pg, work: pg.broadcast([as_bytes(work[0])], options),
            finish=lambda work: write_back(tensor, work[0]),
            root=src,
        )

    async def all_reduce(self, tensor: Tensor, op: ReduceOp) -> None:
        """Reduce the tensors of all members into the ``tensor`` of every member.

        Cancellation: breaks the world.
        """
        plan = Reduction(self._checked(tensor), op, self._size)
        options = self._options(dist.AllreduceOptions())
        options.reduceOp = plan.native_op

        def finish(work: list[Tensor]) -> None:
            plan.finish(work[1], work[0])
            write_back(tensor, work[0])

        await self._collective(
            "all_reduce",
            tensor,
            prepare=lambda: plan.prepare(flat_of(tensor)),
            start=lambda pg, work: pg.allreduce([work[1]], options),
            finish=finish,
            op=op,
        )

    async def reduce(self, tensor: Tensor, dst: int, op: ReduceOp) -> None:
        """Reduce the tensors of all members into the ``tensor`` of rank ``dst``.

        Args:
            tensor: This member's tensor; unchanged on members other than ``dst``.
            dst: Rank that gets the result.
            op: The reduce operation.

        Cancellation: breaks the world.
        """
        plan = Reduction(self._checked(tensor), op, self._size)
        options = self._options(dist.ReduceOptions())
        options.reduceOp, options.rootRank = plan.native_op, dst
        is_root = self._rank == dst

        def prepare() -> list[Tensor]:
            flat = flat_of(tensor)
            # Gloo also writes to the tensors of members that are not the root.
            return plan.prepare(flat if is_root else flat.clone())

        def finish(work: list[Tensor]) -> None:
            if is_root:
                plan.finish(work[1], work[0])
                write_back(tensor, work[0])

        await self._collective(
            "reduce",
            tensor,
            prepare=prepare,
            start=lambda pg, work: pg.reduce([work[1]], options),
            finish=finish,
            root=dst,
            op=op,
        )

    async def all_gather(self, outs: Sequence[Tensor], tensor: Tensor) -> None:
        """Copy every member's ``tensor`` into ``outs[rank]`` of every member.

        Cancellation: breaks the world.
        """
        self._alike(outs, self._checked(tensor), "outs")
        options = self._options(AllgatherOptions())
        await self._collective(
            "all_gather",
            tensor,
            prepare=lambda: [flat_of(tensor), *map(flat_of, outs)],
            start=lambda pg, work: pg.allgather(
                [[as_bytes(flat) for flat in work[1:]]], [as_bytes(work[0])], options
            ),
            finish=lambda work: write_back_all(outs, work[1:]),
        )

    async def gather(
        self, tensor: Tensor, outs: Sequence[Tensor] | None, dst: int
    ) -> None:
        """Copy every member's ``tensor`` into ``outs[rank]`` of rank ``dst``.

        Args:
            tensor: This member's tensor.
            outs: Tensors to receive into, one for each rank; used on ``dst`` only.
            dst: Rank that gets the tensors.

        Cancellation: breaks the world.
        """
        self._checked(tensor)
        is_root = self._rank == dst
        targets = self._alike(outs, tensor, "outs") if is_root else []
        options = self._options(dist.GatherOptions())
        options.rootRank = dst

        def start(pg: Any, work: list[Tensor]) -> Any:
            views = [[as_bytes(flat) for flat in work[1:]]] if is_root else []
            return pg.gather(views, [as_bytes(work[0])], options)

        await self._collective(
            "gather",
            tensor,
            prepare=lambda: [flat_of(tensor), *map(flat_of, targets)],
            start=start,
            finish=lambda work: write_back_all(targets, work[1:]),
            root=dst,
        )

    async def scatter(
        self, out: Tensor, tensors: Sequence[Tensor] | None, src: int
    ) -> None:
        """Copy ``tensors[rank]`` of rank ``src`` into the ``out`` of every member.

        Args:
            out: Tensor to receive into.
            tensors: Tensors to send, one for each rank; used on ``src`` only.
            src: Rank that sends.

        Cancellation: breaks the world.
        """
        self._checked(out)
        is_root = self._rank == src
        parts = self._alike(tensors, out, "tensors") if is_root else []
        options = self._options(dist.ScatterOptions())
        options.rootRank = src

        def start(pg: Any, work: list[Tensor]) -> Any:
            views = [[as_bytes(flat) for flat in work[1:]]] if is_root else []
            return pg.scatter([as_bytes(work[0])], views, options)

        await self._collective(
            "scatter",
            out,
            prepare=lambda: [flat_of(out), *map(flat_of, parts)],
            start=start,
            finish=lambda work: write_back(out, work[0]),
            root=src,
        )

    async def reduce_scatter(
        self, out: Tensor, tensors: Sequence[Tensor], op: ReduceOp
    ) -> None:
        """Reduce ``tensors[i]`` of all members into the ``out`` of rank i.

        Runs an all-reduce, because Gloo's reduce-scatter cannot report completion.

        Args:
            out: Tensor for the result.
            tensors: Tensors to reduce, one for each rank.
            op: The reduce operation.

        Cancellation: breaks the world.
        """
        plan = Reduction(self._checked(out), op, self._size)
        parts = self._alike(tensors, out, "tensors")
        options = self._options(dist.AllreduceOptions())
        options.reduceOp = plan.native_op

        def finish(work: list[Tensor]) -> None:
            plan.finish(work[1], work[0])
            mine = work[0].view(self._size, -1)[self._rank]
            out.detach().copy_(mine.view(out.shape))

        await self._collective(
            "reduce_scatter",
            out,
            prepare=lambda: plan.prepare(torch.cat([flat_of(part) for part in parts])),
            start=lambda pg, work: pg.allreduce([work[1]], options),
            finish=finish,
            op=op,
        )

    async def all_to_all(self, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> None:
        """Send ``ins[i]`` to rank i; receive its tensor for this rank in ``outs[i]``.

        Cancellation: breaks the world.
        """
        like = self._checked(ins[0]) if len(ins) else torch.empty(0)
        self._alike(ins, like, "ins")
        self._alike(outs, like, "outs")
        options = self._options(dist.AllToAllOptions())

        def prepare() -> list[Tensor]:
            give = torch.cat([as_bytes(flat_of(tensor)) for tensor in ins])
            return [give, torch.empty_like(give)]

        def finish(work: list[Tensor]) -> None:
            for out, part in zip(outs, work[1].view(self._size, -1), strict=True):
                out.detach().copy_(part.view(out.dtype).view(out.shape))

        await self._collective(
            "all_to_all",
            like,
            prepare=prepare,
            start=lambda pg, work: pg.alltoall_base(work[1], work[0], [], [], options),
            finish=finish,
        )

    async def barrier(self) -> None:
        """Wait until every member has called ``barrier``.

        Cancellation: breaks the world.
        """
        nothing = torch.empty(0, dtype=torch.uint8, device=self._view.device)
        options = self._options(dist.BarrierOptions())
        await self._collective(
            "barrier",
            nothing,
            prepare=list,
            start=lambda pg, _: pg.barrier(options),
            finish=lambda _: None,
        )

    def _options(self, options: Any) -> Any:
        options.timeout = self._limit
        return options

    def _checked(self, tensor: Tensor) -> Tensor:
        tensor = on_device(tensor, self._view.device, "a collective's tensor")
        if tensor.dtype not in CODES:
            raise TensorMismatchError(f"tensors of {tensor.dtype} cannot be sent")
        return tensor

    def _alike(
        self, tensors: Sequence[Tensor] | None, like: Tensor, what: str
    ) -> list[Tensor]:
        return require_alike(tensors, like, self._size, what, self._checked)

    async def _collective(
        self,
        kind: str,
        like: Tensor,
        *,
        prepare: Callable[[], list[Tensor]],
        start: Callable[[Any, list[Tensor]], Any],
        finish: Callable[[list[Tensor]], None],
        root: int = 0,
        op: ReduceOp | None = None,
    ) -> None:
        """Compare the call with the other members', then prepare, run and finish it."""
        op_code = 0 if op is None else OP_CODES[op_name(op)]
        terms = [KINDS.index(kind), CODES[like.dtype], like.numel(), root, op_code]
        size = size_of(like) * self._size
        try:
            async with self._turn:
                await self._agree(terms)
                work = await offload(size, prepare)
                await self._runner.carry_out(lambda native: start(native, work))
                await offload(size, finish, work)
        except asyncio.CancelledError:
            reason = f"rank {self._rank} cancelled {kind} before it was complete"
            self._view.report(Failed(reason))
            raise

    async def _agree(self, terms: list[int]) -> None:
        mine = torch.tensor(terms)
        outs = [torch.empty_like(mine) for _ in range(self._size)]
        await self._direct.collectives.all_gather(outs, mine)
        for rank, theirs in enumerate(outs):
            if theirs.tolist() != terms:
                raise TensorMismatchError(
                    f"rank {self._rank} called {_describe(terms)}, rank {rank} called "
                    f"{_describe(theirs.tolist())}; all members must call the same "
                    "collectives in the same order, with equal dtypes and sizes"
                )


def _describe(terms: list[int]) -> str:
    kind, code, count, root, op = terms
    operation = f", {OP_NAMES[op]}" if op in OP_NAMES else ""
    dtype = str(DTYPES.get(code, code)).removeprefix("torch.")
    return f"{KINDS[kind]} of {count} {dtype}, root {root}{operation}"
