"""``multiworld drain``: replaces one process without losing a request."""

from __future__ import annotations

import click

from multiworld.cli.options import of_service, show
from multiworld.serve.controller.answers import Drained, plain
from multiworld.serve.controller.client import Service


@click.command()
@click.argument("name")
@of_service
def drain(service: Service, name: str, as_json: bool) -> None:
    """Replace the process NAME (see status) without losing a request.

    Its replacement starts first; once that is ready, the process finishes its work and
    exits.
    """
    drained = service.ask("POST", "/drain", Drained, json={"name": name})
    text = "starting its replacement; then it finishes its work and exits"
    show(plain(drained), as_json=as_json, text=f"{name}: {text}")
