"""The controller of a service: carries out what the ``Reconciler`` decides."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from multiworld.errors import (
    LaunchError,
    MemberLostError,
    ServeError,
    StaleEpochError,
)
from multiworld.liveness.pause_detector import PauseDetector
from multiworld.net.rare_log import RareLog
from multiworld.serve.controller import status
from multiworld.serve.controller.adoption import (
    adopt,
    first_state,
    remember_old_versions,
)
from multiworld.serve.controller.answers import StatusAnswer
from multiworld.serve.controller.fleet import actions, events
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.desired_state import (
    check_update,
    desired_state_of,
    with_new_versions_started,
)
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.record import (
    Record,
    RecordWriter,
    StateFolder,
    StoreRecord,
    sizes_before,
)
from multiworld.serve.controller.fleet.start_order import starts_at_once
from multiworld.serve.controller.fleet.state import STARTING, Process, ProcessPhase
from multiworld.serve.controller.fleet_metrics import FleetMetrics
from multiworld.serve.controller.identities import Identities, find_changes
from multiworld.serve.controller.launchers.base import Launcher, RunningProcess
from multiworld.serve.controller.observe.facts import Facts
from multiworld.serve.controller.observe.observer import Observer
from multiworld.serve.controller.observe.operation_trace import OperationTrace
from multiworld.serve.controller.observe.troubles import SATURATED, TroubleLog
from multiworld.serve.controller.operations import Operations
from multiworld.serve.controller.placement.manager import PlacementManager
from multiworld.serve.controller.placement.replica_placement import Specs
from multiworld.serve.controller.preparation import (
    await_machines,
    await_measurements,
)
from multiworld.serve.controller.process_lifecycle import ProcessLifecycle
from multiworld.serve.controller.process_links import ProcessLinks
from multiworld.serve.controller.processes import Processes
from multiworld.serve.controller.reconciliation import Reconciliation
from multiworld.serve.controller.scaling.autoscaler import Autoscaler
from multiworld.serve.controller.tenant_manager import TenantManager
from multiworld.serve.controller.versions import CurrentSpec, Versions
from multiworld.serve.deadlines import HUNG_S
from multiworld.serve.engine.models.factory import (
    import_factory,
)
from multiworld.serve.engine.models.identity import refusal
from multiworld.serve.machines.assignment import assign
from multiworld.serve.machines.neighbours import Neighbours
from multiworld.serve.machines.usage import disk_of
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.tenants.registry import open_registry
from multiworld.serve.tracing.tracer import tracer_of
from multiworld.serve.wire import control_messages as messages
from multiworld.serve.wire.process_args import ProcessArgs, args_of
from multiworld.world.manager import WorldManager

logger = logging.getLogger("multiworld.serve")
rare_log = RareLog(logger)

TICK_S = 0.25  # seconds between checks of deadlines and of memory
# For this many seconds after a request for facts, reports include streams.
WATCHED_S = 10.0
COLLECT_TICKS = 8  # ticks between collections of the counts of all processes
# Maximum seconds for which the confirmation of an operation waits until the record is
# on disk.
RECORDED_S = 5.0
# At shutdown, seconds for a gateway to report its usage after its last answer.
LAST_USAGE_S = 3.0
END_S = 10.0  # maximum seconds for workers to exit on shutdown
OPERATIONS_SHOWN = 10  # number of operations that ``status`` shows


class Controller:
    """The controller of one service.

    ``old`` is the record of an earlier controller whose processes may still run.
    ``ended`` is the record of an earlier controller without running processes: this
    controller continues its numbers and sizes, and otherwise starts the service afresh.
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
        clock: Callable[[], float] = time.monotonic,
        ended: Record | None = None,
    ) -> None:
        self.port, self.store = port, store
        self._ended, last = ended, old or ended
        self.store_trouble = ""
        self._folder, self._launcher, self._clock = folder, launcher, clock
        self.fleet = Reconciler(
            ready_s=app.ready_s,
            drain_s=app.drain_s,
            first=max(folder.next_number(), 1 if last is None else last.next_number),
            number=0 if last is None else last.number,
            active=None if old is None else old.active,
            starts_at_once=starts_at_once(launcher.nodes()),
        )
        self._current = CurrentSpec(app)
        self._versions = Versions(None if old is None else old.specs)
        self._identities = Identities(self._versions.specs, folder.versions)
        self._reconciliation = Reconciliation(
            self.fleet, clock, self._carry_out, self._handled
        )
        self._links = ProcessLinks(
            manager, app.app, store.address, app.silence_s, self, self._stalled_s
        )
        self.history = History()
        self.journal = DecisionLog(folder.path / "decisions.jsonl")
        policy = import_factory(app.placement) if app.placement else assign
        self.placement = PlacementManager(
            launcher,
            self.fleet,
            self.history,
            self.journal,
            policy,
            self._versions.specs,
            self._reconciliation.happened,
        )
        self.bookings = self.placement.bookings
        self.processes = Processes(launcher, self.bookings.ledger, folder.logs)
        self._lifecycle = ProcessLifecycle(
            self.fleet,
            self._reconciliation,
            self._versions,
            self.processes,
            self._links,
            launcher,
            self.bookings,
            self.history,
            self._args_of,
            self.recorded,
            self._save,
            folder.keeper.parent,
        )
        self.operations = Operations(
            self._current,
            self.fleet,
            self._reconciliation,
            self._versions,
            self.placement,
            self.processes,
            self._links,
            self.history,
        )
        self.scaler = Autoscaler(
            self.fleet,
            self.history,
            self.journal,
            self._versions.specs,
            self._links.reports,
            self.placement.admit,
            self._reconciliation.want,
        )
        registry = open_registry(folder.path)
        if old is None:
            try:
                registry.forget_meters()
            except ServeError as error:
                # The disk may be full. Keeping the old meters is harmless: ids of
                # meters are random, so no new gateway continues an old meter.
                logger.warning("%s", error)
        self.tenanting = TenantManager(
            registry, self.history, lambda: self._links.gateways, self._links.send
        )
        self.observer = Observer(self.history, self.journal, clock)
        self._watched_until = 0.0
        self._neighbours, self._neighbour = Neighbours(clock), ""
        self._trouble_log = TroubleLog()
        self._disk = 0, 0  # free and total bytes; zeros: unknown
        self._measuring = asyncio.Lock()  # a disk that hangs blocks at most one thread
        self._metrics = FleetMetrics(
            self._look,
            self.fleet.processes,
            self.history,
            lambda: self.observer.paces,
            lambda: self.fleet.unplaced,
        )
        self._tracer = tracer_of(
            os.environ, app.app, "controller", {"multiworld.role": "controller"}
        )
        self._trace = None
        if self._tracer is not None:
            self._trace = OperationTrace(
                self._tracer, self.fleet.processes, self._stage_name, clock
            )
        self._reporting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._pauses = PauseDetector(TICK_S)
        self._loop = asyncio.get_running_loop()
        self._may_give_up = old is None
        self._failure: LaunchError | None = None
        self._record = RecordWriter(folder.save, rare_log)

    @property
    def app(self) -> AppSpec:
        """The spec that the service follows now."""
        return self._current.app

    @property
    def dtypes(self) -> dict[str, str]:
        """The reason for the dtype of each model."""
        return self._current.dtypes

    # Start and shutdown.

    async def prepare(self, old: Record | None) -> None:
        """Wait until the service can start; raise PlacementError if it never can."""
        if old is None:
            await self._await_machines()
        await await_measurements(self.app, self._launcher)
        resolved = self.operations.resolve(self.app)
        self._current.follow(resolved.app, resolved.why)
        specs = self._versions.specs
        used = {(name, version) for name in specs for version in specs[name]}
        app = self.app
        found = await self._identities.identify(app, used)
        if self.app is app:  # no update came meanwhile
            self._current.app = found
        if old is not None:
            for name, path in (await find_changes(self.app)).items():
                self.history.say("changed", f"{name}: {refusal(path)}")
            return
        # ``resolve`` may have chosen float32, which takes more memory.
        await self._await_machines()
        self._versions.add(self.app)
        await self.placement.plan_first(desired_state_of(self.app))

    async def _await_machines(self) -> None:
        await await_machines(lambda: self.app, self.bookings, self.history, self._clock)

    def start(self, old: Record | None) -> None:
        adopted = [] if old is None else self._adopt(old)
        if old is not None and adopted:
            # The record holds the old spec as JSON, which has fewer types than YAML.
            # Convert the new spec to JSON and back, so that only real changes count.
            app = AppSpec.model_validate_json(self.app.model_dump_json())
            check_update(old.app, app, old.specs)
        self._reconciliation.is_started = True
        self.fleet.starts_at_once = starts_at_once(self._launcher.nodes())
        self._launcher.settle()
        self._versions.add(self.app)
        if old is None:
            desired = first_state(self.app, self._ended, self.placement)
        else:
            desired = with_new_versions_started(
                desired_state_of(self.app, sizes_before(old, self.app)), old.active
            )
            remember_old_versions(old, desired, self.app, self.fleet)
        for process in adopted:
            self._reconciliation.happened(events.Adopted(process))
            self._links.open(process.name)
        self._reconciliation.want(desired)
        self.placement.replanner.start()
        self.scaler.start()
        self._ticker = self._loop.create_task(self._tick())

    def _adopt(self, old: Record) -> list[Process]:
        return adopt(
            old,
            self.processes,
            self._versions.specs,
            self.placement,
            self.history,
            self._clock(),
        )

    async def identify(self, app: AppSpec) -> AppSpec:
        """Add each version's identity; raise SpecError if a file cannot be read."""
        # Versions that run or are desired keep their identity: their files are not read
        # again.
        return await self._identities.identify(app, self._used_versions())

    async def _tick(self) -> None:
        now = self._clock()
        for number in itertools.count():
            await asyncio.sleep(TICK_S)
            before, now = now, self._clock()
            if self._pauses.look(now):
                self._reconciliation.happened(events.Paused(now - before - TICK_S))
                # Read the messages that arrived during the pause before checking any
                # deadline.
                continue
            self._reconciliation.happened(events.Ticked())
            self.placement.check_memory(self.processes.running)
            if number % COLLECT_TICKS == 0:
                self._report(self._collect())

    def _report(self, body: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(body)
        self._reporting.add(task)
        task.add_done_callback(self._reporting.discard)

    async def _collect(self) -> None:
        """Collect the counts of all processes, so that few are lost with a process."""
        reports = await self._metrics.collect()
        self._metrics.keep_tenants(self.tenanting.tenants)
        posts = {
            p.name: (p.model, p.version, p.stage)
            for p in self.fleet.processes.values()
            if p.phase is ProcessPhase.READY
        }
        loading = [
            p.name
            for p in self.fleet.processes.values()
            if p.model and p.phase in STARTING
        ]
        adopted = {
            p.name
            for p in self.fleet.processes.values()
            if ProcessPhase.LAUNCHING not in p.entered
        }
        sums = self._metrics.sums()
        self.observer.seen(reports, sums, posts, loading, adopted)
        busy = (report.machine_busy for report in reports.workers.values())
        if max(busy, default=0.0) >= SATURATED:
            own = {os.getpid(), *(p.pid for p in self.processes.running.values())}
            # Reading thousands of processes takes long.
            self._neighbour = await asyncio.to_thread(self._neighbours.most, own)
        else:
            self._neighbour = ""
        if not self._measuring.locked():
            async with self._measuring:
                self._disk = await asyncio.to_thread(disk_of, self._folder.path)
        for text in self._trouble_log.seen(self._facts(), self._clock()):
            self.history.say("trouble", text)

    async def _look(self, limit_s: float) -> messages.Reports:
        is_watched = self._clock() < self._watched_until
        return await self._links.reports(
            limit_s, has_counts=True, has_streams=is_watched
        )

    def facts(self) -> Facts:
        """Return all facts of the service, for display to operators."""
        self._watched_until = self._clock() + WATCHED_S
        return self._facts()

    def _facts(self) -> Facts:
        nodes = status.nodes_of(self.bookings.ledger)
        return self.observer.facts(
            self.status(),
            nodes,
            self.history.handed_over,
            self.tenanting.budgets(),
            self._disk,
            self._neighbour,
        )

    async def _report_fleet(self, name: str, number: int) -> None:
        self._links.send(name, await self._metrics.report(name, number))

    async def wait_ready(self) -> None:
        """Wait until ready; raise ``LaunchError`` if a first start keeps failing."""
        while not self.is_ready:
            if self._failure is not None:
                raise self._failure
            self._changed.clear()
            await self._changed.wait()
        self._may_give_up = False

    @property
    def is_ready(self) -> bool:
        return not self._reconciliation.is_ending and status.is_ready(self.fleet)

    async def shutdown(self, old: Record | None = None) -> None:
        """Shut down, gateways first; if cancelled, a new controller adopts the rest."""
        # ``old``: record of the previous controller, if its processes are not adopted
        # yet.
        self._reconciliation.is_ending = True
        await self.scaler.close()
        if self._ticker is not None:
            self._ticker.cancel()
        # A launch in progress has no process to stop yet, so wait until it is finished.
        if launching := self._lifecycle.launching:
            await asyncio.wait(launching, timeout=END_S)
        # Stop the gateways before the workers, so that they can still answer the
        # requests that they have accepted.
        left = [] if old is None else self._adopt(old)
        everybody = [*self.fleet.processes.values(), *left]
        gateways = [p.name for p in everybody if p.is_gateway]
        workers = [p.name for p in everybody if not p.is_gateway]
        gateways_s = self.app.gateway.shutdown_s + LAST_USAGE_S
        await self.processes.end_all(gateways, gateways_s)
        await self.processes.end_all(workers, END_S)
        await self.abandon()
        store = RunningProcess("store", self.store.pid, self.store.began)
        self._launcher.kill(store, signal.SIGTERM)
        self._folder.forget()

    async def abandon(self) -> None:
        """Shut down the controller only; the service keeps running."""
        self._reconciliation.is_ending = True
        await self.scaler.close()
        await self.placement.replanner.close()
        await self._links.close_all()
        tasks = [*self._lifecycle.launching, *self._reporting]
        if self._ticker is not None:
            tasks.append(self._ticker)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.tenanting.close()
        await self._record.settled(END_S)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def store_restarted(self, store: StoreRecord) -> None:
        self.store, self.store_trouble = store, ""
        text = f"the store was lost and restarted as process {store.pid}"
        self.history.say("store", text)
        self._save()

    # Status.

    def status(self) -> StatusAnswer:
        ending = "it is shutting down" if self._reconciliation.is_ending else ""
        troubles = (
            ending,
            self._launcher.trouble(),
            self.store_trouble,
            self._record.trouble,
        )
        sources = status.StatusSources(
            app=self.app,
            url=self.url,
            store=self.store.address,
            trouble="; ".join(filter(None, troubles)),
            operations=self.history.operations(OPERATIONS_SHOWN),
            dtypes=self.dtypes,
            identities=self._versions.identities(),
            is_ready=self.is_ready,
            fleet=self.fleet,
            running=self.processes.running,
            bookings=self.bookings,
            log_of=self.processes.log_of,
            stage_name=self._stage_name,
            now=self._clock(),
        )
        return status.status_of(sources)

    def _stage_name(self, process: Process) -> str:
        if process.is_gateway:
            return ""
        return self._versions.stage_name(process.model, process.version, process.stage)

    @property
    def url(self) -> str:
        return status.url_of(self.app.gateway, self.port)

    @property
    def specs(self) -> Specs:
        return self._versions.specs

    async def reports(self) -> messages.Reports:
        return await self._links.reports()

    # Reconciling.

    def _handled(self, event: events.Event, found: Sequence[actions.Action]) -> None:
        """Record what an event has changed."""
        if isinstance(event, events.DesiredStateChanged):
            self.placement.replanner.wake()
        self._changed.set()
        if isinstance(event, events.Applied) and not found:
            return  # ``applied`` is not in the record: nothing to save
        # Do not save during an adoption: the record would lack the processes that are
        # not adopted yet.
        if not isinstance(event, events.Adopted):
            self._save()

    def _carry_out(self, action: actions.Action) -> None:
        match action:
            case actions.Launch(name, model, version, stage):
                self._lifecycle.launch(name, model, version, stage)
            case actions.Kill(name):
                self._lifecycle.kill(name)
            case actions.Probe(name, gateway, limit_s):
                self._links.send(gateway, messages.ProbeReplica(name, limit_s))
            case actions.Finish(name):
                self._links.send(name, messages.Finish())
            case actions.Announce(table):
                self._links.announce(messages.TableChanged(table))
            case actions.LogEvent(kind, text, name):
                self.history.say(kind, text, name)
                if self._trace is not None:
                    self._trace.happened(kind, text, name)
            case actions.GiveUp():
                self._give_up(action)

    def _give_up(self, action: actions.GiveUp) -> None:
        """Fail the service's first start with the cause of a stage's failures."""
        if not self._may_give_up or self._failure is not None:
            return
        version = self.app.models[action.model].version
        name = self._versions.stage_name(action.model, version, action.stage)
        self._failure = LaunchError(
            f"stage {name} of model {action.model!r} failed {action.failures} times in "
            f"the same way while starting: {action.cause}; logs are in "
            f"{self._folder.logs}"
        )
        self._changed.set()

    def _stalled_s(self) -> float:
        """Return the maximum seconds to hold the GIL: twice the longest batch limit."""
        # Also those of old versions, which may still run.
        specs = [of for each in self._versions.specs.values() for of in each.values()]
        specs += self.app.models.values()
        stages = (stage for model in specs for stage in model.stages)
        longest_s = max((stage.compute_s or 0.0 for stage in stages), default=0.0)
        return 2 * max(HUNG_S, longest_s)

    def _args_of(self, name: str, model: str) -> ProcessArgs:
        update = {"alive": str(self._folder.alive)}
        if not model and self.app.gateway.is_kept:
            update["keeper"] = str(self._folder.keeper)
        args = args_of(self.app, self.store.address, self.port, name)
        return args.model_copy(update=update)

    # News from the launcher.

    def exited(self, name: str, code: int | None) -> None:
        self._lifecycle.exited(name, code)

    def nodes_changed(self) -> None:
        self.placement.nodes_changed()

    # News from the links; see ``ProcessLinkOwner``.

    def greeting(self, name: str) -> list[messages.Order]:
        table = messages.TableChanged(self.fleet.table)
        if name not in self._links.gateways:
            return [table]
        # Omit rolled-back versions: their factories may crash the gateway.
        used = self._used_versions()
        specs = {
            model: {v: spec for v, spec in versions.items() if (model, v) in used}
            for model, versions in self._versions.specs.items()
        }
        return [status.models_order(specs), *self.tenanting.greeting(), table]

    def lost(self, name: str, error: MemberLostError) -> None:
        self._lifecycle.lost(name, error)

    def unheard(self, name: str, error: StaleEpochError) -> None:
        self._lifecycle.unheard(name, error)

    def joined(self, name: str) -> None:
        self._reconciliation.happened(events.Joined(name))

    def news(self, name: str, news: messages.News) -> None:
        match news:
            case messages.StageLoaded():
                self._loaded(name, news)
            case messages.TableApplied(number):
                self._reconciliation.happened(events.Applied(name, number))
            case messages.UsageReport():
                self.tenanting.used(name, news)
            case messages.PoisonFound():
                self.tenanting.poisonous(name, news)
            case messages.ModelNeeded(model):
                self._reconciliation.happened(events.ModelNeeded(model))
                self.scaler.wake(model)
            case messages.MemoryExceeded(used, limit):
                self.placement.outgrown(name, used, limit)
            case messages.ProbeResult(replica, error):
                self._reconciliation.happened(events.Probed(replica, error))
            case messages.FleetReportRequest(number):
                self._report(self._report_fleet(name, number))
            case messages.Report():
                self._metrics.heard(name, news)

    def _loaded(self, name: str, news: messages.StageLoaded) -> None:
        process = self.fleet.processes.get(name)
        if process is not None and process.model:
            spec = self._versions.specs.get(process.model, {}).get(process.version)
            wanted = "" if spec is None or spec.identity is None else spec.identity.name
            found = news.identity
            if found and wanted and found != wanted:
                why = (
                    f"its files have hash {found[:12]}, but its version was made from "
                    f"files with hash {wanted[:12]}"
                )
                self._reconciliation.happened(events.ProcessGone(name, why))
                return
            if news.changed:
                text = f"{name} loaded a copy of the old files: {refusal(news.changed)}"
                self.history.say("changed", text, name)
        loaded = events.Loaded(name, news.fingerprint, news.weights, news.noise)
        self._reconciliation.happened(loaded)

    # The record.

    async def recorded(self) -> None:
        """Wait until the latest change is on disk, but at most ``RECORDED_S``."""
        await self._record.settled(RECORDED_S)

    async def confirmed(self) -> None:
        """Wait for the record; raise ServeError if it could not be written."""
        await self.recorded()
        if self._record.trouble:
            raise ServeError(
                "the operation was applied, but not recorded, so a new controller will "
                "not know of it: "
                f"{self._record.trouble}"
            )

    def _save(self) -> None:
        fleet = self.fleet
        given = {(name, model.version) for name, model in self.app.models.items()}
        self._versions.keep_only(given | self._used_versions())
        record = status.record_of(
            self.app,
            self._versions.specs,
            fleet,
            self.store,
            self.port,
            self.processes.running,
            self.bookings.ledger,
        )
        self._record.keep(record)

    def _used_versions(self) -> set[tuple[str, str]]:
        fleet = self.fleet
        used = {(p.model, p.version) for p in fleet.processes.values()}
        used |= {(n, model.version) for n, model in fleet.desired.models.items()}
        return used | set(fleet.active.items())
