"""A whole service in the foreground: store, fork server, controller, admin."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import uvicorn

from multiworld.config import MIB
from multiworld.errors import ServeError, SpecError
from multiworld.net.rare_log import RareLog
from multiworld.net.security import Security
from multiworld.net.tcp import own_address
from multiworld.serve.controller.admin import is_done_before, make_admin
from multiworld.serve.controller.controller import Controller
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.record import Record, StateFolder, StoreRecord
from multiworld.serve.controller.fleet.state import ProcessPhase
from multiworld.serve.controller.keeper_supervisor import (
    KeeperSupervisor,
    port_of_keeper,
)
from multiworld.serve.controller.launchers.base import (
    Launcher,
    LauncherContext,
    began_at,
)
from multiworld.serve.controller.launchers.fork_server import WaitingServer
from multiworld.serve.controller.launchers.registry import maker_of
from multiworld.serve.controller.port import cannot_listen, check_free
from multiworld.serve.controller.startup import Startup, process_began
from multiworld.serve.controller.store_process import (
    check_secret,
    end_store,
    kill_store,
    start_store,
    store_answers,
)
from multiworld.serve.deadlines import STORE_CHECK_S, STORE_HUNG_AFTER_CHECKS
from multiworld.serve.engine.compute.matmul_speed import bfloat16_cost
from multiworld.serve.engine.models.factory import (
    build_model,
    check_policies,
    modules_of,
)
from multiworld.serve.gateway.http.embedded_server import EmbeddedServer
from multiworld.serve.gateway.http.tls_handshake import check_certificate
from multiworld.serve.gateway.process import allowed_connections, listen
from multiworld.serve.machines.amounts import Node
from multiworld.serve.machines.inventory import this_node
from multiworld.serve.spec.datatypes import example_of
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.tracing import tracer
from multiworld.serve.wire.process_args import world_config
from multiworld.world.manager import WorldManager

# Modules that the fork server imports for every service.
PRELOAD = [
    "torch",
    "multiworld.serve.controller.launchers.entry",
    "multiworld.serve.gateway.process",
]

OnProgress = Callable[[str], object]  # shows one line to people
OnUp = Callable[[Controller, Startup], None]  # called once the service is ready

# Kinds of events that are shown while a service starts.
PROGRESS = ("ready", "lost", "unplaced", "probe failed", "adopted")

logger = logging.getLogger("multiworld.serve")
rare_log = RareLog(logger)

ADMIN_LOOK_S = 0.02  # seconds between checks whether the admin server has started


async def run_service(
    app: AppSpec,
    folder: StateFolder,
    on_up: OnUp,
    on_progress: OnProgress = lambda text: None,
    waiting: WaitingServer | None = None,
    fetched_at: float | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal or ``multiworld shutdown``; return the exit code.

    ``waiting`` is a fork server for the first processes. ``fetched_at`` is the
    monotonic time at which the model was found or fetched; None: a spec was given.
    ``prepare`` is called once this controller has locked the folder.

    SIGHUP shuts the service down unless it is ignored, as with ``nohup``. Cancelling
    stops only the controller: the next one adopts the processes. If the service cannot
    start, its processes are stopped.
    """
    folder.make()
    folder.lock()
    held = folder.hold()
    try:
        prepare()
        shown = _suppressed(on_up), _suppressed(on_progress)
        return await _run(app, folder, *shown, waiting, fetched_at)
    finally:
        os.close(held)


def _suppressed(show: Callable[..., object]) -> Callable[..., None]:
    """Wrap ``show`` so that a full disk or a closed pipe is logged, not raised."""

    def call(*args: Any) -> None:
        try:
            show(*args)
        except (OSError, SystemExit) as error:
            # Rich raises SystemExit if the pipe is closed.
            logger.error("progress cannot be shown: %s", error)

    return call


async def _run(
    app: AppSpec,
    folder: StateFolder,
    on_up: OnUp,
    on_progress: OnProgress,
    waiting: WaitingServer | None,
    fetched_at: float | None,
) -> int:
    startup = Startup(process_began(), on_phase=on_progress)
    if fetched_at is not None:
        startup.end("to find the model, and fetch it if needed", fetched_at)
    startup.end("to import torch")
    old, ended = folder.load(), None
    if old is not None and not _may_live(old):
        old, ended = None, old
    allowed_connections(app.gateway.max_connections)
    check_certificate(app.gateway)
    if app.host == "auto":
        app = app.model_copy(update={"host": _host_of(old or ended) or own_address()})
    check_policies(app)
    maker_of(app.launcher)  # notices a wrong launcher name early
    preload = Preload(_preload(app), waiting)
    startup.end("to build the models")
    env = {
        "MULTIWORLD_SECRET": folder.secret(),
        "MULTIWORLD_SECRET_FILE": "",  # empty, so that the secret above is used
        "HF_HUB_OFFLINE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order in which GPUs are booked
    }
    security = Security.from_environment({**os.environ, **env})
    kept = old.store if old else _living_store(ended)
    if kept is not None:
        await check_secret(kept, security)
    reserved = _reserve(app, old or ended, port_of_keeper(folder.keeper))
    store = await start_store(folder, env, kept, app.host)
    holder: list[Controller] = []
    try:
        with reserved:
            startup.end("to start the store")
            up = partial(_say_up, startup, on_up)
            await _control(
                app,
                folder,
                up,
                preload,
                env,
                security,
                reserved,
                store,
                Before(old, ended),
                on_progress,
                holder,
            )
    except Exception:
        await _leave_store(folder, holder[0].store if holder else store)
        raise
    return 0


