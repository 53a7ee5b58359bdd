"""Process of a replica: its worker and its connection to the controller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import psutil
import torch

from multiworld.config import MIB
from multiworld.errors import MultiWorldError, SpecError
from multiworld.serve.deadlines import HUNG_S
from multiworld.serve.engine.compute.hardware_fingerprint import fingerprint
from multiworld.serve.engine.compute.layer_code import DIGEST, can_run
from multiworld.serve.engine.external.registry import maker_of
from multiworld.serve.engine.external.whole_model import settings_of
from multiworld.serve.engine.models.bfloat16_products import instructions
from multiworld.serve.engine.models.factory import (
    build_model,
    changed_since,
    folder_of,
    stage_name,
)
from multiworld.serve.engine.models.identity import refusal
from multiworld.serve.machines.amounts import Need, mib, needs_of
from multiworld.serve.machines.usage import UsageReader, family_of, memory_above
from multiworld.serve.replica.batches.executor import Executor
from multiworld.serve.replica.batches.rank_group import (
    LEADER,
    RankGroup,
    follow,
    join_group,
)
from multiworld.serve.replica.batches.worker import Worker, WorkerLimits
from multiworld.serve.replica.scheduling.scheduler import Scheduler
from multiworld.serve.replica.sequences.engine import Engine
from multiworld.serve.replica.sequences.generation_worker import GenerationWorker
from multiworld.serve.replica.sequences.recovery import ReplicaSettings
from multiworld.serve.replica.whole_engines.engine_worker import EngineWorker
from multiworld.serve.spec.schema import GenerationSpec, ModelSpec
from multiworld.serve.spec.stage import Model, StageContext
from multiworld.serve.text.limits import limits_of, prefix_bytes_of
from multiworld.serve.tracing.stage_trace import StageTrace
from multiworld.serve.tracing.tracer import tracer_of
from multiworld.serve.wire import control_messages as messages
from multiworld.serve.wire.control_agent import ControlAgent
from multiworld.serve.wire.edges import Edges
from multiworld.serve.wire.process_args import ProcessArgs
from multiworld.serve.wire.routing_table import edges_of
from multiworld.world.manager import WorldManager
from multiworld.world.world import World

logger = logging.getLogger("multiworld.serve")

LAST_S = 0.5  # maximum seconds to send the last report to the controller
IDLE_S = 0.1  # seconds without work after which a finishing worker exits
LOOK_S = 1.0  # seconds between checks whether a controller or a gateway exists
SEND_S = 5.0  # maximum seconds to send the remaining messages of an exiting worker
MEMORY_LOOK_S = 0.1  # seconds between checks of the memory in use
TELL_S = 0.5  # seconds between the report that memory was exceeded and the exit
OUTGROWN = 99  # exit code of a process that used more memory than it booked


class _Parts(NamedTuple):
    """Loader of the stage, owner of the edges, and factory of ``StageLoaded``."""

    runner: Executor | GenerationWorker | EngineWorker
    worker: Worker | GenerationWorker | EngineWorker
    loaded: Callable[[str], messages.StageLoaded]


def compute_s_of(spec: ModelSpec, stage: int) -> float | None:
    """Return the maximum seconds of a batch; None: the deadlines limit it."""
    # An embedding engine needs a limit, because one that hangs may still answer its
    # health route.
    return spec.stages[stage].compute_s or (2 * HUNG_S if spec.engine else None)


def _parts_of(args: ProcessArgs, clock: Callable[[], float]) -> _Parts:
    assert args.spec is not None
    model = build_model(args.spec)
    if args.spec.engine is not None and model.generation is not None:
        facts, make = model.generation, maker_of(args.spec.engine)
        settings = settings_of(args.name, args.spec, facts, args.device, args.gpus)
        engine = EngineWorker(make, settings, clock)
        return _Parts(
            engine,
            engine,
            lambda _: messages.StageLoaded("", facts.weights(), noise=engine.noise),
        )
    if args.spec.generation is not None and model.generation is not None:
        return _generation_of(args, args.spec, args.spec.generation, model, clock)
    limits = args.spec.stages[args.stage]
    name = stage_name(args.spec, model, args.stage)
    runner = Executor(model.stages[args.stage], name, limits.threads)
    last = len(args.spec.stages) - 1
    following = args.spec.stages[min(args.stage + 1, last)]
    worker = Worker(
        args.name,
        args.stage,
        args.stage == last,
        runner,
        WorkerLimits(
            max_batch_size=limits.max_batch_size,
            max_wait_s=limits.max_wait_ms / 1000,
            max_ongoing_requests=following.max_ongoing_requests,
            own_ongoing_requests=limits.max_ongoing_requests,
            compute_s=compute_s_of(args.spec, args.stage),
        ),
    )
    return _Parts(runner, worker, lambda _: messages.StageLoaded())


def _generation_of(
    args: ProcessArgs,
    spec: ModelSpec,
    generation: GenerationSpec,
    model: Model,
    clock: Callable[[], float],
) -> _Parts:
    assert model.generation is not None
    facts, limits = model.generation, spec.stages[args.stage]
    is_last = args.stage == len(spec.stages) - 1
    settings = ReplicaSettings(
        name=args.name,
        stage=args.stage,
        stage_name=stage_name(spec, model, args.stage),
        is_last=is_last,
        log_bytes=int(generation.backup_memory_mb * MIB),
        prefix_bytes=prefix_bytes_of(generation),
        overdue_s=2 * (limits.compute_s or HUNG_S),
    )
    engine_limits = limits_of(generation, facts, len(model.stages))
    engine = Engine(
        model.stages[args.stage],
        is_last,
        limits.threads,
        facts,
        limits.compute_s,
        generation.deterministic,
        clock,
        engine_limits.blocks * engine_limits.block_size,
    )
    scheduler = Scheduler(engine_limits)
    worker = GenerationWorker(settings, engine, scheduler, clock)

    def loaded(device: str) -> messages.StageLoaded:
        is_fixed = generation.deterministic
        has_own = is_fixed and device == "cpu" and facts.dtype in ("", "float32")
        # Name the code in the fingerprint, because other code may compute other bits.
        more = [f"layers {DIGEST}"] if has_own and can_run() else []
        if is_fixed and device == "cpu" and facts.dtype == "bfloat16":
            more.append(f"products {instructions()}")
        kind = [fingerprint(limits.threads, device, *more)] if is_fixed else []
        kind += [facts.dtype] if facts.dtype else []
        return messages.StageLoaded(", ".join(kind), facts.weights())

    return _Parts(worker, worker, loaded)


class WorkerProcess:
    def __init__(
        self,
        args: ProcessArgs,
        manager: WorldManager,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock, self._usage = clock, UsageReader(os.getpid(), clock)
        assert args.spec is not None
        self._args = args
        self._runner, self._worker, self._loaded = _parts_of(args, clock)
        config = args.config()
        self._agent = ControlAgent(
            manager, args.app, args.name, args.store, config, self._obey
        )
        self._manager = manager
        self._tracer = tracer_of(
            os.environ,
            args.app,
            args.name,
            {"multiworld.role": "replica", "multiworld.model": args.model},
        )
        if self._tracer is not None:
            stage = args.spec.stages[args.stage].name or str(args.stage)
            self._worker.trace = StageTrace(
                args.name, f"{args.model}/{stage}", self._tracer.export
            )
        self._edges = Edges(manager, args.store, config, self._worker)
        self._is_finishing = asyncio.Event()

    async def run(self) -> None:
        """Work until stopped or orphaned; if cancelled, work is lost."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._is_finishing.set)
        tasks = [
            loop.create_task(body())
            for body in (
                self._agent.run,
                self._load,
                self._worker.look,
                self._exit_if_orphaned,
                self._monitor_memory,
            )
        ]
        ending = loop.create_task(self._finish())
        computing = tasks[1]
        try:
            pending = {*tasks, ending}
            while not ending.done():
                done, pending = await asyncio.wait(
                    pending, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        except Exception:
            is_of_work = computing.done() and not computing.cancelled()
            is_of_work = is_of_work and computing.exception() is not None
            if not is_of_work or self._worker.is_idle:
                raise
            # Exit at once: after a clean shutdown, gateways would not suspect the
            # requests that were running.
            logger.exception("%s failed while computing", self._args.name)
            os._exit(1)
        finally:
            self._agent.send(messages.Report(0, worker=self._report()))
            await self._agent.flush(LAST_S)
            for task in (*tasks, ending):
                task.cancel()
            await asyncio.gather(*tasks, ending, return_exceptions=True)
            await self._edges.close()
            self._runner.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)

    async def _load(self) -> None:
        assert self._args.spec is not None
        device = self._args.device
        began = self._clock()
        ranks = self._args.spec.stages[self._args.stage].ranks
        group = None
        if ranks > 1:
            config = self._args.config()
            world = await join_group(
                self._manager, self._args.name, LEADER, ranks, self._args.store, config
            )
            group = RankGroup(world)
            self._guard = asyncio.get_running_loop().create_task(_exit_with(world))
        # An external engine's memory cannot be limited through torch.
        if self._args.spec.engine is None:
            limit_gpu(device, needs_of(self._args.spec)[self._args.stage])
        spec = self._args.spec
        folder = await asyncio.to_thread(folder_of, spec)
        await self._runner.load(
            StageContext(device=device, group=group, gpus=self._args.gpus)
        )
        logger.info("the stage was loaded in %.3f s", self._clock() - began)
        if await asyncio.to_thread(folder_of, spec) != folder:
            changed = await asyncio.to_thread(changed_since, spec)
            raise SpecError(refusal(changed or str(folder)))
        loaded = await asyncio.to_thread(self._loaded, device)
        if spec.identity is not None:
            is_copy = folder is not None and folder == spec.identity.kept
            changed = await asyncio.to_thread(changed_since, spec) if is_copy else ""
            loaded = msgspec.structs.replace(
                loaded, identity=spec.identity.name, changed=changed
            )
        self._agent.fact(loaded)
        await self._worker.run()

    async def _obey(self, order: messages.Order) -> None:
        match order:
            case messages.TableChanged(table):
                self._worker.table_changed(table)
                self._edges.apply(edges_of(table, self._args.name))
                self._agent.fact(messages.TableApplied(table.number))
            case messages.Finish():
                self._is_finishing.set()
            case messages.ReportRequest(number):
                self._agent.send(messages.Report(number, worker=self._report()))
            case messages.InjectPartition(seconds):
                cut(seconds)
            case messages.InjectHang():
                os.kill(os.getpid(), signal.SIGSTOP)

    def _report(self) -> messages.WorkerReport:
        used = self._usage.read()
        return msgspec.structs.replace(
            self._worker.report(),
            cpu_s=used.cpu_s,
            machine_busy=psutil.cpu_percent() / 100,
            memory_bytes=used.memory_bytes,
            gpu_memory_bytes=gpu_memory_of(self._args.device),
        )

    async def _exit_if_orphaned(self) -> None:
        """Finish after ``orphan_s`` with neither a controller nor a gateway."""
        alone_since: float | None = None
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._clock()
            if self._agent.lost_at is None or self._worker.has_gateway:
                alone_since = None
            else:
                alone_since = alone_since or now
                if now - alone_since > self._args.orphan_s:
                    logger.warning("no controller and no gateway: this worker exits")
                    self._is_finishing.set()

    async def _monitor_memory(self) -> None:
        """Report and exit if this process uses more memory than it booked."""
        assert self._args.spec is not None
        limit = memory_limit(self._args)
        used = await outgrown(limit)
        self._agent.send(messages.MemoryExceeded(used, limit))
        # Meanwhile, the controller kills this process if it can.
        await asyncio.sleep(TELL_S)
        os._exit(OUTGROWN)

    async def _finish(self) -> None:
        await self._is_finishing.wait()
        idle_since: float | None = None
        while idle_since is None or self._clock() - idle_since < IDLE_S:
            await asyncio.sleep(IDLE_S / 4)
            if not self._worker.is_idle:
                idle_since = None
            elif idle_since is None:
                idle_since = self._clock()
        try:
            async with asyncio.timeout(SEND_S):
                await self._worker.wait_sent()
        except TimeoutError:
            pass  # the peer does not read; it will see this process as lost


