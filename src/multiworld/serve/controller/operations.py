"""Operations of administrators on a service: scale, update, drain, chaos."""

from __future__ import annotations

import random
import signal
from dataclasses import replace

from multiworld.errors import (
    PlacementError,
    ServeError,
    UnknownModelError,
    UnknownStreamError,
)
from multiworld.serve.controller.answers import Scaled
from multiworld.serve.controller.dtypes import Resolved, resolve
from multiworld.serve.controller.fleet import desired_state, events
from multiworld.serve.controller.fleet.desired_state import Sizes
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.state import DesiredState, ProcessPhase
from multiworld.serve.controller.launchers.base import RunningProcess
from multiworld.serve.controller.placement.manager import PlacementManager
from multiworld.serve.controller.placement.replica_placement import asks_of
from multiworld.serve.controller.process_links import ProcessLinks
from multiworld.serve.controller.processes import Processes
from multiworld.serve.controller.reconciliation import Reconciliation
from multiworld.serve.controller.spec_shown import text_of
from multiworld.serve.controller.status import models_order
from multiworld.serve.controller.versions import CurrentSpec, Versions
from multiworld.serve.engine.models import imported_sources
from multiworld.serve.engine.models.factory import check_policies
from multiworld.serve.gateway.http.tls_handshake import check_certificate
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.wire.control_messages import InjectHang, InjectPartition

# Name that stands for the gateways in place of a model; no model may have it.
GATEWAY = "gateway"

# Replicas per core, on average over all machines, above which a confirmation is needed.
REPLICAS_A_CORE = 4


class ConfirmationNeededError(ServeError):
    """An unusual operation was not confirmed; repeat it with a confirmation."""

    status = 428


