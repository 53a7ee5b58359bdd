"""``multiworld scale``: sets the number of replicas of a stage."""

from __future__ import annotations

import sys

import click

from multiworld.cli.options import of_service, show
from multiworld.errors import ServeError
from multiworld.serve.controller.answers import Scaled, plain
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.operations import ConfirmationNeededError


@click.command()
@click.argument("model")
@click.argument("stage")
@click.argument("replicas", type=click.IntRange(0, 4096))
@click.option(
    "--yes",
    is_flag=True,
    help="Do not ask before starting many more replicas than cores.",
)
@of_service
def scale(
    service: Service, model: str, stage: str, replicas: int, yes: bool, as_json: bool
) -> None:
    """Set the number of REPLICAS of STAGE (its name or number) of MODEL.

    Asks for confirmation before starting many more replicas than there are cores.
    """
    what = {"model": model, "stage": stage, "replicas": replicas}
    try:
        answer = _ask(service, {**what, "is_confirmed": yes})
    except ServeError as error:
        if error.status != ConfirmationNeededError.status or not sys.stdin.isatty():
            raise
        click.confirm(f"{error}. Scale anyway?", abort=True)
        answer = _ask(service, {**what, "is_confirmed": True})
    text = f"{model}/{stage}: from {answer.before} to {answer.replicas} replicas"
    show(plain(answer), as_json=as_json, text=text)


def _ask(service: Service, what: dict[str, object]) -> Scaled:
    return service.ask("POST", "/scale", Scaled, json=what)
