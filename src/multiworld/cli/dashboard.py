"""``multiworld dashboard``: a web page that shows a running service."""

from __future__ import annotations

import ipaddress
import secrets

import click

from multiworld.cli.options import APP, STATE
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.observe.facts import Facts
from multiworld.serve.dashboard.server import PageServer, make_dashboard

PORT = 8265


@click.command()
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help="Port.")
@STATE
@APP
def dashboard(app: str | None, state: str | None, host: str, port: int) -> None:
    """Show a running service on a web page, until Ctrl-C.

    The page shows models, stages and replicas with their load, latencies, events and
    diagnoses as they change. It can also scale stages, drain replicas and inject
    faults. On an address other than loopback, visitors need the key in the address that
    is printed.
    """
    service = Service(app, state)  # type: ignore[arg-type]
    found = service.ask("GET", "/facts", Facts)
    key = "" if _is_loopback(host) else secrets.token_urlsafe(24)
    server = PageServer(make_dashboard(service, key), host, port)
    with server.bind() as sock:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{sock.getsockname()[1]}/"
        click.echo(f"{found.app} is shown at {address}{f'?key={key}' if key else ''}")
        server.run(sockets=[sock])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
