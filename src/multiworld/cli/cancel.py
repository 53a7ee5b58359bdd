"""``multiworld cancel``: ends the streams of a request."""

from __future__ import annotations

import click

from multiworld.cli.options import of_service, show
from multiworld.serve.controller.answers import Cancelled, plain
from multiworld.serve.controller.client import Service


@click.command()
@click.argument("request")
@of_service
def cancel(service: Service, request: str, as_json: bool) -> None:
    """End the streams of the request with this id, whichever gateway has it.

    Its client gets an error with the code "cancelled". The id is in the response's
    header X-Request-ID, in logs, and on the dashboard.
    """
    done = service.ask("POST", "/cancel", Cancelled, json={"request": request})
    text = f"ended the streams of request {request}"
    show(plain(done), as_json=as_json, text=text)
