"""A blocking client for the controller of a running service. Shell."""

from __future__ import annotations

import getpass
import os
import sys
from pathlib import Path
from typing import Any

import httpx

from multiworld.errors import ServeError
from multiworld.serve.fleet.record import StateFolder, state_root

ASK_S = 30.0
"""Seconds to wait for an answer of the controller."""

WHO = "x-multiworld-who"
"""Header that names the caller. It is trusted: only the user can open the socket."""


class Service:
    """A running service, found by its name or because it is the only one.

    Args:
        app: Name of the service; None if only one runs.
        state: Folder of the service; None to look below the default one.

    Raises:
        ServeError: No such service runs, or several run and no name was given.
    """

    def __init__(self, app: str | None, state: Path | None) -> None:
        self.folder = StateFolder(state or _find(app))

    def ask(self, method: str, path: str, **what: Any) -> Any:
        """Send a request to the controller; return the decoded answer.

        Args:
            method: HTTP method.
            path: Path of the route, with a leading slash.
            what: Arguments of ``httpx.Client.request``, such as ``json``.

        Raises:
            ServeError: No controller answers, or it refuses; ``status`` is the HTTP
                status then.
        """
        socket = httpx.HTTPTransport(uds=str(self.folder.socket))
        try:
            with httpx.Client(transport=socket, timeout=ASK_S) as client:
                headers = {WHO: _who()}
                response = client.request(
                    method, f"http://controller{path}", headers=headers, **what
                )
        except httpx.HTTPError as error:
            raise ServeError(
                f"no controller answers in {self.folder.path} ({error}); start it with "
                "`multiworld serve`, which adopts the running processes"
            ) from error
        if response.is_error:
            try:
                text = response.json()["error"]
            except (ValueError, KeyError, TypeError):
                text = response.text
            refused = ServeError(str(text))
            refused.__dict__["status"] = response.status_code
            raise refused
        return response.json()


def _who() -> str:
    """Return the name of the caller, for the audit log."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        name = f"uid {os.getuid()}"
    command = " ".join(Path(word).name for word in sys.argv[:2])
    return f"{name} ({command})".encode("ascii", "replace").decode()


def running() -> list[Path]:
    """Return the folders of the services that have a record here."""
    return sorted(path.parent for path in state_root().glob("*/record.json"))


def _find(app: str | None) -> Path:
    root = state_root()
    if app is not None and (root / app).is_dir():
        return root / app
    found = running()
    if len(found) == 1 and app is None:
        return found[0]
    names = ", ".join(path.name for path in found)
    if app is not None:
        there = f"running: {names}" if names else "none runs"
        raise ServeError(f"no service {app!r} here (looked in {root}); {there}")
    raise ServeError(
        f"several services run: {names}; name one with --app"
        if found
        else f"no service runs here (looked in {root}); start one: multiworld serve"
    )
