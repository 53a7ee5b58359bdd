"""``multiworld serve``, ``plan``, ``schema``: from a spec to a running service."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import click
from rich.console import Console

from multiworld.serve.control.controller import Controller
from multiworld.serve.control.service import run_service
from multiworld.serve.fleet.record import StateFolder, state_root
from multiworld.serve.spec.loader import load_spec, schema


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
            counts = controller.fleet.desired.models[name].replicas
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


def print_schema() -> int:
    """Print the JSON Schema of a spec."""
    click.echo(json.dumps(schema(), indent=2))
    return 0
