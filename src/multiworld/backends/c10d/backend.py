"""The ``c10d`` backend: Gloo, NCCL, or any backend registered with torch. Shell.

Host tensors, bundles and objects go point to point over our own data path (see
``WorldConfig.host_p2p``), which every c10d world has anyway. Before each collective the
members agree over it on what they are about to do: Gloo kills the process when two
members' sizes differ, and waits for ever when their operations do.

Gloo's collectives report through futures, so nobody waits in a thread; its sends and
receives can only be waited for, so each pending one has a thread.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup, ReduceOp

from multiworld.backends.base import Bundle, Meta, Received, WorldView
from multiworld.backends.c10d.flat import (
    as_bytes,
    flat_of,
    write_back,
    write_back_all,
)
from multiworld.backends.c10d.groups import Group, check_backend
from multiworld.backends.c10d.reducing import Reduction
from multiworld.backends.c10d.store import C10dStore
from multiworld.backends.c10d.threads import in_thread
from multiworld.backends.collectives import KINDS
from multiworld.backends.direct.backend import DirectBackend
from multiworld.backends.dtypes import CODES, DTYPES
from multiworld.backends.offload import offload, size_of
from multiworld.backends.reduction import OP_CODES, OP_NAMES, op_name
from multiworld.errors import (
    TensorMismatchError,
    UnsupportedOperationError,
)
from multiworld.lifecycle import Failed
from multiworld.rendezvous.blocking import BlockingValues
from multiworld.rendezvous.registry import key_prefix

__all__ = ["C10dBackend", "check_backend"]

HEADER_TAG_BASE = 1 << 62
"""Tags of our data path that announce messages of the backend's own."""

MAX_BACKEND_TAG = 2**31 - 1


