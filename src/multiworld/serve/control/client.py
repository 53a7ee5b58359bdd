"""Talks to the controller of a running service. Shell, and blocking."""

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

WHO = "x-multiworld-who"
"""The header that says who asks; the socket is its user's alone."""


class Service:
    """A running service, found by its name or because it is the only one."""

    def __init__(self, app: str | None, state: Path | None) -> None:
        self.folder = StateFolder(state or _find(app))

    def ask(self, method: str, path: str, **what: Any) -> Any:
        """Ask the controller.

        Raises:
            ServeError: It is not there, or refuses.
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
                "`multiworld serve`, which adopts what runs"
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
    """Return who asks, for the audit log."""
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
        there = f"there are: {names}" if names else "none runs"
        raise ServeError(f"no service {app!r} here (looked in {root}); {there}")
    raise ServeError(
        f"several services run: {names}; name one with --app"
        if found
        else f"no service runs here (looked in {root}); start one: multiworld serve"
    )
