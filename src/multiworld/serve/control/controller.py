"""The controller of a service: carries out what ``fleet.Fleet`` decides. Shell."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import signal
import time
from typing import Any

from multiworld.errors import (
    LaunchError,
    MemberLostError,
    PlacementError,
    UnknownModelError,
)
from multiworld.serve.control.adoption import adopted
from multiworld.serve.control.process_links import REPORT_S, ProcessLinks
from multiworld.serve.control.status import (
    exit_words,
    is_ready,
    last_words,
    models_order,
    record_of,
    records_of,
    status_of,
    url_of,
)
from multiworld.serve.control.tenant_manager import TenantManager
from multiworld.serve.fleet import actions, events
from multiworld.serve.fleet.decision_log import DecisionLog
from multiworld.serve.fleet.desired_state import (
    check_update,
    desired_state_of,
    rescaled,
    stage_number,
    with_new_versions_started,
)
from multiworld.serve.fleet.history import History
from multiworld.serve.fleet.reconciler import Reconciler
from multiworld.serve.fleet.record import Record, StateFolder, StoreRecord
from multiworld.serve.fleet.state import DesiredState, Process, ProcessPhase
from multiworld.serve.launchers.base import Launcher, RunningProcess
from multiworld.serve.models.factory import check_policies, import_factory
from multiworld.serve.placement.manager import PlacementManager
from multiworld.serve.placement.replica_bookings import Specs
from multiworld.serve.resources.amounts import Need, needs_of
from multiworld.serve.resources.assignment import assign
from multiworld.serve.scaling.autoscaler import Autoscaler
from multiworld.serve.spec.schema import AppSpec, ModelSpec
from multiworld.serve.tenants.database import TenantDatabase
from multiworld.serve.transport.process_args import args_of
from multiworld.serve.transport.protocol import (
    Applied,
    Cut,
    Finish,
    FleetReport,
    Loaded,
    ModelNeeded,
    News,
    Order,
    Outgrown,
    PoisonFound,
    Probed,
    ProbeReplica,
    Reports,
    TableChanged,
    UsageTold,
)
from multiworld.world.manager import WorldManager

logger = logging.getLogger("multiworld.serve")

TICK_S = 0.25
REPORT_TICKS = 20
END_S = 10.0


class Controller:
    """One service.

    Args:
        folder: Its state.
        app: What is wanted.
        store: Where its processes meet.
        port: Of the gateways.
        old: The record of an earlier controller.
    """

    def __init__(
        self,
        folder: StateFolder,
        app: AppSpec,
        manager: WorldManager,
        launcher: Launcher,
        store: StoreRecord,
        port: int,
        old: Record | None = None,
    ) -> None:
        self.app, self.port, self.store = app, port, store
        self._folder, self._launcher = folder, launcher
        self.fleet = Reconciler(
            ready_s=app.ready_s,
            drain_s=app.drain_s,
            first=1 if old is None else old.next_number,
            number=0 if old is None else old.number,
            active=None if old is None else old.active,
        )
        self._specs = {} if old is None else {n: dict(v) for n, v in old.specs.items()}
        self._running: dict[str, RunningProcess] = {}
        self._links = ProcessLinks(manager, app.app, store.address, app.silence_s, self)
        self._launching: set[asyncio.Task[None]] = set()
        self.history = History()
        self.journal = DecisionLog(folder.path / "decisions.jsonl")
        policy = import_factory(app.placement) if app.placement else assign
        self.placer = PlacementManager(
            launcher, self.fleet, self.history, self, policy, self.journal
        )
        self.places = self.placer.places
        self.scaler = Autoscaler(self.fleet, self.history, self.journal, self)
        registry = TenantDatabase(folder.path / "registry.db")
        if old is None:
            registry.forget_meters()
        self.tenanting = TenantManager(
            registry, self.history, self._joined_gateways, self._links.send
        )
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._is_started = self._is_ending = False
        self._in_launch: set[str] = set()

    # Starting and ending.

    def start(self, old: Record | None) -> None:
        """Adopt what runs, and start what is missing.

        Raises:
            PlacementError: A new service has no place on the machines there are.
        """
        self._is_started = True
        adopted = [] if old is None else self._adopt(old)
        self._launcher.settle()
        wanted = desired_state_of(self.app, None if old is None else old.replicas)
        if old is not None:
            for name, versions in old.specs.items():
                for version, spec in versions.items():
                    if name in wanted.models and version != wanted.models[name].version:
                        self._remember_want(name, spec)
        self._set_specs()
        if old is None:
            self.placer.admit(wanted)
        for process in adopted:
            self._handle(events.Adopted(process))
            self._links.open(process.name)
        self._want(wanted)
        self.placer.start()
        self.scaler.start()
        self._ticker = self._loop.create_task(self._tick())

    def _remember_want(self, name: str, spec: ModelSpec) -> None:
        """Tell the fleet how a version is that is not wanted any more but runs."""
        old_app = AppSpec(app=self.app.app, models={name: spec})
        self.fleet.remember(name, desired_state_of(old_app).models[name])

    def _adopt(self, old: Record) -> list[Process]:
        found = []
        for said, running, process in adopted(
            old.processes, self._specs, self._launcher
        ):
            self._running[said.name] = running
            if said.model:
                self.placer.restore(said)
            found.append(process)
            self._say("adopted", f"{said.name} (process {said.pid}) goes on", said.name)
        return found

    def _set_specs(self) -> None:
        for name, model in self.app.models.items():
            self._specs.setdefault(name, {})[model.version] = model

    async def _tick(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(TICK_S)
            self._handle(events.Ticked())
            self.placer.check_memory()
            if number % REPORT_TICKS == 0:
                self._spawn(self._launching, self._spread_reports())

    async def _spread_reports(self) -> None:
        """Tell the gateways what every replica says of itself, for their metrics."""
        reports = await self.reports()
        order = FleetReport(dict(self.history.kinds), reports.workers)
        for name in self._joined_gateways():
            self._links.send(name, order)

    async def wait_ready(self) -> None:
        """Wait until everything that is wanted is ready.

        Cancellation: safe.
        """
        while not self.is_ready:
            self._changed.clear()
            await self._changed.wait()

    @property
    def is_ready(self) -> bool:
        """Whether everything that is wanted is ready."""
        return is_ready(self.fleet)

    async def shutdown(self) -> None:
        """End the whole service: gateways first, so that what was accepted is answered.

        Cancellation: what runs goes on; a new controller adopts it.
        """
        self._is_ending = True
        await self.scaler.close()
        if self._ticker is not None:
            self._ticker.cancel()
        await self._wait_launched()
        everybody = list(self.fleet.processes.values())
        gateways = [p.name for p in everybody if p.is_gateway]
        workers = [p.name for p in everybody if not p.is_gateway]
        await self._end_all(gateways, self.app.gateway.shutdown_s)
        await self._end_all(workers, END_S)
        await self.abandon()
        self._launcher.kill(
            RunningProcess("store", self.store.pid, self.store.began), signal.SIGTERM
        )
        self._folder.forget()

    async def _wait_launched(self) -> None:
        """Wait for what is being started: it could not be ended before."""
        if self._launching:
            await asyncio.wait(self._launching, timeout=END_S)

    async def _end_all(self, names: list[str], limit_s: float) -> None:
        for name in names:
            if name in self._running:
                self._launcher.kill(self._running[name], signal.SIGTERM)
                self._launcher.kill(self._running[name], signal.SIGCONT)
        try:
            async with asyncio.timeout(limit_s):
                while any(name in self._running for name in names):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            for name in names:
                if name in self._running:
                    self._launcher.kill(self._running.pop(name))

    def _joined_gateways(self) -> list[str]:
        return [name for name in self._links.names if _is_gateway(name)]

    async def abandon(self) -> None:
        """End the controller only; the service goes on."""
        self._is_ending = True
        await self.scaler.close()
        await self.placer.close()
        await self._links.close_all()
        tasks = list(self._launching)
        if self._ticker is not None:
            tasks.append(self._ticker)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.tenanting.close()

    def store_restarted(self, store: StoreRecord) -> None:
        """Take note of a new process at the store's old address."""
        self.store = store
        self._say("store", f"the store was lost; it is back, as process {store.pid}")
        self._save()

    # What people ask.

    def scale(self, model: str, stage: str, replicas: int) -> int:
        """Have a stage run in so many replicas; return how many there were.

        Raises:
            UnknownModelError: There is no such model or stage.
            ServeError: The spec's range does not allow it.
            PlacementError: No machine has room for so many.
        """
        spec = self._running_spec(model)
        number = stage_number(spec, model, stage)
        before, wanted = rescaled(self.fleet.desired, spec, model, number, replicas)
        if replicas > before:
            self.placer.admit(wanted)
        self._say("scale", f"{model}/{number}: from {before} to {replicas}")
        self._want(wanted)
        return before

    def _running_spec(self, model: str) -> ModelSpec:
        """Return the spec of the version that is wanted; after a roll-back, the old."""
        wanted = self.fleet.desired.models.get(model)
        if wanted is None:
            known = ", ".join(self.fleet.desired.models)
            raise UnknownModelError(f"no model {model!r}; there are: {known}")
        return self._specs[model][wanted.version]

    def update(self, app: AppSpec) -> None:
        """Have the service be as another spec says, without a pause.

        Raises:
            ServeError: It changes what cannot be changed while it runs.
            PlacementError: There is no room for it beside what runs.
        """
        if app.host == "auto":
            app = app.model_copy(update={"host": self.app.host})
        check_update(self.app, app, self._specs)
        counts = {n: list(m.replicas) for n, m in self.fleet.desired.models.items()}
        check_policies(app)
        wanted = with_new_versions_started(
            desired_state_of(app, counts), self.fleet.desired
        )
        before, self.app = self.app, app
        specs = {name: dict(versions) for name, versions in self._specs.items()}
        self._set_specs()
        try:
            self.placer.admit(wanted)
        except PlacementError as error:
            self.app, self._specs = before, specs
            raise PlacementError(
                f"{error}; a model that is updated runs in both versions until the new "
                "one is ready",
                short=error.short,
            ) from None
        for name in self._joined_gateways():
            self._links.send(name, models_order(self._specs))
        self._want(wanted)

    def drain(self, name: str) -> None:
        """Take one replica out; its replacement is started.

        Raises:
            UnknownModelError: There is no such process.
        """
        if name not in self.fleet.processes:
            known = ", ".join(sorted(self.fleet.processes))
            raise UnknownModelError(f"no process {name!r}; there are: {known}")
        self._handle(events.DrainRequested(name))

    def harm(
        self, action: str, model: str, stage: str, seconds: float
    ) -> RunningProcess:
        """Break a ready replica on purpose.

        Args:
            action: "kill", "stop" or "cut".
            seconds: How long it is cut.

        Raises:
            UnknownModelError: There is no such stage.
            ServeError: No replica of it is ready.
        """
        number = stage_number(self._running_spec(model), model, stage)
        name = random.choice(self.fleet.ready_at(model, number))
        running = self._running[name]
        self._say("chaos", f"{action} {name} (process {running.pid})", name)
        if action == "cut":
            self._links.send(name, Cut(seconds))
        else:
            number = signal.SIGKILL if action == "kill" else signal.SIGSTOP
            self._launcher.kill(running, number)
        return running

    def status(self) -> dict[str, Any]:
        """Return what runs, and what is wanted."""
        return {
            "app": self.app.app,
            "url": self.url,
            "store": self.store.address,
            "launcher": self.app.launcher,
            "authentication": self.app.gateway.authentication,
            "trouble": self._launcher.trouble(),
            **status_of(
                self.fleet, self._running, self.places, self.log_of, time.monotonic()
            ),
        }

    @property
    def url(self) -> str:
        """Where clients find the gateways."""
        return url_of(self.app.gateway, self.port)

    async def reports(self, limit_s: float = REPORT_S) -> Reports:
        """Ask every process for a report; leave out those that do not answer in time.

        Cancellation: safe.
        """
        return await self._links.reports(limit_s)

    def log_of(self, name: str) -> Any:
        """Return where the output of a process goes."""
        return self._folder.logs / f"{name.replace('/', '-')}.log"

    # Carrying out.

    def exited(self, name: str, code: int | None) -> None:
        """Take note that a process has ended."""
        self._running.pop(name, None)
        self.places.ledger.release(name)
        why = "it ended" if code is None else f"it ended with {exit_words(code)}"
        self._changed.set()
        process = self.fleet.processes.get(name)
        if process is not None and process.phase in (
            ProcessPhase.LAUNCHING,
            ProcessPhase.JOINED,
        ):
            why += f" while it started; its last words: {last_words(self.log_of(name))}"
        if process is not None and not self._is_ending:
            self._handle(events.ProcessGone(name, why))
        elif code:
            self._say("exited", f"{name}: {why}", name)  # its loss has been told

    def _handle(self, event: events.Event) -> None:
        if self._is_ending or not self._is_started:
            return
        for action in self.fleet.handle(event, time.monotonic()):
            self._carry_out(action)
        self._changed.set()
        if not isinstance(event, events.Adopted):
            self._save()  # not while a part of what runs is not adopted yet

    def _carry_out(self, action: actions.Action) -> None:
        match action:
            case actions.Launch(name, model, version, stage):
                launching = self._launch(name, model, version, stage)
                self._spawn(self._launching, launching)
            case actions.Kill(name):
                self._forget(name)
            case actions.Probe(name, gateway):
                self._links.send(gateway, ProbeReplica(name))
            case actions.Finish(name):
                self._links.send(name, Finish())
            case actions.Announce(table):
                order = TableChanged(table)
                for name in self._links.names:
                    self._links.send(name, order)
            case actions.LogEvent(kind, text, name):
                self._say(kind, text, name)

    def _spawn(self, tasks: set[asyncio.Task[None]], body: Any) -> None:
        task = self._loop.create_task(body)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _say(self, kind: str, text: str, name: str = "") -> None:
        self.history.say(kind, text, name)

    def nodes_changed(self) -> None:
        """Take note of machines that were added, or are gone; or of trouble."""
        self.placer.nodes_changed()

    async def plan_first(self) -> None:
        """Plan for a service that is not started yet.

        Cancellation: safe.
        """
        self._set_specs()
        await self.placer.plan_first(desired_state_of(self.app))

    def _want(self, wanted: DesiredState) -> None:
        self._handle(events.DesiredStateChanged(wanted))
        self.placer.wake()

    # What the placer and the scaler ask for; see ``PlacerOwner``, ``ScalerOwner``.

    def admit(self, wanted: DesiredState, model: str) -> None:
        """Check that all of a model has a place, whatever others lack.

        Raises:
            PlacementError: It has not.
        """
        self.placer.admit(wanted, model)

    def want(self, wanted: DesiredState) -> None:
        """Have the service be so."""
        self._want(wanted)

    def happened(self, event: events.Event) -> None:
        """Take note of something that the placer has found out."""
        self._handle(event)

    def running(self, name: str) -> RunningProcess | None:
        """Return a process, if it runs."""
        return self._running.get(name)

    @property
    def specs(self) -> Specs:
        """Every version that is known, by model and version."""
        return self._specs

    def _forget(self, name: str) -> None:
        running = self._running.pop(name, None)
        if running is not None:
            self._launcher.kill(running)  # its place is free when it has ended
        elif name not in self._in_launch:
            self.places.ledger.release(name)
        self._links.close(name)

    async def _launch(self, name: str, model: str, version: str, stage: int) -> None:
        spec = self._specs[model][version] if model else None
        spot, need = None, Need()
        if spec is not None:
            if name not in self.fleet.processes:
                return  # it is not wanted any more
            try:
                if trouble := self._launcher.trouble():
                    raise PlacementError(trouble)
                need = needs_of(spec)[stage]
                spot, why = self.places.take(name, (model, version, stage), need)
                if len(self.places.ledger.nodes) > 1:
                    self._say("placed", f"{name} on {spot.node}: {why}", name)
            except PlacementError as error:
                self._handle(events.Unplaced(name, str(error)))
                return
        args = args_of(self.app, self.store.address, self.port, name).model_copy(
            update={
                "model": model,
                "stage": stage,
                "spec": spec,
                "gpu": None if spot is None else spot.gpu,
                "alive": str(self._folder.alive),
            }
        )
        self._links.open(name)
        self._in_launch.add(name)
        try:
            running = await self._launcher.launch(
                name, args, self.log_of(name), spot, need
            )
        except LaunchError as error:
            self.places.ledger.release(name)
            why = f"it could not be started: {error}"
            if trouble := self._launcher.trouble():
                self._links.close(name)
                self._handle(events.Unplaced(name, trouble))
            else:
                self._handle(events.ProcessGone(name, why))
            return
        finally:
            self._in_launch.discard(name)
        if name in self.fleet.processes:
            self._running[name] = running
            self._save()
        else:
            self._launcher.kill(running)

    # What the links tell; see ``LinkOwner``.

    def greeting(self, name: str) -> list[Order]:
        """Return the first orders of a process that has joined."""
        table = TableChanged(self.fleet.table)
        if not _is_gateway(name):
            return [table]
        return [models_order(self._specs), *self.tenanting.greeting(), table]

    def joined(self, name: str) -> None:
        """Take note that a process has joined."""
        self._handle(events.Joined(name))

    def news(self, name: str, news: News) -> None:
        """Handle what a process tells."""
        match news:
            case Loaded():
                self._handle(events.Loaded(name))
            case Applied(number):
                self._handle(events.Applied(name, number))
            case UsageTold():
                self.tenanting.used(name, news)
            case PoisonFound():
                self.tenanting.poisonous(name, news)
            case ModelNeeded(model):
                self.scaler.wake(model)
            case Outgrown(used, limit):
                self.placer.outgrown(name, used, limit)
            case Probed(replica, error):
                self._handle(events.Probed(replica, error))

    def lost(self, name: str, error: MemberLostError) -> None:
        """Take note that a process is lost."""
        self._handle(events.ProcessGone(name, f"{error.reason} ({error.evidence})"))

    def _forget_specs(self) -> None:
        """Forget the versions that are not wanted and of which nothing runs."""
        runs = {(p.model, p.version) for p in self.fleet.processes.values()}
        runs |= {(name, model.version) for name, model in self.app.models.items()}
        runs |= set(self.fleet.active.items())
        runs |= {(n, m.version) for n, m in self.fleet.desired.models.items()}
        self._specs = {
            name: {v: spec for v, spec in versions.items() if (name, v) in runs}
            for name, versions in self._specs.items()
        }

    def _save(self) -> None:
        self._forget_specs()
        processes = records_of(self.fleet, self._running, self.places)
        fleet, store = self.fleet, self.store
        record = record_of(self.app, self._specs, fleet, store, self.port, processes)
        if record == self._saved:
            return
        try:
            self._folder.save(record)
            self._saved = record
        except OSError as error:  # the next change, or tick, tries again
            logger.error("the record cannot be written: %s", error)

    _saved: Record | None = None


def _is_gateway(name: str) -> bool:
    return name.startswith("gateway/")
