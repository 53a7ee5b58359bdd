"""``multiworld status``: shows the processes of a service. Shell."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from multiworld.cli.options import JSON, of_service, service_of
from multiworld.serve.control.client import Service

WATCH_S = 0.5
"""Seconds between updates with --watch."""

OPERATIONS_SHOWN = 5
"""Most operations listed below the table."""


def run(service: Service, *, as_json: bool, watch: bool) -> int:
    """Print the processes; return 1 if the service is not ready."""
    found = service.ask("GET", "/status", params={"reports": True})
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif not watch:
        Console().print(_shown(found))
    else:
        _watch(service, found)
    return 0 if found["is_ready"] else 1


def _watch(service: Service, found: Any) -> None:
    with Live(_shown(found), refresh_per_second=4) as live:
        try:
            while True:
                time.sleep(WATCH_S)
                found = service.ask("GET", "/status", params={"reports": True})
                live.update(_shown(found))
        except KeyboardInterrupt:
            pass


PHASES = {"ready": "green", "draining": "yellow", "finishing": "yellow"}
"""Colours of phases; red for the others."""


def _shown(found: Any) -> Group:
    parts: list[RenderableType] = [_processes(found)]
    parts += [
        f"[red]{escape(failing['model'])}, stage {failing['stage']}: failed "
        f"{failing['failures']} times: {escape(failing['cause'])}; next start in "
        f"{failing['next_in_s']:.0f} s[/]"
        for failing in found["failing"]
    ]
    parts += [
        f"[red]{escape(title)} has no place: {escape(why)}[/]"
        for title, why in found["unplaced"].items()
    ]
    if found["trouble"]:
        parts.append(f"[red]{escape(found['trouble'])}[/]")
    if found["operations"]:
        parts.append("last operations:")
    for event in found["operations"][-OPERATIONS_SHOWN:]:
        at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
        parts.append(f"  {at} {event['kind']}: {escape(event['text'])}")
    return Group(*parts)


def _processes(found: Any) -> Table:
    state = "[green]ready[/]" if found["is_ready"] else "[red]not ready[/]"
    title = f"{found['app']} is {state} at {found['url']}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    # Never cut: other commands take these names.
    table.add_column("process", no_wrap=True, overflow="ignore")
    table.add_column("stage", no_wrap=True, overflow="ignore")
    table.add_column("phase", no_wrap=True)
    for heading in ("since", "pid", "version"):
        table.add_column(heading)
    for heading in ("queued", "busy", "done"):
        table.add_column(heading, justify="right")
    reports = found.get("reports", {})
    for process in found["processes"]:
        report = reports.get(process["name"]) or {}
        color = PHASES.get(process["phase"], "red")
        table.add_row(
            process["name"],
            process["stage_name"] or "-",
            f"[{color}]{process['phase']}[/]",
            f"{process['since_s']:.0f} s",
            str(process["pid"] or "-"),
            process["version"] or "-",
            *_work(report, is_gateway=not process["model"]),
        )
    return table


def _work(report: dict[str, Any], *, is_gateway: bool) -> tuple[str, str, str]:
    """Return the numbers of queued, running and finished requests."""
    counts = report.get("counts", {})
    if is_gateway:
        waiting = str(sum(report.get("waiting", {}).values()))
        return (
            waiting,
            str(report.get("in_flight", "?")),
            str(counts.get("answered", 0)),
        )
    queued, computing = report.get("queued", "?"), report.get("computing", "?")
    return str(queued), str(computing), str(counts.get("requests", 0))


@click.command()
@of_service
@click.option("--watch", is_flag=True, help="Keep updating the display until Ctrl-C.")
@JSON
def status(app: str | None, state: Path | None, watch: bool, as_json: bool) -> None:
    """Show the processes of a service and its last operations.

    Exits with 1 if the service is not ready.
    """
    service = service_of(app, state)
    sys.exit(run(service, as_json=as_json, watch=watch))
