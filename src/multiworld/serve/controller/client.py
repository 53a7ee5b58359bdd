"""A blocking client for the controller of a running service."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import orjson

from multiworld.errors import ServeError
from multiworld.serve.controller.answers import (
    AnswerFormError,
    RefusedByController,
    decode,
)
from multiworld.serve.controller.fleet.record import StateFolder, state_root

T = TypeVar("T")

ASK_S = 30.0  # seconds to wait for the controller's response
# Header with the caller's name, for the audit log. The controller trusts it, because
# only the service's user can open the admin socket.
WHO = "x-multiworld-who"


class Service:
    """A running service; found by its folder `state` or its name, or the only one."""

    def __init__(self, app: str | None, state: Path | None) -> None:
        self.folder = StateFolder(state or _find(app))

    def ask(
        self,
        method: str,
        path: str,
        kind: type[T],
        *,
        json: Mapping[str, object] | None = None,
        params: Mapping[str, str | float | bool] | None = None,
        limit_s: float = ASK_S,
    ) -> T:
        """Send a request; a refusal raises ``ServeError`` with its HTTP ``status``."""
        words = {False: "false", True: "true"}
        query = {
            name: words[value] if isinstance(value, bool) else value
            for name, value in (params or {}).items()
        }
        # The caller has quoted ``path``.
        try:
            target = f"{path}?{urlencode(query)}" if query else path
            body = None if json is None else orjson.dumps(json)
        except (TypeError, UnicodeEncodeError) as error:
            raise ServeError("an argument is not valid UTF-8") from error
        try:
            status, content = self._exchange(method, target, body, limit_s)
        except (OSError, HTTPException) as error:
            remedy = (
                "it runs, but may be busy; if it stays busy, kill it, and then run"
                if self.folder.is_controlled()
                else "start it with"
            )
            raise ServeError(
                f"no controller answers in {self.folder.path} ({error}); {remedy} "
                "`multiworld serve`, which adopts the running processes"
            ) from error
        if status >= 300:  # a name that is empty, or has a slash, is redirected
            refused = ServeError(_text_of(content))
            refused.__dict__["status"] = status
            raise refused
        try:
            return decode(content, kind)
        except AnswerFormError as error:
            raise ServeError(
                f"the controller answered {method} {path} in a format that this "
                f"release does not know ({error}); use the same release for both"
            ) from error

    def _exchange(
        self, method: str, target: str, body: bytes | None, limit_s: float
    ) -> tuple[int, bytes]:
        headers = {WHO: _who()}
        if body is not None:
            headers["content-type"] = "application/json"
        connection = _UnixConnection(self.folder.socket, limit_s)
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, limit_s: float) -> None:
        super().__init__("controller", timeout=limit_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _text_of(refusal: bytes) -> str:
    try:
        return decode(refusal, RefusedByController).error
    except AnswerFormError:
        # FastAPI itself has rejected the body or the query, and has answered in its own
        # format.
        return refusal.decode(errors="replace")


def _who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may have no name
        name = f"uid {os.getuid()}"
    command = " ".join(Path(word).name for word in sys.argv[:2])
    return f"{name} ({command})".encode("ascii", "replace").decode()


def running() -> list[Path]:
    """Return the folders of services that run or are being started."""
    folders = sorted(path for path in state_root().glob("*/") if path.is_dir())
    return [
        path
        for path in folders
        if os.path.exists(path / "record.json") or StateFolder(path).is_controlled()
    ]


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
