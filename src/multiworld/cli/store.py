"""``multiworld store``: runs the store at which members of worlds meet."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from multiworld.net.security import Security
from multiworld.rendezvous.epoch_file import EpochFile
from multiworld.rendezvous.store_server import StoreServer
from multiworld.rendezvous.store_service import StoreService

# Seconds without admissions after a restart: twice the longest pause between
# reconnects, so that earlier members announce their ranks first.
SETTLE_S = 1.0
LOOK_S = 1.0  # seconds between checks of the lock
# The store exits after this many consecutive checks without a lock. One check is not
# enough, because the service may still be starting.
ALONE = 5


async def _wait_alone(path: Path) -> None:
    """Wait until no process has held a shared lock on a file for several checks."""
    looks = 0
    while looks < ALONE:
        await asyncio.sleep(LOOK_S)
        looks = 0 if _is_held(path) else looks + 1


def _is_held(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


async def serve(
    host: str,
    port: int,
    state: Path | None,  # file of epochs; None: only in memory
    security: Security,
    while_locked: Path | None,
    *,
    as_json: bool,
) -> None:
    """Serve until SIGINT or SIGTERM, or until no process holds ``while_locked``."""
    try:
        memory = None if state is None else EpochFile(state)
    except OSError as error:
        why = f"cannot write epochs to {state}: {error.strerror or error}"
        raise click.ClickException(
            f"{why}; create its folder, or give another --state"
        ) from error
    service = StoreService(memory=memory, settle_s=SETTLE_S)
    try:
        server = await StoreServer.listen(
            host, port, service=service, security=security
        )
    except OSError as error:
        raise click.ClickException(
            f"cannot listen at {host}:{port}: {error.strerror or error}; give an "
            "address of this host (--host) and a free port (--port)"
        ) from error
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    shown = f"[{host}]" if ":" in host else host
    address = f"tcp://{shown}:{server.port}"
    asked = {"secret": bool(security.secret), "tls": security.tls is not None}
    if as_json:
        click.echo(json.dumps({"store": address, "pid": os.getpid(), **asked}))
    else:
        words = [name for name, is_on in asked.items() if is_on] or ["nothing"]
        click.echo(f"multiworld store at {address} (requires: {', '.join(words)})")
        if host in ("0.0.0.0", "::"):  # the store listens on every interface
            address = f"tcp://ADDRESS:{server.port}, with an address of this host"
        click.echo(f"for the members: export MULTIWORLD_STORE={address}")
    ends: list[asyncio.Task[Any]] = [loop.create_task(stopped.wait())]
    if while_locked is not None:
        ends.append(loop.create_task(_wait_alone(while_locked)))
    # If cancelled, the listener stays open until the event loop ends.
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    refused = server.refused
    await server.close()
    if memory is not None:
        memory.close()
    if refused and not as_json:
        counts = ", ".join(f"{count} {kind}" for kind, count in refused.items())
        click.echo(f"refused: {counts}")


@click.command()
@click.option(
    "--host",
    default="127.0.0.1",
    help="Address of this host to listen on; members must be able to reach it.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=29500,
    help="Port to listen on; 0: any free port.",
)
@click.option(
    "--state",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File for the epochs, so that they keep growing after a restart.",
)
@click.option(
    "--while-locked",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Exit when no process holds a shared lock on this file.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
def store(
    host: str, port: int, state: Path | None, while_locked: Path | None, as_json: bool
) -> None:
    """Run the store at which members of worlds meet, until it is stopped.

    Members find it through MULTIWORLD_STORE or the store= of join. Ready worlds survive
    its loss, and members reconnect once it is restarted. For a standby, start a second
    store, and give the members both addresses, separated by a comma.

    The secret comes from MULTIWORLD_SECRET or MULTIWORLD_SECRET_FILE, certificates from
    MULTIWORLD_TLS_CERT, MULTIWORLD_TLS_KEY and MULTIWORLD_TLS_CA.
    """
    security = Security.from_environment()
    try:
        asyncio.run(serve(host, port, state, security, while_locked, as_json=as_json))
    except KeyboardInterrupt:
        sys.exit(130)