class Operations:
    def __init__(
        self,
        current: CurrentSpec,
        fleet: Reconciler,
        reconciliation: Reconciliation,
        versions: Versions,
        placement: PlacementManager,
        processes: Processes,
        links: ProcessLinks,
        history: History,
    ) -> None:
        self._current, self._versions = current, versions
        self._fleet, self._reconciliation = fleet, reconciliation
        self._placement, self._processes = placement, processes
        self._links, self._history = links, history
        self.before = ""  # the spec before the last update, as YAML

    def scale(
        self, model: str, stage: str, replicas: int, *, is_confirmed: bool = False
    ) -> Scaled:
        """Set a stage's replicas; far more replicas than cores need a confirmation."""
        spec = self._versions.desired(self._fleet.desired, model)
        number = desired_state.stage_number(spec, model, stage)
        desired = self._fleet.desired
        before, desired = desired_state.rescaled(desired, spec, model, number, replicas)
        name = spec.stages[number].name or str(number)
        active = self._fleet.active.get(model, "")
        is_updating = active not in ("", desired.models[model].version)
        if is_updating and not replicas:
            raise ServeError(
                f"an update of {model!r} is in progress; scale to zero after it has "
                "finished"
            )
        if replicas > before:
            self._placement.admit(desired, model)
            if not is_confirmed:
                self._check_sane(desired)
        text = f"{model}/{name}: from {before} to {replicas} replicas"
        self._history.say("scale", text)
        if is_updating:
            self._scale_active(desired, model, active, name, replicas)
        self._reconciliation.want(desired)
        return Scaled(before, replicas)

    def _scale_active(
        self,
        desired: DesiredState,
        model: str,
        version: str,
        stage: str,
        replicas: int,
    ) -> None:
        """Scale the active version, too, if its spec and the free room allow it."""
        known = self._fleet.version(model, version)
        old = self._versions.specs.get(model, {}).get(version)
        if known is None or old is None:
            return
        alone = replace(self._fleet.desired, models={model: known})
        try:
            number = desired_state.stage_number(old, model, stage)
            _, alone = desired_state.rescaled(alone, old, model, number, replicas)
            if replicas > known.replicas[number]:
                specs = self._versions.specs
                both = asks_of(desired, specs) + asks_of(alone, specs)
                self._placement.bookings.admit(both)
        except ServeError:
            # The active version may lack the stage, or not allow this many replicas, or
            # there may be no room for them: then this version keeps its size.
            return
        self._fleet.remember(model, alone.models[model])

    def _check_sane(self, desired: DesiredState) -> None:
        count = sum(sum(model.replicas) for model in desired.models.values())
        cores = sum(node.cpus for node in self._placement.nodes)
        if count > max(16.0, REPLICAS_A_CORE * cores):
            raise ConfirmationNeededError(
                f"{count} replicas would share {cores:g} cores; repeat with --yes if "
                "that is intended"
            )

    async def cancel(self, request: str) -> None:
        """Order all gateways to end the streams of the request with this id.

        Raises:
            UnknownStreamError: No gateway has a stream of this request.
        """
        if await self._links.cancel(request) == 0:
            raise UnknownStreamError(f"no gateway has a live stream of {request!r}")
        self._history.say("cancel", f"request {request} is cancelled")

    def resolve(self, app: AppSpec) -> Resolved:
        """Choose a dtype for every model that generates text and names none."""
        return resolve(app, self._placement.nodes, self._versions.specs)

    def update(self, app: AppSpec) -> int:
        """Start an update; return the number of the last event before it."""
        if app.host == "auto":
            app = app.model_copy(update={"host": self._current.app.host})
        self._check_sources(app)
        resolved = self.resolve(app)
        app = resolved.app
        desired_state.check_update(self._current.app, app, self._versions.specs)
        check_policies(app)
        check_certificate(app.gateway)
        self._check_sources(app)  # again, because ``check_policies`` imports modules
        desired = self._fleet.desired
        sizes = {
            name: Sizes(m.replicas, self._versions.get(name, m.version))
            for name, m in desired.models.items()
        }
        changed = desired_state.with_new_versions_started(
            desired_state.desired_state_of(app, sizes),
            {name: model.version for name, model in desired.models.items()},
        )
        before, old_app = self._versions.copy(), self._current.app
        self._current.app = app
        self._versions.add(app)
        try:
            specs = self._versions.specs
            if self._placement.fits(desired):
                asks = asks_of(changed, specs) + asks_of(self._replaced(changed), specs)
            else:
                # Even the desired state does not fit. The update may change that, or
                # may concern another model, so check only the models that grow.
                asks = asks_of(_growing(desired, changed), specs)
            self._placement.bookings.admit(asks)
        except Exception as error:  # also from a user's placement policy
            self._current.app = old_app
            self._versions.restore(before)
            if not isinstance(error, PlacementError):
                raise
            raise PlacementError(
                f"{error}; during an update, a model runs in both versions until the "
                "new one is ready",
                short=error.short,
            ) from None
        self._current.follow(app, resolved.why)
        self.before = text_of(old_app)
        self._fleet.ready_s, self._fleet.drain_s = app.ready_s, app.drain_s
        last = self._history.last_number
        self._links.send_gateways(models_order(self._versions.specs))
        self._reconciliation.want(changed)
        return last

    def _replaced(self, wanted: DesiredState) -> DesiredState:
        """Return the active versions that run until the wanted ones are ready."""
        found = {}
        for name, version in self._fleet.active.items():
            known = self._fleet.version(name, version)
            model = wanted.models.get(name)
            if known is not None and model is not None and model.version != version:
                found[name] = known
        return replace(wanted, models=found)

    def _check_sources(self, app: AppSpec) -> None:
        """Refuse new versions whose code was imported before it was changed."""
        # A version that was rolled back counts as new if it is requested again.
        desired = self._fleet.desired.models
        for name, model in app.models.items():
            known = {self._fleet.active.get(name)}
            if name in desired:
                known.add(desired[name].version)
            if model.version not in known:
                imported_sources.check(model.factory or model.engine or "")

    def drain(self, name: str) -> None:
        """Replace one process; it drains once its replacement is ready."""
        if name not in self._fleet.processes:
            known = ", ".join(sorted(self._fleet.processes))
            raise UnknownModelError(f"no process {name!r}; there are: {known}")
        self._history.say(
            "drain requested", f"{name}: to be replaced, then drained", name
        )
        self._reconciliation.happened(events.DrainRequested(name))

    def inject_fault(
        self, action: str, model: str, stage: str, seconds: float
    ) -> RunningProcess:
        """Inject "kill", "stop" or "cut" (for `seconds`) into a ready replica.

        With `GATEWAY` as the model, inject it into a gateway.
        """
        if model == GATEWAY:
            name = self._ready_gateway(action)
        else:
            spec = self._versions.desired(self._fleet.desired, model)
            number = desired_state.stage_number(spec, model, stage)
            name = random.choice(self._fleet.ready_at(model, number))
        running = self._processes.running[name]
        text = f"{action} {name} (process {running.pid})"
        self._history.say("chaos", text, name)
        if action == "cut":
            self._links.send(name, InjectPartition(seconds))
        elif action == "stop" and running.node:  # a signal cannot reach another machine
            self._links.send(name, InjectHang())
        else:
            sent = signal.SIGKILL if action == "kill" else signal.SIGSTOP
            self._processes.signal(name, sent)
        return running

    def _ready_gateway(self, action: str) -> str:
        if action == "cut":
            raise ServeError("a gateway can be killed or stopped, but not cut off")
        found = self._fleet.processes.values()
        ready = [
            p.name for p in found if p.is_gateway and p.phase is ProcessPhase.READY
        ]
        if not ready:
            raise ServeError("no gateway is ready")
        # The gateways with the lowest numbers hold the connections (see ``Keeper``), so
        # inject the fault into one of those.
        ready.sort(key=lambda name: (len(name), name))
        return random.choice(ready[: self._current.app.gateway.replicas])


def _growing(before: DesiredState, after: DesiredState) -> DesiredState:
    """Return the models that need more room than before."""
    found = {}
    for name, model in after.models.items():
        old = before.models.get(name)
        is_same = old is not None and old.version == model.version
        pairs = (
            zip(model.replicas, old.replicas, strict=True) if old and is_same else ()
        )
        if not is_same or any(count > known for count, known in pairs):
            found[name] = model
    return replace(after, models=found)
