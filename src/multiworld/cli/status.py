"""``multiworld status``: what runs. Shell."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

from multiworld.cli.options import JSON, of_service, service_of
from multiworld.serve.control.client import Service

WATCH_S = 0.5


def run(service: Service, *, as_json: bool, watch: bool) -> int:
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


@click.command()
@of_service
@click.option("--watch", is_flag=True, help="Go on showing it until Ctrl-C.")
@JSON
def status(app: str | None, state: Path | None, watch: bool, as_json: bool) -> None:
    """Show what runs; exits with 1 if it is not ready."""
    service = service_of(app, state)
    sys.exit(run(service, as_json=as_json, watch=watch))
