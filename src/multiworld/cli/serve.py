"""``multiworld serve``, ``plan``, ``schema``: from a spec to a running service."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from multiworld.serve.control.controller import Controller
from multiworld.serve.control.record import StateFolder, state_root
from multiworld.serve.control.service import run_service
from multiworld.serve.control.wanting import bounds_of
from multiworld.serve.loading import load_spec, schema
from multiworld.serve.sources import build_model, stage_name


def serve(path: Path, state: Path | None, *, as_json: bool, is_verbose: bool) -> int:
    """Run a service in the foreground."""
    console = Console(stderr=as_json)
    if is_verbose:
        logging.getLogger("multiworld.serve").setLevel(logging.INFO)
    app = load_spec(path)
    folder = StateFolder(state or state_root() / app.app)

    def up(controller: Controller) -> None:
        if as_json:
            click.echo(json.dumps(controller.status()))
            return
        console.print(f"[green]{app.app} is ready[/] at {controller.url}")
        for name, model in app.models.items():
            counts = controller.fleet.wanted.models[name].replicas
            stages = " → ".join(
                f"{s.name or n} x{counts[n]}" for n, s in enumerate(model.stages)
            )
            console.print(f"  model {name} (version {model.version}): {stages}")
        console.print(
            f"  docs {controller.url}/docs · metrics {controller.url}/metrics · "
            f"logs {folder.logs}",
            soft_wrap=True,
        )
        console.print("  Ctrl-C ends it; `multiworld status` shows it")

    if not as_json:
        console.print(f"starting {app.app} …")
    return asyncio.run(run_service(app, folder, up))


def plan(path: Path, *, as_json: bool) -> int:
    """Show what a spec would start."""
    app = load_spec(path)
    rows: list[dict[str, Any]] = []
    for name, spec in app.models.items():
        model = build_model(spec)
        for number, stage in enumerate(spec.stages):
            low, high = bounds_of(spec, number)
            rows.append(
                {
                    "model": name,
                    "version": spec.version,
                    "stage": number,
                    "name": stage_name(spec, model, number),
                    "replicas": stage.least,
                    "min_replicas": low,
                    "max_replicas": high,
                    "max_batch_size": stage.max_batch_size,
                    "max_wait_ms": stage.max_wait_ms,
                    "ranks": stage.ranks,
                    "device": stage.device,
                    "threads": stage.threads,
                }
            )
    gateway = app.gateway
    workers = sum(row["replicas"] * row["ranks"] for row in rows)
    processes = workers + gateway.replicas + 3
    found = {
        "app": app.app,
        "stages": rows,
        "gateways": gateway.replicas,
        "listens": f"{gateway.host}:{gateway.port or '(a free port)'}",
        "processes": processes,
    }
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return 0
    table = Table(title=f"{app.app}: what would be started")
    for title in ("model", "stage", "replicas", "batch", "wait", "device", "threads"):
        table.add_column(title)
    for row in rows:
        spread = f"{row['replicas']}"
        if row["ranks"] > 1:
            spread += f" of {row['ranks']} ranks"
        if row["min_replicas"] != row["max_replicas"]:
            spread += f" ({row['min_replicas']} to {row['max_replicas']})"
        table.add_row(
            f"{row['model']} {row['version']}",
            f"{row['stage']} {row['name']}",
            spread,
            str(row["max_batch_size"]),
            f"{row['max_wait_ms']:g} ms",
            row["device"],
            str(row["threads"]),
        )
    console = Console()
    console.print(table)
    console.print(
        f"{gateway.replicas} gateway(s) at {found['listens']}, a store, a fork server "
        f"and the controller: {processes} processes"
    )
    return 0


def print_schema() -> int:
    """Print the JSON Schema of a spec."""
    click.echo(json.dumps(schema(), indent=2))
    return 0
