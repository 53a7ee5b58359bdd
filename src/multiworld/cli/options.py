"""Options, tables and requests that several commands share. Shell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from multiworld.serve.control.client import Service

F = TypeVar("F", bound=Callable[..., Any])

SPEC = click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
STATE = click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the service; by default ~/.local/state/multiworld/APP, or "
    "MULTIWORLD_STATE/APP.",
)


def of_service(command: F) -> F:
    """Add the options that find a running service."""
    app = click.option("--app", help="Name of the service; needed only if several run.")
    return STATE(app(command))


def service_of(app: str | None, state: Path | None) -> Service:
    """Return the running service that the options name.

    Raises:
        ServeError: No such service runs, or several run and no name was given.
    """
    return Service(app, state)


def show(data: Any, *, as_json: bool, text: str) -> None:
    """Print an outcome, as JSON or as text."""
    click.echo(json.dumps(data, indent=2) if as_json else text)


def ask(
    path: str,
    text: str,
    app: str | None,
    state: Path | None,
    *,
    as_json: bool,
    **what: Any,
) -> None:
    """Send a request to the controller, and print the outcome.

    Args:
        path: Path of a route of the admin interface.
        text: Text to print; its fields are those of the request and the answer.
        app: Name of the service.
        state: Folder of the service.
        as_json: Print the answer as JSON instead.
        what: Body of the request.

    Raises:
        ServeError: No controller answers, or it refuses.
    """
    answer = service_of(app, state).ask("POST", path, json=what)
    show(answer, as_json=as_json, text=text.format(**{**what, **answer}))