def memory_limit(args: ProcessArgs) -> int:
    """Return the bytes that this process and its forks may use; 0: no limit."""
    assert args.spec is not None
    need = needs_of(args.spec)[args.stage]
    return need.memory_bytes if args.rank is None else need.memory_bytes // need.ranks


async def outgrown(limit: int) -> int:
    """Wait until this process uses more than ``limit`` bytes; return the bytes used.

    If ``limit`` is 0, wait forever.
    """
    if not limit:
        await asyncio.get_running_loop().create_future()
    while True:
        await asyncio.sleep(MEMORY_LOOK_S)
        used = memory_above(os.getpid(), limit)
        if used:
            logger.error(
                "memory limit exceeded: %s used, %s booked; this process exits",
                mib(used),
                mib(limit),
            )
            return used


async def _exit_if_outgrown(limit: int) -> None:
    await outgrown(limit)
    os._exit(OUTGROWN)


def limit_gpu(device: str, need: Need) -> None:
    """Limit torch's GPU memory in this process to what the replica books."""
    if not device.startswith("cuda") or not need.gpu_memory_bytes:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    share = need.gpu_memory_bytes / need.ranks / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def gpu_memory_of(device: str) -> int:
    """Return the bytes of GPU memory that torch has reserved; 0 without a GPU."""
    if not device.startswith("cuda"):
        return 0
    return torch.cuda.memory_reserved(device)


