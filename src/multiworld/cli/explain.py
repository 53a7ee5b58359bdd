"""``multiworld explain``: who waits for whom, and why it is scaled and placed so."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from multiworld.cli.options import JSON, of_service, service_of
from multiworld.serve.control.client import Service


def run(service: Service, last: int, *, snapshots: bool, as_json: bool) -> int:
    """Print what everybody does, and the last decisions with their reasons."""
    found = service.ask("GET", "/status", params={"reports": True})
    decided = service.ask(
        "GET", "/decisions", params={"last": last, "snapshots": snapshots}
    )
    names = [process["name"] for process in found["processes"]]
    lines = [_explained(p, found["reports"].get(p["name"])) for p in found["processes"]]
    if as_json:
        processes = dict(zip(names, lines, strict=True))
        click.echo(json.dumps({"processes": processes, **decided}, indent=2))
        return 0
    for name, line in zip(names, lines, strict=True):
        click.echo(f"{name}: {line}")
    for title, why in found["unplaced"].items():
        click.echo(f"{title} has no place: {why}")
    _show_thoughts(decided["thoughts"])
    _show_decisions(decided["decisions"])
    return 0


def _show_thoughts(thoughts: list[dict[str, Any]]) -> None:
    if thoughts:
        click.echo("\nwhat is thought now:")
    for thought in thoughts:
        about = f" of {thought['about']}" if thought["about"] else ""
        ago_s = time.time() - thought["at"]
        click.echo(f"  {thought['kind']}{about} ({ago_s:.0f} s ago): {thought['what']}")


def _show_decisions(decisions: list[dict[str, Any]]) -> None:
    if not decisions:
        click.echo("\nnothing was decided yet about scaling and placement")
        return
    click.echo(
        "\nthe last decisions (with --json --snapshots: all they were made from):"
    )
    for decided in decisions:
        when = time.strftime("%H:%M:%S", time.localtime(decided["at"]))
        about = f" {decided['about']}" if decided["about"] else ""
        click.echo(f"  {when} {decided['kind']}{about}: {decided['what']}")


def _explained(process: Any, said: Any) -> str:
    if process["phase"] in ("launching", "joined"):
        return f"{process['phase']} for {process['since_s']:.1f} s: loads its stage"
    if process["phase"] == "loaded":
        return f"waits for a probe to come back, for {process['since_s']:.1f} s"
    if said is None:
        return "does not answer: stopped, stuck in a long call, or cut off"
    if not process["model"]:
        at = [f"{count} at {name}" for name, count in said["load"].items() if count]
        waiting = sum(said["waiting"].values())
        silent = f"; silent: {', '.join(said['silent'])}" if said["silent"] else ""
        return (
            f"has {said['in_flight']} requests in flight ({', '.join(at) or 'none'}), "
            f"{waiting} wait to be sent{silent}"
        )
    parts = []
    if said["computing"]:
        parts.append(
            f"computes {said['computing']} requests, for {said['computing_s']:.3f} s"
        )
    if said["waiting_for_next"]:
        names = ", ".join(said["downstream"]) or "a replica of the next stage"
        parts.append(f"{said['waiting_for_next']} answers wait for room at {names}")
    if said["handed"]:
        parts.append(f"{said['handed']} were handed on and are not begun")
    if said["queued"]:
        parts.append(f"{said['queued']} requests wait to be computed")
    return "; ".join(parts) or "waits for work from upstream"


@click.command()
@click.option(
    "-n", "--last", type=click.IntRange(0, 200), default=10, show_default=True
)
@click.option(
    "--snapshots", is_flag=True, help="With --json: all that decisions were made from."
)
@of_service
@JSON
def explain(
    last: int, snapshots: bool, app: str | None, state: Path | None, as_json: bool
) -> None:
    """Say who waits for whom, and why it was scaled and placed as it is."""
    service = service_of(app, state)
    sys.exit(run(service, last, snapshots=snapshots, as_json=as_json))
