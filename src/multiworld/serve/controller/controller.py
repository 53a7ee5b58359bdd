"""The controller of a service: carries out what the ``Reconciler`` decides."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from multiworld.errors import (
    LaunchError,
    MemberLostError,
    PlacementError,
    ServeError,
    SpecError,
    StaleEpochError,
)
from multiworld.liveness.pause_detector import PauseDetector
from multiworld.net.rare_log import RareLog
from multiworld.net.threads import in_thread
from multiworld.serve.controller import status
from multiworld.serve.controller.answers import StatusAnswer
from multiworld.serve.controller.deadlines import EXIT_S, REPORT_S
from multiworld.serve.controller.dtypes import Resolved, resolve
from multiworld.serve.controller.fleet import actions, events
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.desired_state import (
    Sizes,
    check_update,
    desired_state_of,
    with_new_versions_started,
)
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.record import (
    Record,
    RecordKeeper,
    StateFolder,
    StoreRecord,
    sizes_before,
)
from multiworld.serve.controller.fleet.start_order import starts_at_once
from multiworld.serve.controller.fleet.state import DesiredState, Process, ProcessPhase
from multiworld.serve.controller.fleet_metrics import FleetMetrics
from multiworld.serve.controller.launchers.base import Launcher, RunningProcess
from multiworld.serve.controller.observe.facts import Facts
from multiworld.serve.controller.observe.observer import Observer
from multiworld.serve.controller.observe.operation_trace import OperationTrace
from multiworld.serve.controller.operations import Operations
from multiworld.serve.controller.placement.manager import PlacementManager
from multiworld.serve.controller.placement.replica_bookings import Specs, asks_of
from multiworld.serve.controller.process_links import ProcessLinks
from multiworld.serve.controller.processes import Processes, end_words
from multiworld.serve.controller.scaling.autoscaler import Autoscaler
from multiworld.serve.controller.tenant_manager import TenantManager
from multiworld.serve.controller.versions import Versions
from multiworld.serve.engine.models.factory import (
    changed_since,
    identified,
    import_factory,
)
from multiworld.serve.engine.models.identity import forget_copies, refusal
from multiworld.serve.machines.amounts import Location, Need, needs_of
from multiworld.serve.machines.assignment import assign
from multiworld.serve.machines.usage import MemoryKills
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.tenants.registry import open_registry
from multiworld.serve.tracing.tracer import tracer_of
from multiworld.serve.wire import control_messages as messages
from multiworld.serve.wire.deadlines import HUNG_S
from multiworld.serve.wire.process_args import args_of
from multiworld.world.manager import WorldManager

logger = logging.getLogger("multiworld.serve")
rare_log = RareLog(logger)

TICK_S = 0.25  # seconds between checks of deadlines and of memory
FACTS_S = 10.0  # maximum wait for a cluster's machines to report their bfloat16 speed
WATCHED_S = 10.0  # after somebody has looked, for which live streams are asked for
COLLECT_TICKS = 8  # ticks between collections of the counts of all processes
RECORDED_S = 5.0  # maximum seconds to write the record before confirming an operation
LAST_USAGE_S = 3.0  # seconds for a gateway to report its usage after its last answer
END_S = 10.0  # maximum seconds for workers to exit on shutdown
OPERATIONS_SHOWN = 10  # number of operations that ``status`` shows
ENDED = "its process ended"  # prefix of the reason if a process has exited

# Phases before a replica has loaded its stage.
STARTING = (ProcessPhase.LAUNCHING, ProcessPhase.JOINED)
IS_UP = (ProcessPhase.LOADED, ProcessPhase.SPARE, ProcessPhase.READY)


class Controller:
    """The controller of one service.

    ``old`` is the record of an earlier controller whose processes may still run.
    ``ended`` is the record of one without running processes: this controller continues
    its numbers and sizes, and otherwise starts the service afresh.
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
        self.app, self.port, self.store = app, port, store
        self._ended, last = ended, old or ended
        self.dtypes: dict[str, str] = {}
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
        self._versions = Versions(None if old is None else old.specs)
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
            self.happened,
        )
        self.bookings = self.placement.bookings
        self.processes = Processes(launcher, self.bookings.ledger, folder.logs)
        self.operations = Operations(
            self,
            self.fleet,
            self._versions,
            self.placement,
            self.processes,
            self.history,
        )
        self.scaler = Autoscaler(self.fleet, self.history, self.journal, self)
        registry = open_registry(folder.path)
        if old is None:
            try:
                registry.forget_meters()
            except ServeError as error:  # disk full; harmless: meter numbers are random
                logger.warning("%s", error)
        self.tenanting = TenantManager(
            registry, self.history, self._joined_gateways, self._links.send
        )
        self.observer = Observer(self.history, self.journal, clock)
        self._watched_until = 0.0
        self._metrics = FleetMetrics(
            self._look,
            self.fleet.processes,
            self.history,
            lambda: self.observer.paces,
        )
        self._tracer = tracer_of(
            os.environ, app.app, "controller", {"multiworld.role": "controller"}
        )
        self._trace = None
        if self._tracer is not None:
            self._trace = OperationTrace(
                self._tracer, self.fleet.processes, self._stage_name, clock
            )
        self._launching: set[asyncio.Task[None]] = set()
        # Processes that this controller killed and whose exit is not reported yet.
        self._killed: set[str] = set()
        self._memory_kills = MemoryKills()
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._pauses = PauseDetector(TICK_S)
        self._loop = asyncio.get_running_loop()
        self._is_started = self._is_ending = False
        self._may_give_up = old is None
        self._failure: LaunchError | None = None
        self._record = RecordKeeper(folder.save, rare_log)

    # Start and shutdown.

    def start(self, old: Record | None) -> None:
        adopted = [] if old is None else self._adopt(old)
        if old is not None and adopted:
            # Compare as the record stores it: JSON has fewer types than YAML.
            app = AppSpec.model_validate_json(self.app.model_dump_json())
            check_update(old.app, app, old.specs)
        self._is_started = True
        self.fleet.starts_at_once = starts_at_once(self._launcher.nodes())
        self._launcher.settle()
        self._versions.add(self.app)
        if old is None:
            desired = self._first_state()
        else:
            desired = with_new_versions_started(
                desired_state_of(self.app, sizes_before(old, self.app)), old.active
            )
            self._remember_old_versions(old, desired)
        for process in adopted:
            self.happened(events.Adopted(process))
            self._links.open(process.name)
        self.want(desired)
        self.placement.replanner.start()
        self.scaler.start()
        self._ticker = self._loop.create_task(self._tick())

    def _first_state(self) -> DesiredState:
        """Return the first desired state; raise PlacementError if it does not fit."""
        desired = desired_state_of(self.app)
        if self._ended is not None:
            sizes = sizes_before(self._ended, self.app)
            try:
                found = desired_state_of(self.app, sizes)
                self.placement.admit(found)
                return found
            except PlacementError:
                pass  # there is less room than before
        self.placement.admit(desired)
        return desired

    def _remember_old_versions(self, old: Record, desired: DesiredState) -> None:
        """Register versions that run but are no longer desired."""
        wanted = {(name, model.version) for name, model in desired.models.items()}
        for name, versions in old.specs.items():
            for version, spec in versions.items():
                if (name, version) not in wanted:
                    # Not validated: a dedicated copy (``model@tenant``) is valid only
                    # next to its model.
                    app = self.app.model_copy(update={"models": {name: spec}})
                    sizes = old.sizes.get(name, {})
                    replicas = sizes.get(version, old.replicas.get(name, ()))
                    before = desired_state_of(app, {name: Sizes(replicas, spec)})
                    self.fleet.remember(name, before.models[name])

    def _adopt(self, old: Record) -> list[Process]:
        found = self.processes.adopt(old.processes, self._versions.specs, self._clock())
        for record, _ in found:
            if record.model:
                self.placement.restore(record)
        kept = {record.name for record, _ in found}
        gone = sorted({record.name for record in old.processes} - kept)
        text = f"{len(kept)} processes of the previous controller keep running"
        if kept:
            text += f" ({', '.join(sorted(kept))})"
        if gone:
            text += f"; {len(gone)} had ended: {', '.join(gone)}"
        self.history.say("adopted", text)
        return [process for _, process in found]

    async def await_machines(self) -> None:
        """Wait until all replicas fit; raise ``PlacementError`` after ``ready_s``."""
        # Machines of a new cluster join one by one.
        if self.app.launcher != "ray":
            return
        limit, said = self._clock() + self.app.ready_s, ""
        while True:
            specs = {name: {m.version: m} for name, m in self.app.models.items()}
            asks = asks_of(desired_state_of(self.app), specs)
            try:
                self.placement.bookings.admit(asks)
                return
            except PlacementError as error:
                if self._clock() >= limit:
                    raise
                if said != str(error):
                    said = str(error)
                    self.history.say("unplaced", f"waiting for machines: {error}")
            await asyncio.sleep(TICK_S)

    async def decide_dtypes(self) -> None:
        """Choose the dtype of each model before memory is booked."""
        # A cluster's machines report their bfloat16 speed and their GPUs late, so this
        # waits up to ``FACTS_S`` for them.
        models = self.app.models.values()
        is_asked = any(
            (m.generation and m.generation.dtype is None)
            or any(stage.device != "cpu" for stage in m.stages)
            for m in models
        )
        if is_asked and self.app.launcher == "ray":
            try:
                async with asyncio.timeout(FACTS_S):
                    await self._nodes_measured()
            except TimeoutError:
                logger.warning("not all machines have reported their resources")
        resolved = self.resolve(self.app)
        self.app, self.dtypes = resolved.app, resolved.why

    async def _nodes_measured(self) -> None:
        nodes = self._launcher.nodes
        while any(node.bfloat16 is None for node in nodes()):  # noqa: ASYNC110 - no event
            await asyncio.sleep(TICK_S)

    def resolve(self, app: AppSpec) -> Resolved:
        return resolve(app, self._launcher.nodes(), self._versions.specs)

    async def identify(self, app: AppSpec) -> AppSpec:
        """Add the identity of each version; SpecError if a file cannot be read."""
        # A running or desired version keeps its identity.
        return await self._identify(app, self._used_versions())

    async def _identify(self, app: AppSpec, used: set[tuple[str, str]]) -> AppSpec:
        known = {
            name: spec
            for name, version in used
            if (spec := self._versions.specs.get(name, {}).get(version)) is not None
            and spec.identity is not None
            and name in app.models
            and app.models[name].version == version
        }
        kept = [
            spec.identity.kept
            for versions in (*self._versions.specs.values(), known)
            for spec in versions.values()
            if spec.identity is not None
        ]

        def identify() -> AppSpec:
            forget_copies(self._folder.versions, kept)
            models = {}
            for name, spec in app.models.items():
                if name in known:
                    update = {"identity": known[name].identity}
                    models[name] = spec.model_copy(update=update)
                else:
                    models[name] = identified(spec, self._folder.versions)
            return app.model_copy(update={"models": models})

        found: AppSpec = await in_thread(identify)
        return found

    async def find_changes(self, app: AppSpec) -> dict[str, str]:
        """Return a changed file of each model whose version is unchanged."""
        models = app.models.items()
        specs = {name: spec for name, spec in models if spec.identity is not None}

        def find() -> dict[str, str]:
            found = {}
            for name, spec in specs.items():
                with contextlib.suppress(SpecError):
                    found[name] = changed_since(spec)
            return {name: path for name, path in found.items() if path}

        found: dict[str, str] = await in_thread(find)
        return found

    async def identify_first(self, old: Record | None) -> None:
        """Compute the identities of the spec's versions; warn about changed files."""
        specs = self._versions.specs
        used = {(name, version) for name in specs for version in specs[name]}
        self.app = await self._identify(self.app, used)
        if old is not None:
            for name, path in (await self.find_changes(self.app)).items():
                self.history.say("changed", f"{name}: {refusal(path)}")

    async def plan_first(self) -> None:
        self._versions.add(self.app)
        await self.placement.plan_first(desired_state_of(self.app))

    async def _tick(self) -> None:
        now = self._clock()
        for number in itertools.count():
            await asyncio.sleep(TICK_S)
            before, now = now, self._clock()
            if self._pauses.look(now):
                self.happened(events.Paused(now - before - TICK_S))
                continue  # first read the messages that arrived during the pause
            self.happened(events.Ticked())
            self.placement.check_memory(self.processes.running)
            if number % COLLECT_TICKS == 0:
                self._spawn(self._collect())

    async def _collect(self) -> None:
        """Collect the counts of all processes, so that few are lost with a process."""
        reports = await self._metrics.collect()
        self._metrics.keep_tenants(self.tenanting.tenants)
        posts = {
            p.name: (p.model, p.version, p.stage)
            for p in self.fleet.processes.values()
            if p.phase is ProcessPhase.READY
        }
        self.observer.seen(reports, self._metrics.sums(), posts)

    async def _look(self, limit_s: float) -> messages.Reports:
        is_watched = self._clock() < self._watched_until
        return await self._links.reports(
            limit_s, has_counts=True, has_streams=is_watched
        )

    def facts(self) -> Facts:
        """Return what is known of the service, for people to look at."""
        self._watched_until = self._clock() + WATCHED_S
        nodes = status.nodes_of(self.bookings.ledger)
        return self.observer.facts(
            self.status(), nodes, self.history.handed_over, self.tenanting.budgets()
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
        return not self._is_ending and status.is_ready(self.fleet)

    async def shutdown(self, old: Record | None = None) -> None:
        """Shut down, gateways first; if cancelled, a new controller adopts the rest."""
        # ``old``: record of processes that have not been adopted yet.
        self._is_ending = True
        await self.scaler.close()
        if self._ticker is not None:
            self._ticker.cancel()
        if self._launching:  # a process cannot be stopped before it is launched
            await asyncio.wait(self._launching, timeout=END_S)
        # Gateways first, so that they answer accepted requests.
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
        self._is_ending = True
        await self.scaler.close()
        await self.placement.replanner.close()
        await self._links.close_all()
        tasks = list(self._launching)
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
        ending = "it is shutting down" if self._is_ending else ""
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

    async def reports(self, limit_s: float = REPORT_S) -> messages.Reports:
        return await self._links.reports(limit_s)

    # Reconciling.

    def want(self, desired: DesiredState) -> None:
        self.happened(events.DesiredStateChanged(desired))
        self.placement.replanner.wake()

    def happened(self, event: events.Event) -> None:
        if self._is_ending or not self._is_started:
            return
        found = self.fleet.handle(event, self._clock())
        for action in found:
            self._carry_out(action)
        self._changed.set()
        if isinstance(event, events.Applied) and not found:
            return  # the record does not contain it
        if not isinstance(event, events.Adopted):
            self._save()  # during adoption, the record would be incomplete

    def _carry_out(self, action: actions.Action) -> None:
        match action:
            case actions.Launch(name, model, version, stage):
                self._spawn(self._launch(name, model, version, stage))
            case actions.Kill(name):
                self._killed.add(name)
                self.processes.forget(name)
                self._links.close(name)
            case actions.Probe(name, gateway, limit_s):
                self._links.send(gateway, messages.ProbeReplica(name, limit_s))
            case actions.Finish(name):
                self._links.send(name, messages.Finish())
            case actions.Announce(table):
                for name in self._links.names:
                    self._links.send(name, messages.TableChanged(table))
            case actions.LogEvent(kind, text, name):
                self.history.say(kind, text, name)
                if self._trace is not None:
                    self._trace.happened(kind, text, name)
            case actions.GiveUp():
                self._give_up(action)

    def _give_up(self, action: actions.GiveUp) -> None:
        """Fail a service that was never ready and keeps failing in the same way."""
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

    def _spawn(self, body: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(body)
        self._launching.add(task)
        task.add_done_callback(self._launching.discard)

    async def _launch(self, name: str, model: str, version: str, stage: int) -> None:
        await self.recorded()  # otherwise the next controller might reuse the name
        args = args_of(self.app, self.store.address, self.port, name)
        spot, need = None, Need()
        if name not in self.fleet.processes:
            return  # no longer desired
        if model:
            spec = self._versions.get(model, version)
            need = needs_of(spec)[stage]
            try:
                spot = self._book(name, (model, version, stage), need)
            except PlacementError as error:
                self.happened(events.Unplaced(name, str(error)))
                return
            update = {"model": model, "stage": stage, "spec": spec, "gpus": spot.gpus}
            args = args.model_copy(update=update)
        update = {"alive": str(self._folder.alive)}
        if not model and self.app.gateway.is_kept:
            update["keeper"] = str(self._folder.keeper)
        args = args.model_copy(update=update)
        self._links.open(name)
        try:
            running = await self.processes.launch(args, spot, need)
        except LaunchError as error:
            self._launch_failed(name, error)
            return
        if name in self.fleet.processes:
            self.processes.add(running)
            self._save()
        else:
            self._launcher.kill(running)  # its exit releases its booking

    def _book(self, name: str, post: tuple[str, str, int], need: Need) -> Location:
        if trouble := self._launcher.trouble():
            raise PlacementError(trouble)
        spot, why = self.bookings.take(name, post, need)
        if len(self.bookings.ledger.nodes) > 1:
            self.history.say("placed", f"{name} on {spot.node}: {why}", name)
        return spot

    def _launch_failed(self, name: str, error: LaunchError) -> None:
        if trouble := self._launcher.trouble():
            self._links.close(name)
            self.happened(events.Unplaced(name, trouble))
        else:
            why = f"it could not be started: {error}"
            self.happened(events.ProcessGone(name, why))

    def _stalled_s(self) -> float:
        """Return the seconds for which a process may hold the GIL: two batches."""
        stages = (s for model in self.app.models.values() for s in model.stages)
        longest_s = max((stage.compute_s or 0.0 for stage in stages), default=0.0)
        return 2 * max(HUNG_S, longest_s)

    def exited(self, name: str, code: int | None) -> None:
        self.processes.exited(name)
        is_ours, grew = name in self._killed, self._memory_kills.grew
        why = end_words(code, is_ours=is_ours, ran_out_of_memory=grew)
        self._killed.discard(name)
        self._changed.set()
        process, cause = self.fleet.processes.get(name), why
        if code and code > 0 and (process is None or not self._is_new(process)):
            why += (
                f"; last line of its log: {self.processes.last_words(name) or 'none'}"
            )
        if process is not None and not self._is_ending:
            self._gone(name, why, cause)
        elif code:
            self.history.say(
                "exited", f"{name}: {why}", name
            )  # its loss has already been handled

    def lost(self, name: str, error: MemberLostError) -> None:
        # Each control world has two members; the process is rank 1.
        reason = error.reason.removeprefix("rank 1 was lost: ")
        why = f"{reason}; {error.evidence}"
        if reason.startswith(ENDED):
            # The exit code, a better reason, arrives in a moment; see ``exited``.
            self._loop.call_later(EXIT_S, self._gone_unless_told, name, why)
        else:
            self._gone(name, why)

    def _gone_unless_told(self, name: str, why: str) -> None:
        if name in self.fleet.processes and not self._is_ending:
            self._gone(name, why)

    def unheard(self, name: str, error: StaleEpochError) -> None:
        self._gone(name, f"it has declared the controller lost: {error}")

    def _gone(self, name: str, why: str, cause: str = "") -> None:
        process = self.fleet.processes.get(name)
        if process is not None and self._is_new(process):
            words = self.processes.last_words(name)
            cause = words or cause or why
            starting = " while starting" * (process.phase in STARTING)
            why += f"{starting}; last line of its log: {words or 'none'}"
        self.happened(events.ProcessGone(name, why, cause=cause))

    def _is_new(self, process: Process) -> bool:
        """Return whether a process is starting, or its version is not active yet."""
        if process.phase in STARTING:
            return True
        is_active = self.fleet.active.get(process.model) == process.version
        is_up = process.phase in IS_UP
        return bool(process.model) and is_up and not is_active

    def nodes_changed(self) -> None:
        self.placement.nodes_changed()

    # For the autoscaler and operations.

    def admit(self, desired: DesiredState, model: str) -> None:
        self.placement.admit(desired, model)

    @property
    def specs(self) -> Specs:
        return self._versions.specs

    def send(self, name: str, order: messages.Order) -> None:
        self._links.send(name, order)

    def send_gateways(self, order: messages.Order) -> None:
        for name in self._joined_gateways():
            self._links.send(name, order)

    def _joined_gateways(self) -> list[str]:
        return [name for name in self._links.names if _is_gateway(name)]

    # News from the links; see ``ProcessLinkOwner``.

    def greeting(self, name: str) -> list[messages.Order]:
        table = messages.TableChanged(self.fleet.table)
        if not _is_gateway(name):
            return [table]
        # Omit a version that was rolled back, whose factory may crash the gateway.
        used = self._used_versions()
        specs = {
            model: {v: spec for v, spec in versions.items() if (model, v) in used}
            for model, versions in self._versions.specs.items()
        }
        return [status.models_order(specs), *self.tenanting.greeting(), table]

    def joined(self, name: str) -> None:
        self.happened(events.Joined(name))

    def news(self, name: str, news: messages.News) -> None:
        match news:
            case messages.StageLoaded():
                self._loaded(name, news)
            case messages.TableApplied(number):
                self.happened(events.Applied(name, number))
            case messages.UsageReport():
                self.tenanting.used(name, news)
            case messages.PoisonFound():
                self.tenanting.poisonous(name, news)
            case messages.ModelNeeded(model):
                self.happened(events.ModelNeeded(model))
                self.scaler.wake(model)
            case messages.MemoryExceeded(used, limit):
                self.placement.outgrown(name, used, limit)
            case messages.ProbeResult(replica, error):
                self.happened(events.Probed(replica, error))
            case messages.FleetReportRequest(number):
                self._spawn(self._report_fleet(name, number))
            case messages.Report():
                self._metrics.heard(name, news)

    def _loaded(self, name: str, news: messages.StageLoaded) -> None:
        process = self.fleet.processes.get(name)
        if process is not None and process.model:
            spec = self._versions.specs.get(process.model, {}).get(process.version)
            wanted = "" if spec is None or spec.identity is None else spec.identity.name
            found = news.identity
            if found and wanted and found != wanted:
                why = f"it computes {found[:12]}, but its version is {wanted[:12]}"
                self.happened(events.ProcessGone(name, why))
                return
            if news.changed:
                text = f"{name} loaded a copy of the old files: {refusal(news.changed)}"
                self.history.say("changed", text, name)
        loaded = events.Loaded(name, news.fingerprint, news.weights, news.noise)
        self.happened(loaded)

    # The record.

    async def recorded(self) -> None:
        """Wait until the latest change is on disk, but at most ``RECORDED_S``."""
        await self._record.settled(RECORDED_S)

    async def confirmed(self) -> None:
        """Wait for the record; raise ServeError if it could not be written."""
        await self.recorded()
        if self._record.trouble:
            raise ServeError(
                "applied, but not recorded; a new controller would not know of it: "
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


def _is_gateway(name: str) -> bool:
    return name.startswith("gateway/")