def cut(seconds: float) -> None:
    """Simulate a network partition: no reads, writes or heartbeats for ``seconds``."""
    # Block the event loop on purpose, and stop the heartbeat helper.
    helpers = family_of(os.getpid())[1:]
    # Let a separate process resume the helper: this process is usually killed first,
    # and a helper that stayed stopped would not notice that, and would never exit.
    waking = f"sleep {seconds}; kill -CONT {' '.join(map(str, helpers))}"
    subprocess.Popen(
        ["sh", "-c", waking],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for pid in helpers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)


async def _exit_with(world: World) -> None:
    """Exit when the world of the replica's ranks breaks: all ranks fail together."""
    await world.wait_over()
    if world.is_broken:
        logger.error("a rank of this replica was lost: %r", world)
        os._exit(1)


async def run_follower(args: ProcessArgs, rank: int) -> int:
    """Run a rank other than the leader; return the exit code of its process."""
    assert args.spec is not None
    limits = args.spec.stages[args.stage]
    model = build_model(args.spec)
    name = stage_name(args.spec, model, args.stage)
    runner = Executor(model.stages[args.stage], name, limits.threads)
    # A forked rank needs no limit, because its memory counts as its leader's. A rank in
    # a separate actor has a limit of its own.
    limit = 0 if args.rank is None else memory_limit(args)
    guard = asyncio.get_running_loop().create_task(_exit_if_outgrown(limit))
    try:
        async with WorldManager(config=args.config()) as manager:
            world = await join_group(
                manager, args.name, rank, limits.ranks, args.store, args.config()
            )
            await follow(world, runner, args.device)
    except MultiWorldError as error:
        logger.error("rank %d exits: %s", rank, error)
        return 1
    finally:
        guard.cancel()
    return 0


async def run_worker(args: ProcessArgs) -> int:
    try:
        async with WorldManager(config=args.config()) as manager:
            await WorkerProcess(args, manager).run()
    except MultiWorldError as error:
        logger.error("%s", error)
        return 1
    return 0
