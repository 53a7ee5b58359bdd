"""Processes that an earlier controller left running."""

from __future__ import annotations

from collections.abc import Iterable

from multiworld.serve.fleet.record import ProcessRecord
from multiworld.serve.fleet.state import Process, ProcessPhase
from multiworld.serve.launchers.base import Launcher, RunningProcess
from multiworld.serve.placement.replica_bookings import Specs

Adopted = tuple[ProcessRecord, RunningProcess, Process]


def adopted(
    records: Iterable[ProcessRecord], specs: Specs, launcher: Launcher, now: float
) -> list[Adopted]:
    """Return the recorded processes that still run; kill those of unknown versions.

    Each comes with its record, the launcher's handle and the fleet's state.
    """
    found = []
    for said in records:
        running = RunningProcess(said.name, said.pid, said.began, said.node)
        spec = specs.get(said.model, {}).get(said.version)
        if said.model and spec is None:
            launcher.kill(running)
            continue
        ranks = 1 if spec is None else spec.stages[said.stage].ranks
        if launcher.adopt(running, ranks):
            process = Process(
                said.name,
                said.model,
                said.version,
                said.stage,
                ProcessPhase(said.phase),
                now,
            )
            found.append((said, running, process))
    return found
