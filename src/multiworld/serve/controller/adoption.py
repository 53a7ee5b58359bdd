"""Initial state of a controller, for a new service or with adopted processes."""

from __future__ import annotations

from multiworld.errors import PlacementError
from multiworld.serve.controller.fleet.desired_state import Sizes, desired_state_of
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.record import Record, sizes_before
from multiworld.serve.controller.fleet.state import DesiredState, Process
from multiworld.serve.controller.placement.manager import PlacementManager
from multiworld.serve.controller.placement.replica_placement import Specs
from multiworld.serve.controller.processes import Processes
from multiworld.serve.spec.schema import AppSpec


def first_state(
    app: AppSpec, ended: Record | None, placement: PlacementManager
) -> DesiredState:
    """Return the first desired state; raise PlacementError if it does not fit.

    ``ended``: record of a service without running processes; its stages keep their
    sizes if there is room.
    """
    desired = desired_state_of(app)
    if ended is not None:
        try:
            found = desired_state_of(app, sizes_before(ended, app))
            placement.admit(found)
            return found
        except PlacementError:
            pass  # the old sizes do not fit any more, so use those of the spec
    placement.admit(desired)
    return desired


def adopt(
    old: Record,
    processes: Processes,
    specs: Specs,
    placement: PlacementManager,
    history: History,
    now: float,
) -> list[Process]:
    """Adopt the recorded processes that still run, and restore their bookings."""
    found = processes.adopt(old.processes, specs, now)
    for record, _ in found:
        if record.model:
            placement.restore(record)
    kept = {record.name for record, _ in found}
    gone = sorted({record.name for record in old.processes} - kept)
    text = f"{len(kept)} processes of the previous controller keep running"
    if kept:
        text += f" ({', '.join(sorted(kept))})"
    if gone:
        text += f"; {len(gone)} had ended: {', '.join(gone)}"
    history.say("adopted", text)
    return [process for _, process in found]


def remember_old_versions(
    old: Record, desired: DesiredState, app: AppSpec, fleet: Reconciler
) -> None:
    """Register versions that run but are no longer desired."""
    wanted = {(name, model.version) for name, model in desired.models.items()}
    for name, versions in old.specs.items():
        for version, spec in versions.items():
            if (name, version) not in wanted:
                # ``model_copy`` does not validate. That is needed here: a dedicated
                # copy (``model@tenant``) is valid only next to its model.
                alone = app.model_copy(update={"models": {name: spec}})
                replicas = old.sizes.get(name, {}).get(version, ())
                before = desired_state_of(alone, {name: Sizes(replicas, spec)})
                fleet.remember(name, before.models[name])
