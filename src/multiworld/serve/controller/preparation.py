"""Conditions that a new service waits for before its first processes start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from multiworld.errors import PlacementError
from multiworld.serve.controller.fleet.desired_state import desired_state_of
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.launchers.base import Launcher
from multiworld.serve.controller.placement.replica_placement import (
    ReplicaBookings,
    asks_of,
)
from multiworld.serve.spec.schema import AppSpec

logger = logging.getLogger("multiworld.serve")

LOOK_S = 0.25  # seconds between checks for new machines
FACTS_S = 10.0  # maximum wait for a cluster's machines to report their bfloat16 speed


async def await_machines(
    current: Callable[[], AppSpec],  # an update may change it meanwhile
    bookings: ReplicaBookings,
    history: History,
    clock: Callable[[], float],
) -> None:
    """Wait until all replicas fit; raise ``PlacementError`` after ``ready_s``."""
    # Only Ray clusters need the wait: the machines of a new cluster join one by one.
    if current().launcher != "ray":
        return
    app: AppSpec | None = None
    limit, said = 0.0, ""
    while True:
        if app is not current():
            app = current()
            limit = clock() + app.ready_s
        specs = {name: {m.version: m} for name, m in app.models.items()}
        try:
            bookings.admit(asks_of(desired_state_of(app), specs))
            return
        except PlacementError as error:
            if clock() >= limit:
                raise
            if said != str(error):
                said = str(error)
                history.say("unplaced", f"waiting for machines: {error}")
        await asyncio.sleep(LOOK_S)


async def await_measurements(app: AppSpec, launcher: Launcher) -> None:
    """Wait until the machines have reported the measurements that set the dtype."""
    # Machines of a Ray cluster report their bfloat16 speed and GPUs only after joining.
    is_asked = any(
        (m.generation and m.generation.dtype is None)
        or any(stage.device != "cpu" for stage in m.stages)
        for m in app.models.values()
    )
    if not is_asked or app.launcher != "ray":
        return
    try:
        async with asyncio.timeout(FACTS_S):
            while any(node.bfloat16 is None for node in launcher.nodes()):  # noqa: ASYNC110 - no event
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        logger.warning("not all machines have reported their resources")