async def _leave_store(folder: StateFolder, store: StoreRecord) -> None:
    """Stop a store that no process uses, or record it for the next controller."""
    try:
        kept = folder.load()
        if kept is None:
            await end_store(store)
        elif kept.store != store:
            # ``store`` replaced a lost one that the record still names.
            folder.save(kept.model_copy(update={"store": store}))
    except (ServeError, OSError) as error:
        logger.error("the store may still occupy its port: %s", error)


def _may_live(record: Record) -> bool:
    """Return whether a record's processes may still run; on a cluster, always True."""
    if record.app.launcher != "local":
        return True
    return any(began_at(p.pid) == p.began for p in record.processes)


def _living_store(record: Record | None) -> StoreRecord | None:
    if record is None or record.store is None:
        return None
    store = record.store
    return store if began_at(store.pid) == store.began else None


def _host_of(record: Record | None) -> str:
    """Return the address that a service must keep; "" if it may change."""
    if record is None or not (_may_live(record) or _living_store(record)):
        return ""
    try:
        check_free(record.app.host, 0)
    except OSError:
        return ""  # this machine no longer has that address
    return record.app.host


class Before(NamedTuple):
    """The previous controller's record; at most one of the two fields is set."""

    old: Record | None  # a record whose processes may still run
    ended: Record | None  # a record of which no process is left


class Preload(NamedTuple):
    """Modules of all processes, and a fork server that has not imported them yet."""

    modules: list[str]
    waiting: WaitingServer | None


def _say_progress(
    fleet: Reconciler, on_progress: OnProgress, entry: HistoryEntry
) -> None:
    if entry.kind not in PROGRESS:
        return
    ready = sum(p.phase is ProcessPhase.READY for p in fleet.processes.values())
    desired = fleet.desired
    wanted = desired.gateways + sum(
        count for model in desired.models.values() for count in model.replicas
    )
    said = entry.text if entry.kind == "ready" else f"{entry.kind}: {entry.text}"
    count = max(wanted, len(fleet.processes))
    on_progress(f"{ready} of {count} processes are ready: {said}")


def _say_up(startup: Startup, on_up: OnUp, controller: Controller) -> None:
    controller.history.on_event = lambda entry: None
    startup.end_ready(controller.fleet.processes.values())
    controller.history.say("up", f"everything is ready after {startup}")
    on_up(controller, startup)


async def _control(
    app: AppSpec,
    folder: StateFolder,
    on_up: Callable[[Controller], None],
    preload: Preload,
    env: dict[str, str],
    security: Security,
    reserved: socket.socket,
    store: StoreRecord,
    before: Before,
    on_progress: OnProgress,
    holder: list[Controller],  # gets the controller
) -> None:
    old, port = before.old, reserved.getsockname()[1]
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not ended.is_set():
            on_progress(
                "shutting down: requests and streams in progress are completed first"
            )
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, end)
    config = world_config(app.silence_s)
    async with WorldManager(config=config, security=security) as manager:
        launcher = await _launcher(
            app, folder, preload, env, holder, is_new=old is None
        )
        controller = Controller(
            folder, app, manager, launcher, store, port, old, ended=before.ended
        )
        holder.append(controller)
        say = partial(_say_progress, controller.fleet, on_progress)
        controller.history.on_event = say
        admin = _admin(controller, folder, ended)
        serving = loop.create_task(admin.serve())
        minders: list[asyncio.Task[None]] = []
        keeper = KeeperSupervisor(
            folder, reserved, controller.history, lambda: controller.app
        )
        if app.gateway.keeper and not app.gateway.is_kept:
            logger.warning(
                "gateways with gateway.tls_certificate have no stream keeper: streams "
                "are lost with their gateway; terminate TLS at a proxy in front instead"
            )
        try:
            await _serves(admin, serving)
            is_prepared = await _is_prepared(controller, old, ended)
            if is_prepared:
                controller.start(old)
                # Not earlier, because ``start`` may refuse the spec: then the record
                # must not change.
                minding = _mind_store(controller, folder, env, security)
                minders.append(loop.create_task(minding))
            # Not earlier, because a keeper that already runs gets this controller's
            # listener at once.
            if app.gateway.is_kept and (is_prepared or old is not None):
                minders.append(loop.create_task(keeper.run()))
                await asyncio.sleep(0)  # it reaches a keeper that runs already
            if is_prepared:
                await _until_ended(controller, ended, on_up)
                old = None
            keeper.ending()
            await controller.shutdown(old)
            await keeper.end()
        finally:
            admin.end()
            for task in minders:
                task.cancel()
            await asyncio.gather(serving, *minders, return_exceptions=True)
            await controller.abandon()
            await launcher.close()


