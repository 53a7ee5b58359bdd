"""The state of a service as plain data: status, and the record on disk. Shell."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multiworld.serve.fleet.reconciler import Reconciler
from multiworld.serve.fleet.record import ProcessRecord, Record, StoreRecord
from multiworld.serve.fleet.state import Process, ProcessPhase
from multiworld.serve.launchers.base import RunningProcess
from multiworld.serve.placement.replica_bookings import ReplicaBookings, Specs
from multiworld.serve.spec.schema import AppSpec, GatewaySpec
from multiworld.serve.transport.protocol import ModelsChanged

LAST_WORDS = 300
"""Most characters of a last log line that are shown."""


def is_ready(fleet: Reconciler) -> bool:
    """Return True if everything that is desired is ready."""
    ready = [p for p in fleet.processes.values() if p.phase is ProcessPhase.READY]
    if sum(p.is_gateway for p in ready) < fleet.desired.gateways:
        return False
    return all(
        sum((p.model, p.version, p.stage) == (name, model.version, k) for p in ready)
        >= count
        for name, model in fleet.desired.models.items()
        for k, count in enumerate(model.replicas)
    )


def status_of(
    fleet: Reconciler,
    running: Mapping[str, RunningProcess],
    places: ReplicaBookings,
    log_of: Callable[[str], Path],
    stage_name: Callable[[Process], str],
    now: float,
) -> dict[str, Any]:
    """Return the desired and the observed state of a service, as plain data.

    Args:
        fleet: Desired and observed state.
        running: The running processes, by name.
        places: Bookings of the replicas.
        log_of: Returns the log file of a process.
        stage_name: Returns the name of a process's stage.
        now: Current time, in seconds, on the clock of ``fleet``.
    """
    return {
        "is_ready": is_ready(fleet),
        "controller": os.getpid(),
        "wanted": asdict(fleet.desired),
        "active": dict(fleet.active),
        "table": fleet.table.number,
        "unplaced": {
            f"{name}/{stage} ({version})": why
            for (name, version, stage), why in fleet.unplaced.items()
        },
        "failing": [
            {
                "model": name,
                "version": model.version,
                "stage": stage,
                "failures": fleet.backoff.failures((name, model.version, stage)),
                "cause": fleet.backoff.cause((name, model.version, stage)),
                "next_in_s": max(
                    0.0, fleet.backoff.not_before((name, model.version, stage)) - now
                ),
            }
            for name, model in fleet.desired.models.items()
            for stage in range(len(model.replicas))
            if fleet.backoff.failures((name, model.version, stage))
            and not _has_ready(fleet, name, model.version, stage)
        ],
        "processes": [
            {
                "name": p.name,
                "model": p.model,
                "version": p.version,
                "stage": p.stage,
                "stage_name": stage_name(p),
                "phase": p.phase.value,
                "since_s": now - p.since,
                "pid": running[p.name].pid if p.name in running else None,
                "node": places.node_of(p.name),
                **places.booked(p.name),
                "crashes": fleet.backoff.failures((p.model, p.version, p.stage)),
                "log": str(log_of(p.name)),
            }
            for p in fleet.processes.values()
        ],
    }


def _has_ready(fleet: Reconciler, model: str, version: str, stage: int) -> bool:
    where = (model, version, stage, ProcessPhase.READY)
    return any(
        (p.model, p.version, p.stage, p.phase) == where
        for p in fleet.processes.values()
    )


def record_of(
    app: AppSpec,
    specs: Specs,
    fleet: Reconciler,
    store: StoreRecord,
    port: int,
    processes: list[ProcessRecord],
) -> Record:
    """Return the record from which a new controller adopts the service.

    Args:
        app: The spec.
        specs: Every known version, by model and version.
        fleet: Desired and observed state.
        store: The store's process and address.
        port: Port of the gateways.
        processes: Records of the running processes.
    """
    return Record(
        app=app,
        specs={name: dict(versions) for name, versions in specs.items()},
        active=dict(fleet.active),
        store=store,
        port=port,
        number=fleet.table.number,
        next_number=fleet.next_number,
        replicas={
            name: list(model.replicas) for name, model in fleet.desired.models.items()
        },
        processes=processes,
    )


def records_of(
    fleet: Reconciler, running: Mapping[str, RunningProcess], places: ReplicaBookings
) -> list[ProcessRecord]:
    """Return the records from which a new controller adopts the processes.

    Args:
        fleet: Desired and observed state.
        running: The running processes, by name.
        places: Bookings of the replicas.
    """
    found = []
    for p in fleet.processes.values():
        if p.name not in running:
            continue
        booking = places.ledger.bookings.get(p.name)
        found.append(
            ProcessRecord(
                name=p.name,
                model=p.model,
                version=p.version,
                stage=p.stage,
                phase=p.phase.value,
                pid=running[p.name].pid,
                began=running[p.name].began,
                node="" if booking is None else booking.spot.node,
                gpu=None if booking is None else booking.spot.gpu,
            )
        )
    return found


def url_of(gateway: GatewaySpec, port: int) -> str:
    """Return the URL at which clients reach the gateways."""
    scheme = "https" if gateway.tls_certificate else "http"
    host = gateway.host if gateway.host not in ("0.0.0.0", "::") else "127.0.0.1"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"


def models_order(specs: Specs) -> ModelsChanged:
    """Return the order that tells gateways every version that may answer."""
    return ModelsChanged(
        {
            name: {v: spec.model_dump_json() for v, spec in versions.items()}
            for name, versions in specs.items()
        }
    )


def last_words(log: Path) -> str:
    """Return the last line of a process's log, or "none"."""
    try:
        text = log.read_text(errors="replace").strip()
    except OSError:
        text = ""
    return text.splitlines()[-1][-LAST_WORDS:] if text else "none"


def exit_words(code: int) -> str:
    """Return an exit code in words; a negative one is a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
