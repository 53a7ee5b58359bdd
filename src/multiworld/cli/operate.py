"""The commands that talk to a running service: status, scale, update, chaos, …"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from multiworld.errors import ServeError
from multiworld.serve.control.client import Service
from multiworld.serve.fleet.record import StateFolder
from multiworld.serve.launchers.base import began_at

WATCH_S = 0.5
END_S = 60.0


def show(data: Any, *, as_json: bool, text: str) -> None:
    """Print an outcome."""
    click.echo(json.dumps(data, indent=2) if as_json else text)


# status


def status(service: Service, *, as_json: bool, watch: bool) -> int:
    """Print what runs; exit code 1 if it is not ready."""
    found = service.ask("GET", "/status", params={"reports": True})
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif not watch:
        Console().print(_status_table(found))
    else:
        _watch(service, found)
    return 0 if found["is_ready"] else 1


def _watch(service: Service, found: Any) -> None:
    with Live(_status_table(found), refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(WATCH_S)
                found = service.ask("GET", "/status", params={"reports": True})
                live.update(_status_table(found))
        except KeyboardInterrupt:
            pass


PHASES = {"ready": "green", "draining": "yellow", "finishing": "yellow"}


def _status_table(found: Any) -> Table:
    state = "[green]ready[/]" if found["is_ready"] else "[red]not ready[/]"
    table = Table(title=f"{found['app']} is {state} at {found['url']}")
    for title in ("process", "phase", "since", "pid", "version", "queued", "at work"):
        table.add_column(title)
    table.add_column("requests", justify="right")
    reports = found.get("reports", {})
    for process in found["processes"]:
        said = reports.get(process["name"]) or {}
        counts = said.get("counts", {})
        is_gateway = not process["model"]
        color = PHASES.get(process["phase"], "red")
        table.add_row(
            process["name"],
            f"[{color}]{process['phase']}[/]",
            f"{process['since_s']:.0f} s",
            str(process["pid"] or "-"),
            process["version"] or "-",
            str(
                sum(said.get("waiting", {}).values())
                if is_gateway
                else said.get("queued", "?")
            ),
            str(said.get("in_flight" if is_gateway else "computing", "?")),
            str(counts.get("answered" if is_gateway else "requests", 0)),
        )
    return table


# logs, events, shutdown


def logs(service: Service, name: str | None, lines: int, *, as_json: bool) -> int:
    """Print the end of the logs."""
    paths = sorted(service.folder.logs.glob("*.log"))
    if name is not None:
        stem = name.replace("/", "-")
        paths = [p for p in paths if f"{p.stem}-".startswith(f"{stem}-")]
        if not paths:
            raise click.ClickException(f"no log of {name!r} in {service.folder.logs}")
    ends = {
        path: path.read_text(errors="replace").splitlines()[-lines:] for path in paths
    }
    if as_json:
        found = [{"path": str(path), "lines": end} for path, end in ends.items()]
        click.echo(json.dumps(found, indent=2))
        return 0
    for path, end in ends.items():
        click.echo(f"==> {path} <==")
        click.echo("\n".join(end))
    return 0


def shutdown(service: Service, *, as_json: bool) -> int:
    """End the service, with its controller or, if that is gone, without."""
    record = service.folder.load()
    if record is None:
        raise click.ClickException(f"nothing runs in {service.folder.path}")
    try:
        service.ask("POST", "/shutdown")
    except ServeError:
        _end_without_controller(service.folder, record)
    limit = time.monotonic() + END_S + record.app.gateway.shutdown_s
    while service.folder.load() is not None and time.monotonic() < limit:
        time.sleep(0.05)
    is_over = service.folder.load() is None
    while is_over and service.folder.is_controlled() and time.monotonic() < limit:
        time.sleep(0.05)  # it has ended everything, and is about to end itself
    show(
        {"app": record.app.app, "is_over": is_over},
        as_json=as_json,
        text=f"{record.app.app} has ended" if is_over else "it is still ending",
    )
    return 0 if is_over else 1


def _end_without_controller(folder: StateFolder, record: Any) -> None:
    """Ask every process of the record to end, and kill what does not."""
    import signal

    everybody = [(p.pid, p.began) for p in record.processes]
    gateways = [(p.pid, p.began) for p in record.processes if not p.model]
    _end(gateways, signal.SIGTERM, record.app.gateway.shutdown_s)
    _end(everybody, signal.SIGTERM, 10.0)
    _end(everybody, signal.SIGKILL, 10.0)
    if record.store is not None:
        _end([(record.store.pid, record.store.began)], signal.SIGTERM, 10.0)
    folder.forget()


def _end(processes: list[tuple[int, int]], number: int, limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    for pid, began in processes:
        if began_at(pid) == began:
            os.kill(pid, number)
    while time.monotonic() < limit and any(began_at(p) == b for p, b in processes):
        time.sleep(0.02)