class C10dBackend:
    """One world on a c10d group."""

    def __init__(self, view: WorldView, name: str) -> None:
        self._view, self._name = view, name
        self._rank, self._size = view.rank, view.incarnation.size
        self._loop = asyncio.get_running_loop()
        self._direct = DirectBackend(view)
        self._group: Group | None = None
        self._public: ProcessGroup | None = None
        self._waiting: set[asyncio.Future[Any]] = set()
        self._turn = asyncio.Lock()
        self._sending: dict[tuple[int, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._receiving: dict[tuple[int, int], asyncio.Lock] = defaultdict(asyncio.Lock)
        self._headers: dict[tuple[int, int], deque[Any]] = defaultdict(deque)
        self._limit = timedelta(seconds=view.config.operation_s)

    async def open(self) -> None:
        """Open our own lanes, then make the group.

        Cancellation: safe; the group's making is ended.
        """
        await self._direct.open()
        incarnation = self._view.incarnation
        prefix = key_prefix(incarnation.world, incarnation.epoch, incarnation.nonce)
        host = incarnation.members[self._rank].address.host
        limit_s = self._view.config.join_s
        values = await asyncio.to_thread(BlockingValues, self._view.store, limit_s)
        store = C10dStore(values, f"{prefix}{self._name}/", limit_s, self._record)
        self._group = group = Group(self._name, store)
        making = asyncio.ensure_future(
            in_thread(
                lambda: group.make(
                    self._rank, self._size, host, self._view.config.operation_s
                )
            )
        )
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            group.give_up()
            making.add_done_callback(lambda making: _drop_made(making, group))
            self._group = None
            raise
        except (RuntimeError, TimeoutError) as error:
            raise ConnectionError(f"{self._name} could not connect: {error}") from error

    def _record(self, key: str, value: bytes) -> None:
        if self._group is not None:
            self._group.record(key, value)

    # Point to point.

    def _is_ours(self, tensor: Tensor | None) -> bool:
        """Tell whether our own data path carries ``tensor``.

        A receive that gives no tensor takes what the world is for: host tensors on a
        host world, device tensors on a device world.
        """
        is_host_world = self._view.device.type == "cpu"
        if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
            return is_host_world  # where it gets a clear refusal
        if not is_host_world:
            return tensor is not None
        return self._view.config.host_p2p == "direct"

    async def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Send one tensor.

        Cancellation: on our own data path as there; the backend's own send cannot be
        withdrawn, so the world breaks.
        """
        if self._is_ours(tensor):
            await self._direct.send(tensor, dst, tag)
            return
        self._check_tag(tag)
        contiguous = self._on_device(tensor, "the tensor to send").contiguous()
        header = [CODES[contiguous.dtype], list(contiguous.shape)]
        async with self._sending[dst, tag]:
            await self._direct.send_object(header, dst, HEADER_TAG_BASE + tag)
            await self._wait_in_thread(
                lambda native: native.send([as_bytes(contiguous)], dst, tag)
            )

    async def recv(self, out: Tensor | None, src: int | None, tag: int) -> Received:
        """Receive one tensor.

        Cancellation: on our own data path as there; while the backend's own receive is
        under way it cannot be withdrawn, so the world breaks.
        """
        if self._is_ours(out):
            return await self._direct.recv(out, src, tag)
        self._check_tag(tag)
        if src is None:
            raise UnsupportedOperationError(
                f"{self._name} cannot receive from anybody: its own call never notices "
                "a lost member; name a source, or use host_p2p='direct'"
            )
        async with self._receiving[src, tag]:
            code, shape = await self._next_header(src, tag)
            target = self._target(out, src, code, shape)
            self._headers[src, tag].popleft()
            await self._wait_in_thread(
                lambda native: native.recv([as_bytes(target)], src, tag)
            )
        if out is not None and target is not out:
            out.copy_(target.view(out.shape))
        return Received(target if out is None else out, src)

    async def _next_header(self, src: int, tag: int) -> Any:
        headers = self._headers[src, tag]
        if not headers:
            headers.append(await self._direct.recv_object(src, HEADER_TAG_BASE + tag))
        return headers[0]

    def _target(
        self, out: Tensor | None, src: int, code: int, shape: list[int]
    ) -> Tensor:
        dtype = DTYPES[code]
        if out is None:
            return torch.empty(shape, dtype=dtype, device=self._view.device)
        self._on_device(out, "the tensor to receive into")
        count = 1
        for extent in shape:
            count *= extent
        if (out.dtype, out.numel()) != (dtype, count):
            raise TensorMismatchError(
                f"rank {src} sent {shape} of {dtype}, but the tensor to receive into "
                f"holds {out.numel()} of {out.dtype}; the message is still there: "
                "receive it with a tensor that fits, or with none"
            )
        return (
            out.detach()
            if out.is_contiguous()
            else torch.empty_like(out, memory_format=torch.contiguous_format)
        )

    def _check_tag(self, tag: int) -> None:
        if tag > MAX_BACKEND_TAG or (self._name == "nccl" and tag):
            limit = 0 if self._name == "nccl" else MAX_BACKEND_TAG
            raise UnsupportedOperationError(
                f"{self._name} carries tags up to {limit}, not {tag}"
            )

    def _on_device(self, tensor: Tensor, what: str) -> Tensor:
        wanted = self._view.device.type
        if not isinstance(tensor, Tensor):
            raise TensorMismatchError(
                f"{what} must be a torch.Tensor, not {type(tensor).__name__}"
            )
        if tensor.device.type != wanted or tensor.layout is not torch.strided:
            raise TensorMismatchError(
                f"{what} is {tensor.layout} on {tensor.device}; this world carries "
                f"dense tensors on {wanted!r}"
            )
        return tensor.detach()

    async def send_bundle(
        self, tensors: Mapping[str, Tensor], meta: Meta, dst: int, tag: int
    ) -> None:
        """Send several tensors over our own data path."""
        await self._direct.send_bundle(tensors, meta, dst, tag)

    async def recv_bundle(self, src: int | None, tag: int) -> Bundle:
        """Receive several tensors over our own data path."""
        return await self._direct.recv_bundle(src, tag)

    async def send_object(self, obj: Any, dst: int, tag: int) -> None:
        """Send plain data over our own data path."""
        await self._direct.send_object(obj, dst, tag)

    async def recv_object(self, src: int | None, tag: int) -> Any:
        """Receive plain data over our own data path."""
        return await self._direct.recv_object(src, tag)

    # Collectives.

    # Each is checked at once, and prepared, run and finished when it is its turn; what
    # copies much does so in a thread.

    async def broadcast(self, tensor: Tensor, src: int) -> None:
        """Copy ``tensor`` of ``src`` into everybody's."""
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
        """Reduce into everybody's ``tensor``."""
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
        """Reduce into ``tensor`` of ``dst``."""
        plan = Reduction(self._checked(tensor), op, self._size)
        options = self._options(dist.ReduceOptions())
        options.reduceOp, options.rootRank = plan.native_op, dst
        is_root = self._rank == dst

        def prepare() -> list[Tensor]:
            flat = flat_of(tensor)
            return plan.prepare(flat if is_root else flat.clone())  # Gloo scribbles

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
        """Put every member's tensor into ``outs``."""
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
        """Put every member's tensor into ``outs`` of ``dst``."""
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
        """Put ``tensors[rank]`` of ``src`` into ``out``."""
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
        """Reduce ``tensors[i]`` of all into ``out`` of member i.

        Over an all-reduce: Gloo's own cannot report that it is done.
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
        """Send ``ins[i]`` to member i."""
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
        """Wait until every member is here."""
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
        tensor = self._on_device(tensor, "a collective's tensor")
        if tensor.dtype not in CODES:
            raise TensorMismatchError(f"tensors of {tensor.dtype} cannot be sent")
        return tensor

    def _alike(
        self, tensors: Sequence[Tensor] | None, like: Tensor, what: str
    ) -> list[Tensor]:
        count = 0 if tensors is None else len(tensors)
        if tensors is None or count != self._size:
            raise TensorMismatchError(
                f"{what} holds {count} tensors; this world has {self._size} members, "
                "give one tensor for each"
            )
        checked = [self._checked(tensor) for tensor in tensors]
        for index, tensor in enumerate(checked):
            if (tensor.dtype, tensor.numel()) != (like.dtype, like.numel()):
                raise TensorMismatchError(
                    f"{what}[{index}] holds {tensor.numel()} of {tensor.dtype}, wanted "
                    f"are {like.numel()} of {like.dtype}"
                )
        return checked

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
        """Agree on the operation, then prepare, start, await and finish it."""
        op_code = 0 if op is None else OP_CODES[op_name(op)]
        terms = [KINDS.index(kind), CODES[like.dtype], like.numel(), root, op_code]
        size = size_of(like) * self._size
        try:
            async with self._turn:
                await self._agree(terms)
                work = await offload(size, prepare)
                await self._carry_out(lambda native: start(native, work))
                await offload(size, finish, work)
        except asyncio.CancelledError:
            reason = f"rank {self._rank} cancelled {kind} half way"
            self._view.report(Failed(reason))
            raise

    async def _agree(self, terms: list[int]) -> None:
        mine = torch.tensor(terms)
        outs = [torch.empty_like(mine) for _ in range(self._size)]
        await self._direct.all_gather(outs, mine)
        for rank, theirs in enumerate(outs):
            if theirs.tolist() != terms:
                raise TensorMismatchError(
                    f"rank {self._rank} is in {_say(terms)}, rank {rank} in "
                    f"{_say(theirs.tolist())}; all members must call the same "
                    "collectives in the same order, with equal dtypes and sizes"
                )

    async def _carry_out(self, start: Callable[[Any], Any]) -> None:
        native = self._native()
        try:
            work = start(native)
        except RuntimeError as error:
            await self._translate(error)
        if self._name == "nccl":
            await self._in_thread(lambda: _synchronize(work))
            return
        future: asyncio.Future[None] = self._loop.create_future()

        def done(completed: Any) -> None:
            try:
                completed.value()
            except RuntimeError as error:
                self._from_thread(future, error)
            else:
                self._from_thread(future, None)

        try:
            work.get_future().add_done_callback(done)
        except (NotImplementedError, RuntimeError):
            await self._in_thread(work.wait)  # this backend's works have no futures
            return
        await self._until(future)

    def _from_thread(
        self, future: asyncio.Future[None], error: Exception | None
    ) -> None:
        """Complete ``future`` from a thread of the backend's."""

        def complete() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(complete)
        except RuntimeError:
            pass  # the loop has ended; nobody waits any more

    async def _until(self, future: asyncio.Future[Any]) -> None:
        self._waiting.add(future)
        try:
            await future
        except RuntimeError as error:
            await self._translate(error)
        finally:
            self._waiting.discard(future)

    async def _translate(self, error: RuntimeError) -> None:
        """Turn torch's error into ours; for a lost connection, wait for the verdict."""
        text = str(error)
        if "scalar type" in text or "not supported" in text.lower():
            raise UnsupportedOperationError(
                f"{self._name} cannot do this: {text}; use backend='direct' for host "
                "tensors, or convert"
            ) from error
        self._view.trouble(None, text.partition(". This is typically")[0])
        await self._view.wait_over()
        raise self._view.broken_error() from error

    async def _wait_in_thread(self, start: Callable[[Any], Any]) -> None:
        native = self._native()
        try:
            work = start(native)
            await self._in_thread(lambda: _wait_for(work, self._name, self._limit))
        except asyncio.CancelledError:
            self._view.report(
                Failed(f"rank {self._rank} cancelled a {self._name} send or receive")
            )
            raise
        except RuntimeError as error:
            await self._translate(error)

    async def _in_thread(self, call: Callable[[], Any]) -> None:
        await self._until(asyncio.ensure_future(in_thread(call)))

    def _native(self) -> Any:
        if self._group is None or self._group.native is None:
            raise self._view.broken_error()
        return self._group.native

    # The rest.

    @property
    def process_group(self) -> ProcessGroup:
        """The c10d group, registered with torch at the first use."""
        if self._public is None:
            from multiworld.backends.c10d.registration import register

            native = self._native()
            assert self._group is not None
            self._public = register(
                native,
                self._group.store,
                self._rank,
                self._size,
                world=self._view.incarnation.world,
                device=self._view.device,
                name=self._name,
            )
        return self._public

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Take a message for our own data path."""
        self._direct.on_message(rank, message)

    def member_left(self, rank: int) -> None:
        """Fail what only this member could have completed."""
        self._direct.member_left(rank)

    def abort(self) -> None:
        """Fail everything, release the group's waiters and free all."""
        self._direct.abort()
        self._free()

    def begin_close(self) -> None:
        """Announce our end on our own data path."""
        self._direct.begin_close()

    async def close(self) -> None:
        """Wait until what was sent has left, then free all."""
        await self._direct.close()
        dropped = self._loop.create_future()
        if self._free(lambda: self._from_thread(dropped, None)):
            await dropped

    def close_nowait(self) -> None:
        """Free all at once."""
        self._direct.close_nowait()
        self._free()

    def _free(self, done: Callable[[], None] | None = None) -> bool:
        group, self._group = self._group, None
        public, self._public = self._public, None
        if group is None:
            return False
        if public is not None:
            from multiworld.backends.c10d.registration import unregister

            unregister(public)
            del public
        if self._waiting or done is None:
            group.cut()
        for future in list(self._waiting):
            if not future.done():
                _fail(future, self._view.broken_error())
        group.drop(done)
        return True

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""
        found = self._direct.filenos()
        return found if self._group is None else found + self._group.filenos()


def _say(terms: list[int]) -> str:
    kind, code, count, root, op = terms
    operation = f", {OP_NAMES[op]}" if op in OP_NAMES else ""
    dtype = str(DTYPES.get(code, code)).removeprefix("torch.")
    return f"{KINDS[kind]} of {count} {dtype}, root {root}{operation}"


def _drop_made(making: asyncio.Future[Any], group: Group) -> None:
    """Free a group whose making went on after its caller was cancelled."""
    if not making.cancelled():
        making.exception()
    group.drop()


def _wait_for(work: Any, name: str, limit: timedelta) -> None:
    _synchronize(work) if name == "nccl" else work.wait(limit)


def _synchronize(work: Any) -> None:
    work.wait()
    torch.cuda.current_stream().synchronize()


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if isinstance(future, asyncio.Task):
        future.cancel()
    else:
        future.set_exception(error)
