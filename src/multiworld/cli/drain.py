"""``multiworld drain``: replaces one process without losing a request."""

from __future__ import annotations

from pathlib import Path

import click

from multiworld.cli.options import JSON, of_service, service_of, show
from multiworld.serve.control.answers import Drained, plain


@click.command()
@click.argument("name")
@of_service
@JSON
def drain(name: str, app: str | None, state: Path | None, as_json: bool) -> None:
    """Replace the process NAME (see status) without losing a request.

    Its replacement starts first; once that is ready, the process finishes its work and
    exits.
    """
    what = {"name": name}
    drained = service_of(app, state).ask("POST", "/drain", Drained, json=what)
    text = "starting its replacement; then it finishes its work and exits"
    show(plain(drained), as_json=as_json, text=f"{name}: {text}")
