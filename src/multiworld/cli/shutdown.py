"""``multiworld shutdown``: shuts a service down, even without its controller."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import NoReturn

import click

from multiworld.cli.options import of_service, show
from multiworld.errors import ServeError
from multiworld.serve.controller.answers import ShuttingDown
from multiworld.serve.controller.client import Service
from multiworld.serve.controller.fleet.record import (
    AlreadyServedError,
    Record,
    StateFolder,
)
from multiworld.serve.controller.launchers.base import began_at

END_S = 60.0  # seconds to wait for the shutdown, in addition to the spec's shutdown_s


def _end_without_controller(folder: StateFolder, record: Record) -> None:
    """Send SIGTERM to every recorded process, and SIGKILL to those that stay."""
    everybody = [(p.pid, p.began) for p in record.processes]
    gateways = [(p.pid, p.began) for p in record.processes if not p.model]
    _end(gateways, signal.SIGTERM, record.app.gateway.shutdown_s)
    _end(everybody, signal.SIGTERM, 10.0)
    _end(everybody, signal.SIGKILL, 10.0)
    if record.store is not None:
        _end([(record.store.pid, record.store.began)], signal.SIGTERM, 10.0)
    folder.forget()


def _end(processes: list[tuple[int, int]], number: int, limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    for pid, began in processes:
        if began_at(pid) == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    while time.monotonic() < limit and any(began_at(p) == b for p, b in processes):
        time.sleep(0.02)


@click.command()
@of_service
def shutdown(service: Service, as_json: bool) -> None:
    """Shut a service down after it has answered the accepted requests."""
    record = service.folder.load()
    if record is None:
        if not service.folder.is_controlled():
            raise click.ClickException(f"no service runs in {service.folder.path}")
        # Without a record, the controller has started no process: it still waits for
        # machines, or builds models.
        app = service.folder.path.name
        with contextlib.suppress(ServeError):
            # The service may be shutting down already.
            app = service.ask("POST", "/shutdown", ShuttingDown).app
        _await_end(service.folder, END_S)
        _show_end(app, as_json, is_over=not service.folder.is_controlled())
    try:
        service.ask("POST", "/shutdown", ShuttingDown)
    except ServeError as error:
        if "status" in error.__dict__:  # the controller has answered, and has refused
            raise
        if service.folder.is_controlled():
            # A running controller would restart processes that this command ends.
            pid = service.folder.controller()
            if not pid:
                raise click.ClickException(
                    "another command is ending the service; wait for it"
                ) from None
            raise click.ClickException(
                f"the controller (process {pid}) runs, but does not answer; kill it, "
                "and repeat this command"
            ) from None
        if record.app.launcher == "ray":
            raise click.ClickException(
                "no controller runs, and only a controller can release what the "
                "service has reserved on the Ray cluster: start one with `multiworld "
                "serve`, and repeat this command"
            ) from None
        # Held meanwhile: a controller that started now would adopt these processes.
        try:
            lock = service.folder.lock(is_controller=False)
        except AlreadyServedError:
            raise click.ClickException(
                "a controller has just started; repeat this command"
            ) from None
        try:
            _end_without_controller(service.folder, service.folder.load() or record)
        finally:
            os.close(lock)
    _await_end(service.folder, END_S + record.app.gateway.shutdown_s)
    _show_end(record.app.app, as_json, is_over=service.folder.load() is None)


def _await_end(folder: StateFolder, limit_s: float) -> None:
    """Wait until the service is gone, and then until its controller has exited."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit and (
        folder.load() is not None or folder.is_controlled()
    ):
        time.sleep(0.05)


def _show_end(app: str, as_json: bool, *, is_over: bool) -> NoReturn:
    show(
        {"app": app, "is_over": is_over},
        as_json=as_json,
        text=f"{app} has ended"
        if is_over
        else f"{app} has not ended yet; see `multiworld status`",
    )
    sys.exit(0 if is_over else 1)