async def _serves(admin: EmbeddedServer, serving: asyncio.Task[None]) -> None:
    """Wait until the admin interface serves."""
    while not admin.started:
        await asyncio.wait({serving}, timeout=ADMIN_LOOK_S)
        if serving.done():
            error = serving.exception()
            raise ServeError(
                f"the admin interface did not start: {error or 'it exited'}"
            )


async def _mind_store(
    controller: Controller, folder: StateFolder, env: dict[str, str], security: Security
) -> None:
    """Restart a lost or hung store at its address; ready worlds do not need it."""
    missed = 0
    while True:
        await asyncio.sleep(STORE_CHECK_S)
        missed = 0 if await store_answers(controller.store, security) else missed + 1
        if missed >= STORE_HUNG_AFTER_CHECKS:
            missed = 0
            controller.store_trouble = "the store hangs and is replaced"
            logger.error(
                "the store (process %d) does not answer; it is replaced",
                controller.store.pid,
            )
            kill_store(controller.store)
        try:
            store = await start_store(
                folder, env, controller.store, controller.app.host
            )
        except (ServeError, OSError) as error:
            controller.store_trouble = str(error)
            rare_log.error("the store is lost and cannot be replaced", error)
            continue
        if store != controller.store:
            controller.store_restarted(store)


async def _is_prepared(
    controller: Controller, old: Record | None, ended: asyncio.Event
) -> bool:
    """Wait until the service can start; return False if it is shut down first."""
    return await is_done_before(ended, controller.prepare(old))


async def _until_ended(
    controller: Controller, ended: asyncio.Event, on_up: Callable[[Controller], None]
) -> None:
    try:
        is_up = await is_done_before(ended, controller.wait_ready())
    except ServeError:
        await controller.shutdown()
        raise
    if is_up:
        on_up(controller)
    await ended.wait()


async def _launcher(
    app: AppSpec,
    folder: StateFolder,
    preload: Preload,
    env: dict[str, str],
    holder: list[Controller],
    *,
    is_new: bool,
) -> Launcher:
    """Return the spec's launcher, whose callbacks find the controller in ``holder``."""

    def exited(name: str, code: int | None) -> None:
        holder[0].exited(name, code)

    def nodes_changed() -> None:
        if holder:
            holder[0].nodes_changed()

    context = LauncherContext(
        app=app,
        preload=preload.modules,
        waiting=preload.waiting,
        env=env,
        logs=folder.logs,
        node=await asyncio.to_thread(measured_machine_of, app),
        on_exit=exited,
        on_nodes=nodes_changed,
        is_new=is_new,
    )
    return await maker_of(app.launcher)(context)


def measured_machine_of(app: AppSpec) -> Node:
    machine = app.machine
    limit = None if machine.memory_mb is None else int(machine.memory_mb * MIB)
    found = this_node(machine.name, machine.cpus, limit)
    return dataclasses.replace(found, bfloat16=bfloat16_cost())


def _preload(app: AppSpec) -> list[str]:
    """Return the modules for the fork server; build each model to find mistakes."""
    modules = [*PRELOAD, *tracer.modules(os.environ)]
    for name, spec in app.models.items():
        try:
            model = build_model(spec)
            if model.generation is None:
                example_of(model)
            for note in model.notes:
                logger.warning("model %s: %s", name, note)
        except SpecError as error:
            raise SpecError(f"models.{name}: {error}") from error
        modules += [m for m in modules_of(spec, model) if m not in modules]
    return modules


def _reserve(app: AppSpec, old: Record | None, held: int) -> socket.socket:
    """Bind the gateways' port, so that it stays reserved while no gateway runs.

    ``held``: port of the stream keeper of an earlier controller.
    """
    port = app.gateway.port or held or (old.port if old else 0)
    try:
        # The earlier service's gateways may still run and hold the port.
        is_ours = held == port or (
            old is not None
            and old.port == port
            and any(began_at(p.pid) == p.began for p in old.processes if not p.model)
        )
        if port and not is_ours:
            try:
                check_free(app.gateway.host, port)
            except OSError:
                if app.gateway.port:
                    raise
                port = 0  # another service has taken the earlier port, so use any
        return listen(app.gateway, port)
    except OSError as error:
        raise cannot_listen(app.gateway.host, port, error) from error


def _admin(
    controller: Controller, folder: StateFolder, ended: asyncio.Event
) -> EmbeddedServer:
    folder.socket.unlink(missing_ok=True)
    config = uvicorn.Config(
        make_admin(controller, ended),
        uds=str(folder.socket),
        log_config=None,
        access_log=False,
        lifespan="off",
    )
    return EmbeddedServer(config)
