"""``multiworld dashboard``: a web page that shows a running service."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Callable
from types import FrameType

import click
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from multiworld.cli.options import APP, STATE
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.observe.facts import Facts
from multiworld.serve.dashboard.server import make_dashboard

PORT = 8265
SEND_BYTES = 16 * 1024  # small: data that waits in the kernel is soon outdated


class _Protocol(H11Protocol):
    """Buffers little for a slow connection, so newer facts replace waiting ones."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)


class _Server(uvicorn.Server):
    """Ends the streams of open pages before it waits for all requests to end."""

    on_exit: Callable[[], None]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.on_exit()
        super().handle_exit(sig, frame)


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
    shown_page = make_dashboard(service, key)
    server = _Server(
        uvicorn.Config(
            shown_page,
            host=host,
            port=port,
            http=_Protocol,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )
    server.on_exit = shown_page.end
    config = server.config
    with config.bind_socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{sock.getsockname()[1]}/"
        click.echo(f"{found.app} is shown at {address}{f'?key={key}' if key else ''}")
        server.run(sockets=[sock])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
