"""What is known of a service, on disk: a new controller goes on from here. Shell."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from multiworld.errors import ServeError
from multiworld.serve.spec.schema import AppSpec, ModelSpec


class ProcessRecord(BaseModel):
    """One process."""

    model_config = ConfigDict(frozen=True)

    name: str
    model: str
    version: str
    stage: int
    phase: str
    pid: int
    began: int
    node: str = ""
    gpu: int | None = None


class StoreRecord(BaseModel):
    """The store's process."""

    model_config = ConfigDict(frozen=True)

    address: str
    pid: int
    began: int


class Record(BaseModel):
    """A service.

    Attributes:
        specs: Of every version that is known, by model and version.
        number: Of the last table.
        next_number: For the next name.
        replicas: How many are wanted, by model and stage.
    """

    app: AppSpec
    specs: dict[str, dict[str, ModelSpec]]
    active: dict[str, str]
    store: StoreRecord | None = None
    port: int = 0
    number: int = 0
    next_number: int = 1
    replicas: dict[str, list[int]] = {}
    processes: list[ProcessRecord] = []


class AlreadyServedError(ServeError):
    """Another controller runs this service."""


def state_root() -> Path:
    """Return where the state of services is kept."""
    given = os.environ.get("MULTIWORLD_STATE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "multiworld"


class StateFolder:
    """The folder of one service.

    Holds ``record.json``, the ``secret`` of its processes, ``logs/``, the socket of the
    controller, and two files that are only locked: ``controller`` by the controller,
    ``alive`` by every process of the service.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.socket = path / "admin.sock"
        self.alive = path / "alive"
        self._record = path / "record.json"
        self._lock: int | None = None

    def make(self) -> None:
        """Make it, for this user only."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)
        self.alive.touch(mode=0o600)

    def lock(self) -> None:
        """Be the only controller.

        Raises:
            AlreadyServedError: There is one.
        """
        self._lock = os.open(self.path / "controller", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyServedError(
                f"{self.path} has a controller; end it with `multiworld shutdown`, or "
                "give this service another name (app:)"
            ) from None

    def is_controlled(self) -> bool:
        """Return whether a controller runs."""
        try:
            with open(self.path / "controller", "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def hold(self) -> int:
        """Hold the lock of living processes; return the descriptor that does."""
        held = os.open(self.alive, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)
        return held

    def secret(self) -> str:
        """Return the secret of this service's processes, made at the first call."""
        given = os.environ.get("MULTIWORLD_SECRET")
        if given:
            return given
        path = self.path / "secret"
        if not path.exists():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
        return path.read_text()

    def load(self) -> Record | None:
        """Return the record, or None if there is none.

        Raises:
            ServeError: It cannot be read.
        """
        try:
            data: Any = json.loads(self._record.read_text())
            return Record.model_validate(data)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ServeError(
                f"{self._record} cannot be read ({error}); end the processes it names "
                "and remove it"
            ) from error

    def save(self, record: Record) -> None:
        """Replace the record, as a whole or not at all."""
        fresh = self._record.with_suffix(".new")
        fresh.write_text(record.model_dump_json(indent=1))
        fresh.replace(self._record)

    def forget(self) -> None:
        """Remove the record: nothing runs any more."""
        self._record.unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)
