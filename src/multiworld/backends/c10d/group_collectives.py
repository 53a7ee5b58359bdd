"""Collectives on a native group. Members first compare their calls: Gloo kills the
process if two sizes differ, and hangs if the operations differ."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from multiworld.backends import collectives, torch_names
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
from multiworld.backends.collective import Call, Collective, Operation
from multiworld.backends.dtypes import (
    CODES,
    overwrite,
    reached_by,
    require_matching,
    require_receivable,
)
from multiworld.backends.lane_collectives import LaneCollectives
from multiworld.backends.offload import offload, size_of
from multiworld.errors import MemberLeftError, MultiWorldError, TensorMismatchError
from multiworld.incarnation.lifecycle import Failed


@dataclass(frozen=True, slots=True)
class Native:
    """The steps that carry out one call."""

    prepare: Callable[[], list[Tensor]]  # make the tensors that the group works on
    start: Callable[[Any, list[Tensor]], Any]  # start its work on them
    finish: Callable[[list[Tensor]], None]  # write the caller's tensors


class GroupCollectives:
    """Collectives of one world on its native group, run one after the other."""

    def __init__(
        self, view: WorldView, lanes: LaneCollectives, runner: WorkRunner
    ) -> None:
        self._view, self._lanes, self._runner = view, lanes, runner
        self._rank, self._size = view.rank, view.incarnation.size
        self._checked = functools.partial(_checked, device=view.device)
        self._matching = functools.partial(
            require_matching, size=self._size, check=self._checked
        )
        # The collectives that the native group has.
        self._natives: dict[Collective, Callable[[Call], Native]] = {
            collectives.BROADCAST: self._broadcast,
            collectives.ALL_REDUCE: self._all_reduce,
            collectives.REDUCE: self._reduce,
            collectives.ALL_GATHER: self._all_gather,
            collectives.GATHER: self._gather,
            collectives.SCATTER: self._scatter,
            collectives.REDUCE_SCATTER: self._reduce_scatter,
            collectives.ALL_TO_ALL: self._all_to_all,
            collectives.BARRIER: self._barrier,
        }
        self._turn = asyncio.Lock()
        # Numbers of the collectives, the same at all members.
        self._numbers = itertools.count(1)
        self._limit = timedelta(seconds=view.config.operation_s)

    # Arguments are checked when a collective is called. It is prepared, run and
    # finished in its turn; large copies run in a thread.

    async def run(self, call: Call) -> None:
        """Carry out a call; over lanes, if the group does not have the collective."""
        prepare_native = self._natives.get(call.collective)
        steps = (
            self._lanes.run(call)
            if prepare_native is None
            else self._run_native(call, prepare_native(call))
        )
        try:
            async with self._turn:
                await steps
        except asyncio.CancelledError:
            # The other members cannot know how far this one got.
            name = call.collective.name
            reason = f"rank {self._rank} cancelled {name} before it was complete"
            self._view.report(Failed(reason))
            raise
        except MultiWorldError:
            raise
        except Exception as error:
            # E.g. out of memory. Unless this is reported, the other members hang.
            reason = f"rank {self._rank} failed in {call.collective.name}: {error}"
            self._view.report(Failed(reason))
            raise
        finally:
            steps.close()

    def _broadcast(self, call: Call) -> Native:
        src = call.root
        is_root = self._rank == src
        tensor = self._checked(call.tensor, is_written=not is_root)
        options = self._options(dist.BroadcastOptions(), rootRank=src)
        return Native(
            prepare=lambda: [flat_of(tensor)],
            start=lambda pg, work: pg.broadcast([as_bytes(work[0])], options),
            finish=lambda work: None if is_root else write_back(tensor, work[0]),
        )

    def _all_reduce(self, call: Call) -> Native:
        tensor, op = call.tensor, call.op
        plan = self._reduction(self._checked(tensor, is_written=True), op)
        options = self._options(dist.AllreduceOptions(), reduceOp=plan.native_op)

        def finish(work: list[Tensor]) -> None:
            plan.finish(work[1], work[0])
            write_back(tensor, work[0])

        return Native(
            prepare=lambda: plan.prepare(flat_of(tensor)),
            start=lambda pg, work: pg.allreduce([work[1]], options),
            finish=finish,
        )

    def _reduce(self, call: Call) -> Native:
        tensor, dst, op = call.tensor, call.root, call.op
        is_root = self._rank == dst
        plan = self._reduction(self._checked(tensor, is_written=is_root), op)
        options = self._options(
            dist.ReduceOptions(), reduceOp=plan.native_op, rootRank=dst
        )

        def prepare() -> list[Tensor]:
            flat = flat_of(tensor)
            # Gloo also writes to the tensors of members that are not the root.
            return plan.prepare(flat if is_root else flat.clone())

        def finish(work: list[Tensor]) -> None:
            if is_root:
                plan.finish(work[1], work[0])
                write_back(tensor, work[0])

        return Native(
            prepare=prepare,
            start=lambda pg, work: pg.reduce([work[1]], options),
            finish=finish,
        )

    def _all_gather(self, call: Call) -> Native:
        tensor, outs = call.tensor, call.tensors or ()
        self._matching(outs, self._checked(tensor), "outs", is_written=True)
        options = self._options(torch_names.all_gather_options())
        return Native(
            prepare=lambda: [flat_of(tensor), *map(flat_of, outs)],
            start=lambda pg, work: pg.allgather(
                [[as_bytes(flat) for flat in work[1:]]], [as_bytes(work[0])], options
            ),
            finish=lambda work: write_back_all(outs, work[1:]),
        )

    def _gather(self, call: Call) -> Native:
        tensor, outs, dst = call.tensor, call.tensors, call.root
        self._checked(tensor)
        is_root = self._rank == dst
        targets = (
            self._matching(outs, tensor, "outs", is_written=True) if is_root else []
        )
        options = self._options(dist.GatherOptions(), rootRank=dst)

        def start(pg: Any, work: list[Tensor]) -> Any:
            views = [[as_bytes(flat) for flat in work[1:]]] if is_root else []
            return pg.gather(views, [as_bytes(work[0])], options)

        return Native(
            prepare=lambda: [flat_of(tensor), *map(flat_of, targets)],
            start=start,
            finish=lambda work: write_back_all(targets, work[1:]),
        )

    def _scatter(self, call: Call) -> Native:
        out, tensors, src = call.tensor, call.tensors, call.root
        self._checked(out, is_written=True)
        is_root = self._rank == src
        parts = self._matching(tensors, out, "tensors") if is_root else []
        options = self._options(dist.ScatterOptions(), rootRank=src)

        def prepare() -> list[Tensor]:
            flat = flat_of(out)
            if any(reached_by(parts, [out])):
                # Gloo writes to ``flat`` before it has sent all of its input.
                flat = torch.empty_like(flat)
            return [flat, *map(flat_of, parts)]

        def start(pg: Any, work: list[Tensor]) -> Any:
            views = [[as_bytes(flat) for flat in work[1:]]] if is_root else []
            return pg.scatter([as_bytes(work[0])], views, options)

        return Native(
            prepare=prepare,
            start=start,
            finish=lambda work: write_back(out, work[0]),
        )

    def _reduce_scatter(self, call: Call) -> Native:
        out, tensors, op = call.tensor, call.tensors, call.op
        plan = self._reduction(self._checked(out, is_written=True), op)
        parts = self._matching(tensors, out, "tensors")
        options = self._options(dist.AllreduceOptions(), reduceOp=plan.native_op)

        def finish(work: list[Tensor]) -> None:
            plan.finish(work[1], work[0])
            mine = work[0].view(self._size, -1)[self._rank]
            overwrite(out.detach(), mine.view(out.shape))

        return Native(
            prepare=lambda: plan.prepare(torch.cat([flat_of(part) for part in parts])),
            start=lambda pg, work: pg.allreduce([work[1]], options),
            finish=finish,
        )

    def _all_to_all(self, call: Call) -> Native:
        outs, ins = call.tensors or (), call.more or ()
        like = self._checked(ins[0]) if len(ins) else torch.empty(0)
        self._matching(ins, like, "ins")
        self._matching(outs, like, "outs", is_written=True)
        options = self._options(dist.AllToAllOptions())

        def prepare() -> list[Tensor]:
            give = torch.cat([as_bytes(flat_of(tensor)) for tensor in ins])
            return [give, torch.empty_like(give)]

        def finish(work: list[Tensor]) -> None:
            for out, part in zip(outs, work[1].view(self._size, -1), strict=True):
                if out.numel():  # an empty part may be unaligned for ``view``
                    overwrite(out.detach(), part.view(out.dtype).view(out.shape))

        return Native(
            prepare=prepare,
            start=lambda pg, work: pg.alltoall_base(work[1], work[0], [], [], options),
            finish=finish,
        )

    def _reduction(self, like: Tensor, op: dist.ReduceOp) -> Reduction:
        return Reduction(like, op, self._size, self._runner.name)

    def _barrier(self, call: Call) -> Native:
        options = self._options(dist.BarrierOptions())
        return Native(
            prepare=list, start=lambda pg, _: pg.barrier(options), finish=lambda _: None
        )

    def _options(self, options: Any, **fields: Any) -> Any:
        for name, value in (("timeout", self._limit), *fields.items()):
            setattr(options, name, value)
        return options

    async def _run_native(self, call: Call, native: Native) -> None:
        """Agree on the operation, then prepare, start, await and finish it."""
        number = next(self._numbers)
        self._runner.unfinished.add(number)
        try:
            await self._run_numbered(number, call, native)
        except MemberLeftError:
            # The collective stays in ``unfinished``: others may wait for this member in
            # it, and must be notified if this member leaves.
            raise
        except Exception:
            self._runner.unfinished.discard(number)
            raise

    async def _run_numbered(self, number: int, call: Call, native: Native) -> None:
        size = size_of(call.tensor) * self._size
        await self._agree(call.operation(number))
        work = await offload(size, native.prepare)
        try:
            await self._runner.carry_out(
                number, lambda group: native.start(group, work)
            )
        except MemberLeftError as error:
            # Members that completed this collective would otherwise wait for this
            # member in the next one.
            self._lanes.end_next(error.rank)
            raise
        self._runner.unfinished.discard(number)  # this member has done its part
        await offload(size, native.finish, work)

    async def _agree(self, terms: Operation) -> None:
        mine = torch.tensor(terms)
        outs = [torch.empty_like(mine) for _ in range(self._size)]
        await self._lanes.run(Call(collectives.ALL_GATHER, mine, outs))
        for rank, theirs in enumerate(outs):
            if (called := Operation(*theirs.tolist())) != terms:
                raise TensorMismatchError(
                    f"rank {self._rank} called {terms}, rank {rank} called {called}; "
                    "all members must call the same collectives in the same order, "
                    "with equal dtypes and sizes"
                )


def _checked(
    tensor: Tensor, *, device: torch.device, is_written: bool = False
) -> Tensor:
    tensor = on_device(tensor, device, "a collective's tensor")
    if tensor.dtype not in CODES:
        raise TensorMismatchError(f"tensors of {tensor.dtype} cannot be sent")
    if is_written:
        require_receivable(tensor, "a collective's tensor")
    return tensor
