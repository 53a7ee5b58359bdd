"""Placement manager: carries out the decisions of bookings, policy and solvers. It
admits models, plans, moves replicas, tracks the machines, and kills replicas that use
more memory than they booked."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from multiworld.errors import PlacementError
from multiworld.serve.controller.fleet import events
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.record import ProcessRecord
from multiworld.serve.controller.fleet.start_order import starts_at_once
from multiworld.serve.controller.fleet.state import DesiredState, ProcessPhase
from multiworld.serve.controller.launchers.base import Launcher, RunningProcess
from multiworld.serve.controller.placement.problem_builder import (
    ReplicaRequest,
    in_words,
)
from multiworld.serve.controller.placement.replanner import (
    PlacementSnapshot,
    PlanReady,
    Replanner,
    facts_of,
    snapshot_of,
)
from multiworld.serve.controller.placement.replica_placement import (
    ReplicaBookings,
    Specs,
    asks_of,
)
from multiworld.serve.machines.amounts import Location, Node, mib, needs_of
from multiworld.serve.machines.assignment import Policy

logger = logging.getLogger("multiworld.serve")


class PlacementManager:
    """The machines of a service, the bookings on them, and the placement plan."""

    def __init__(
        self,
        launcher: Launcher,
        fleet: Reconciler,
        history: History,
        journal: DecisionLog,
        policy: Policy,
        specs: Specs,  # specs of all known versions
        happened: Callable[[events.Event], None],
    ) -> None:
        self._launcher, self._fleet = launcher, fleet
        self._history, self._journal = history, journal
        self._specs, self._happened = specs, happened
        self.bookings = ReplicaBookings(launcher.nodes(), policy)
        self.replanner = Replanner(self._snapshot, self._apply_plan)
        self._text = self._trouble = ""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self._launcher.nodes()

    # Before the first start.

    def admit(self, wanted: DesiredState, model: str | None = None) -> None:
        """Raise ``PlacementError`` if the machines lack room for all models."""
        # If even the current desired state does not fit, only ``model`` must fit.
        try:
            self.bookings.admit(asks_of(wanted, self._specs))
        except PlacementError:
            if model is None or self.fits(self._fleet.desired):
                raise
            wanted = replace(wanted, models={model: wanted.models[model]})
            self.bookings.admit(asks_of(wanted, self._specs))

    def fits(self, wanted: DesiredState) -> bool:
        try:
            self.bookings.admit(asks_of(wanted, self._specs))
        except PlacementError:
            return False
        return True

    def restore(self, record: ProcessRecord) -> None:
        spec = self._specs[record.model][record.version]
        post = record.model, record.version, record.stage
        spot = Location(record.node, record.gpus)
        need = needs_of(spec)[record.stage]
        self.bookings.ledger.restore(record.name, post, spot, need)

    # Planning.

    async def plan_first(self, wanted: DesiredState) -> None:
        try:
            planned = await self.replanner.plan(self._snapshot(wanted))
        except Exception:  # the service can start without a plan
            logger.exception("placement planning failed; starting without a plan")
            return
        if planned is not None:
            self._apply_plan(planned)

    def _snapshot(self, wanted: DesiredState | None = None) -> PlacementSnapshot:
        models = (wanted or self._fleet.desired).models
        asks = [
            ReplicaRequest(
                name, self._specs[name][w.version], [(n, n) for n in w.replicas]
            )
            for name, w in models.items()
        ]
        versions = {name: w.version for name, w in models.items()}
        stays = [
            p.name
            for p in self._fleet.processes.values()
            if not p.is_going and not p.is_drain_requested
        ]
        running = self.bookings.runs(versions, stays)
        return PlacementSnapshot(self._launcher.nodes(), asks, running)

    def _apply_plan(self, planned: PlanReady) -> None:
        self.bookings.plan = planned.plan
        text = in_words(planned.placement)
        if text != self._text:
            self._text = text
            self._history.say("plan", text)
            inputs = functools.partial(snapshot_of, planned)
            self._journal.record("placement", "", text, facts_of(planned), inputs)
        if self._launcher.trouble():
            return  # do not drain replicas that could not start elsewhere
        ready = [
            p.name
            for p in self._fleet.processes.values()
            if p.phase is ProcessPhase.READY
            and not p.is_drain_requested
            and p.name in self.bookings.ledger.bookings
        ]
        for name in self.bookings.moves(ready):
            self._history.say("move", f"{name}: moved as planned", name)
            self._happened(events.DrainRequested(name))

    # Machines.

    def nodes_changed(self) -> None:
        """Apply added and removed machines, or a change of the launcher's trouble."""
        added, gone = self.bookings.set_nodes(self._launcher.nodes())
        for name in added:
            self._history.say("node added", f"{name} was added")
        for name in gone:
            here = ", ".join(b.name for b in self.bookings.ledger.on(name))
            self._history.say("node lost", f"{name} was lost, with {here or 'nothing'}")
        trouble = self._launcher.trouble()
        if trouble != self._trouble:
            self._trouble = trouble
            text = trouble or "replicas can be started again"
            self._history.say("launcher", text)
        self._happened(events.CapacityChanged(starts_at_once(self.nodes)))
        self.replanner.wake()

    def check_memory(self, running: Mapping[str, RunningProcess]) -> None:
        for name, limit in self.bookings.limits().items():
            if name in running:
                used = self._launcher.outgrown(running[name], limit)
                if used:
                    self.outgrown(name, used, limit)

    def outgrown(self, name: str, used: int, limit: int) -> None:
        """Kill a replica that uses more memory (in bytes) than it booked."""
        text = f"it used {mib(used)} of memory; memory_mb books {mib(limit)}"
        self._history.say("outgrown", f"{name}: {text}", name)
        self._happened(events.ProcessGone(name, text))
