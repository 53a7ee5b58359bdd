"""``multiworld serve``: runs the service of a spec in the foreground."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape

from multiworld.cli.options import JSON, SPEC, STATE
from multiworld.serve.controller.fleet.record import StateFolder, state_root
from multiworld.serve.controller.process_one import leave_process_one
from multiworld.serve.spec.loader import load_spec

if TYPE_CHECKING:
    from multiworld.serve.controller.controller import Controller
    from multiworld.serve.controller.startup import Startup


@click.command()
@SPEC
@STATE
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print what happens to the processes of the service.",
)
@JSON
def serve(spec: Path, state: Path | None, verbose: bool, as_json: bool) -> None:
    """Serve the models of SPEC (a YAML file) until Ctrl-C.

    If the controller of a running service was lost, this adopts its processes, which
    have kept answering requests.
    """
    leave_process_one()
    console = Console(stderr=as_json)
    if verbose:
        logging.getLogger("multiworld.serve").setLevel(logging.INFO)
    app = load_spec(spec)
    folder = StateFolder(state or state_root() / app.app)
    if not as_json:
        console.print(f"starting {app.app} …")
    # Imported late, because importing torch takes a second or more.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # so that this process can be forked
    from multiworld.serve.controller.answers import plain
    from multiworld.serve.controller.launchers.fork_server import fork_waiting
    from multiworld.serve.controller.launchers.registry import LAUNCHERS
    from multiworld.serve.controller.service import run_service

    def up(controller: Controller, startup: Startup) -> None:
        if as_json:
            click.echo(json.dumps(plain(controller.status())))
            return
        console.print(f"[green]{app.app} is ready[/] at {escape(controller.url)}")
        console.print(f"  after {startup}", soft_wrap=True)
        # Not those of the file: an update may have changed them before.
        for name, model in controller.fleet.desired.models.items():
            counts = zip(
                controller.specs[name][model.version].stages,
                model.replicas,
                strict=True,
            )
            stages = " → ".join(
                f"{stage.name or n} x{count}" for n, (stage, count) in enumerate(counts)
            )
            line = f"  model {name} (version {model.version}): {stages}"
            if name in controller.dtypes:
                line += f", in {controller.dtypes[name]}"
            console.print(line, soft_wrap=True, markup=False)
        console.print(
            f"  docs {controller.url}/docs · metrics {controller.url}/metrics · "
            f"logs {folder.logs}",
            soft_wrap=True,
            markup=False,
        )
        console.print(
            "  Ctrl-C ends the service; `multiworld status` shows its processes"
        )

    def progress(text: str) -> None:
        if not as_json and not verbose:
            console.print(f"  {text}", soft_wrap=True, markup=False, highlight=False)

    waiting = fork_waiting() if app.launcher in LAUNCHERS else None
    sys.exit(asyncio.run(run_service(app, folder, up, progress, waiting)))
