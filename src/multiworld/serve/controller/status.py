"""State of a service, as admin responses and as a record."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import msgspec
from msgspec import Raw

from multiworld.serve.controller import answers
from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.record import ProcessRecord, Record, StoreRecord
from multiworld.serve.controller.fleet.state import Process, ProcessPhase
from multiworld.serve.controller.launchers.base import RunningProcess
from multiworld.serve.controller.placement.replica_placement import (
    ReplicaBookings,
    Specs,
)
from multiworld.serve.machines.amounts import Need
from multiworld.serve.machines.bookings import Booking, Bookings
from multiworld.serve.spec.schema import AppSpec, GatewaySpec
from multiworld.serve.wire.control_messages import ModelsChanged, Reports

LAST_WORDS = 300  # maximum characters shown of a last log line
LOG_END = 4096  # bytes of a log to search for its last line

# Log prefix of ``entry.main``, which is removed so that equal failures look equal.
LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.]+: ")


def is_ready(fleet: Reconciler) -> bool:
    ready = [p for p in fleet.processes.values() if p.phase is ProcessPhase.READY]
    desired = fleet.desired
    gateways = [p for p in ready if p.is_gateway]
    current = sum(p.options == desired.gateway_options for p in gateways)
    if current < desired.gateways:
        return False
    return all(
        sum((p.model, p.version, p.stage) == (name, model.version, k) for p in ready)
        >= count
        for name, model in desired.models.items()
        for k, count in enumerate(model.replicas)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSources:
    app: AppSpec
    url: str
    store: str
    trouble: str
    operations: Sequence[HistoryEntry]
    dtypes: Mapping[str, str]
    is_ready: bool
    fleet: Reconciler
    running: Mapping[str, RunningProcess]
    bookings: ReplicaBookings
    log_of: Callable[[str], Path]
    identities: Mapping[str, Mapping[str, str]]
    stage_name: Callable[[Process], str]
    now: float


def status_of(sources: StatusSources) -> answers.StatusAnswer:
    app, fleet = sources.app, sources.fleet
    return answers.StatusAnswer(
        app=app.app,
        url=sources.url,
        store=sources.store,
        launcher=app.launcher,
        authentication=app.gateway.authentication,
        trouble=sources.trouble,
        operations=tuple(sources.operations),
        dtypes=dict(sources.dtypes),
        identities={name: dict(found) for name, found in sources.identities.items()},
        is_ready=sources.is_ready,
        controller=os.getpid(),
        wanted=fleet.desired,
        active=dict(fleet.active),
        table=fleet.table.number,
        unplaced={
            f"{name}/{stage} ({version})" if name else "gateway": why
            for (name, version, stage), why in fleet.unplaced.items()
        },
        failing=tuple(_failing(fleet, sources.now)),
        processes=tuple(_shown(p, sources) for p in fleet.processes.values()),
    )


def _failing(fleet: Reconciler, now: float) -> Iterator[answers.FailingStage]:
    ready = {
        (p.model, p.version, p.stage)
        for p in fleet.processes.values()
        if p.phase is ProcessPhase.READY
    }
    for name, model in fleet.desired.models.items():
        for stage in range(len(model.replicas)):
            post = name, model.version, stage
            crashes = fleet.backoff.of(post)
            if crashes.failures and post not in ready:
                yield answers.FailingStage(
                    model=name,
                    version=model.version,
                    stage=stage,
                    failures=crashes.failures,
                    cause=crashes.cause,
                    next_in_s=max(0.0, crashes.not_before - now),
                )


def _shown(process: Process, sources: StatusSources) -> answers.ProcessShown:
    name, running = process.name, sources.running
    booking = sources.bookings.ledger.bookings.get(name)
    need = Need() if booking is None else booking.need
    post = process.model, process.version, process.stage
    return answers.ProcessShown(
        name=name,
        model=process.model,
        version=process.version,
        stage=process.stage,
        stage_name=sources.stage_name(process),
        phase=process.phase,
        since_s=sources.now - process.entered.get(process.phase, process.since),
        pid=running[name].pid if name in running else None,
        node="" if booking is None else booking.spot.node,
        booked_cpus=need.cpus,
        booked_memory_bytes=need.memory_bytes,
        gpus=() if booking is None else booking.spot.gpus,
        crashes=sources.fleet.backoff.of(post).failures,
        log=str(sources.log_of(name)),
        restarts=sources.fleet.losses[post],
    )


def with_reports(
    status: answers.StatusAnswer, reports: Reports
) -> answers.StatusAnswer:
    said = {**reports.workers, **reports.gateways}
    raw = {name: Raw(msgspec.json.encode(report)) for name, report in said.items()}
    return msgspec.structs.replace(status, reports=raw)


def nodes_of(ledger: Bookings) -> list[answers.NodeShown]:
    found = []
    for name, node in ledger.nodes.items():
        free = ledger.free(name)
        found.append(
            answers.NodeShown(
                **{field.name: getattr(node, field.name) for field in fields(node)},
                free_cpus=free.cpus,
                free_memory_bytes=free.memory_bytes,
                free_gpu_memory_bytes=free.gpu_memory_bytes,
                replicas=tuple(sorted(b.name for b in ledger.on(name))),
            )
        )
    return found


def record_of(
    app: AppSpec,
    specs: Specs,
    fleet: Reconciler,
    store: StoreRecord,
    port: int,
    running: Mapping[str, RunningProcess],
    bookings: Bookings,
) -> Record:
    return Record(
        app=app,
        specs={name: dict(versions) for name, versions in specs.items()},
        active=dict(fleet.active),
        store=store,
        port=port,
        number=fleet.table.number,
        next_number=fleet.next_number,
        sizes={
            name: {v: list(n) for (m, v), n in fleet.sizes.items() if m == name}
            for name, _ in fleet.sizes
        },
        processes=[
            _recorded(process, running[name], bookings.bookings.get(name))
            for name, process in fleet.processes.items()
            if name in running
        ],
    )


def _recorded(
    process: Process, running: RunningProcess, booking: Booking | None
) -> ProcessRecord:
    return ProcessRecord(
        name=process.name,
        model=process.model,
        version=process.version,
        stage=process.stage,
        phase=process.phase.value,
        pid=running.pid,
        began=running.began,
        node="" if booking is None else booking.spot.node,
        gpus=() if booking is None else booking.spot.gpus,
        is_drain_requested=process.is_drain_requested,
        fingerprint=process.fingerprint,
        weights=process.weights,
        noise=process.noise,
        options=process.options,
    )


def url_of(gateway: GatewaySpec, port: int) -> str:
    scheme = "https" if gateway.tls_certificate else "http"
    host = gateway.host if gateway.host not in ("0.0.0.0", "::") else "127.0.0.1"
    shown = f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}"


def models_order(specs: Specs) -> ModelsChanged:
    """Return the order for gateways that lists every version that may answer."""
    return ModelsChanged(
        {
            name: {v: spec.model_dump_json() for v, spec in versions.items()}
            for name, versions in specs.items()
        }
    )


def last_words(log: Path, begin: int = 0) -> str:
    """Return the last line of a log after the first ``begin`` bytes, or ""."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, os.fstat(file.fileno()).st_size - LOG_END))
            text = file.read(LOG_END).decode(errors="replace").strip()
    except OSError:
        text = ""
    last = LOG_PREFIX.sub("", text.splitlines()[-1]) if text else ""
    return last[-LAST_WORDS:]


def exit_words(code: int) -> str:
    """Return an exit code in words; a negative one is a signal."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
