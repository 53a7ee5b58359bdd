"""Options that several commands take, and how they find a service. Shell."""

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
    help="The service's folder; by default ~/.local/state/multiworld/APP, or below "
    "MULTIWORLD_STATE.",
)


def of_service(command: F) -> F:
    """Add the options that find a running service."""
    app = click.option("--app", help="Name of the service; not needed if one runs.")
    return STATE(app(command))


def service_of(app: str | None, state: Path | None) -> Service:
    """Return the running service that the options mean.

    Raises:
        ServeError: There is none, or several and no name was given.
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
    """Ask the controller, and print the outcome.

    Args:
        path: Of its admin interface.
        text: What is printed, with fields of the question and the answer.
        app: Name of the service.
        state: Its folder.
        as_json: Whether JSON is printed.
        what: The body of the question.

    Raises:
        ServeError: The controller is not there, or refuses.
    """
    answer = service_of(app, state).ask("POST", path, json=what)
    show(answer, as_json=as_json, text=text.format(**{**what, **answer}))
