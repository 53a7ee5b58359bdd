"""Record of a service on disk, from which a new controller resumes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from multiworld.errors import ConfigError, ServeError
from multiworld.net.rare_log import RareLog
from multiworld.net.security import Security
from multiworld.serve.controller.fleet.desired_state import Sizes
from multiworld.serve.engine.models.caches import home_folder
from multiworld.serve.spec.schema import AppSpec, ModelSpec

FORMAT = 1  # format of ``record.json``
MAX_SOCKET_PATH = 107  # maximum bytes of a socket's path on Linux


class ProcessRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: str
    model: str
    version: str
    stage: int
    phase: str
    pid: int
    began: int  # start time in the kernel's ticks; differs if ``pid`` is reused
    node: str = ""  # name of its machine; empty: the controller's
    gpus: tuple[int, ...] = ()
    is_drain_requested: bool = False
    fingerprint: str = ""
    weights: str = ""
    noise: str = ""
    options: str = ""  # digest of a gateway's options at its start


class StoreRecord(BaseModel):
    """The store's process; `began` is its start time in the kernel's ticks."""

    model_config = ConfigDict(frozen=True)

    address: str
    pid: int
    began: int


class Record(BaseModel):
    format: int = FORMAT
    app: AppSpec
    # Specs of all known versions, by model and version.
    specs: dict[str, dict[str, ModelSpec]]
    active: dict[str, str]
    store: StoreRecord | None = None
    port: int = 0
    number: int = 0  # number of the last routing table
    next_number: int = 1  # number in the name of the next process
    # By model and version, desired or not: replicas of each stage.
    sizes: dict[str, dict[str, list[int]]] = {}
    processes: list[ProcessRecord] = []


def sizes_before(old: Record, app: AppSpec) -> dict[str, Sizes]:
    """Return each model's recorded sizes: its own version's, else the active one's."""
    found = {}
    for name, model in app.models.items():
        sizes, specs = old.sizes.get(name, {}), old.specs.get(name, {})
        for version in (model.version, old.active.get(name, "")):
            if version in sizes and version in specs:
                found[name] = Sizes(sizes[version], specs[version])
                break
    return found


# Linux's ``struct flock``: a write lock on the whole file. The lock belongs to the open
# file, so the kernel releases it when the last process holding the file exits.
_WHOLE_FILE = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


NUMBERED = re.compile(r"(\d+)$")  # the number at the end of a process's name


class AlreadyServedError(ServeError):
    """The service already has a controller."""


def already_served(folder: Path) -> AlreadyServedError:
    return AlreadyServedError(
        f"a controller already runs in {folder}; end it with `multiworld shutdown`, or "
        "give this service another name (app:)"
    )


def state_root() -> Path:
    """Return the folder that holds the state of all services of this user."""
    given = os.environ.get("MULTIWORLD_STATE")
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    folder = Path(base).expanduser() if base else home_folder(".local/state")
    return folder / "multiworld"


def _unusable(path: Path, error: OSError) -> ServeError:
    what = "move it away, or give another --state"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
        what = "check the disk and start again; keep the existing files"
    return ServeError(f"cannot use {path}: {error.strerror}; {what}")


def _flush(file: IO[str]) -> None:
    """Flush a file to disk, so that a crash after a rename leaves no empty file."""
    file.flush()
    os.fsync(file.fileno())


def _kept_secret(path: Path) -> bytes:
    """Return the secret in a file; create it if it is missing or empty."""
    if not path.exists() or not path.stat().st_size:
        # Write another file first, so that a crash leaves no partial secret.
        fresh = path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
            _flush(file)
        fresh.replace(path)
    return path.read_bytes()


class StateFolder:
    """The folder of one service."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # The controller locks ``controller``; every process of the service locks
        # ``alive``.
        self.logs = path / "logs"
        self.socket = path / "admin.sock"
        self.alive = path / "alive"
        self.keeper = path / "keep.sock"  # socket of the stream keeper
        self._record = path / "record.json"
        self.versions = path / "versions"  # copies of the files of each version

    def make(self) -> None:
        """Create the folder, readable by this user only."""
        size = len(os.fsencode(self.socket))
        if size > MAX_SOCKET_PATH:
            raise ServeError(
                f"the path {self.socket} has {size} bytes, but a socket's path may "
                f"have at most {MAX_SOCKET_PATH}; give a shorter --state"
            )
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self.alive.touch(mode=0o600)
            if not self.alive.is_file():
                raise FileExistsError(f"{self.alive} is not a file")
            if self.socket.exists() and not self.socket.is_socket():
                raise FileExistsError(f"{self.socket} is not a socket")
        except OSError as error:
            raise ServeError(
                f"cannot use {self.path} as the folder of this service: {error}; move "
                "what is in the way, or give another --state"
            ) from error

    def lock(self, *, is_controller: bool = True) -> int:
        """Lock the folder as the service's only controller; return its descriptor.

        ``is_controller``: False for a command, which keeps controllers out meanwhile.
        """
        path = self.path / "controller"
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except BlockingIOError:
            os.close(lock)
            raise already_served(self.path) from None
        with contextlib.suppress(OSError):
            # The disk may be full. That is harmless: the id is only for messages.
            os.truncate(lock, 0)
            if is_controller:
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def controller(self) -> str:
        """Return the process id of the latest controller; "" if it is unknown."""
        try:
            return (self.path / "controller").read_text().strip()
        except OSError:
            return ""

    def is_controlled(self) -> bool:
        """Return whether a controller runs, without ever taking the lock itself."""
        try:
            with open(self.path / "controller", "rb") as file:
                found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WHOLE_FILE)
        except OSError:  # the file does not exist, or belongs to another user
            return False
        kind: int = struct.unpack_from("h", found)[0]
        return kind != fcntl.F_UNLCK

    def has_record(self) -> bool:
        """Return whether a controller has recorded processes here."""
        return self._record.exists()

    def hold(self) -> int:
        """Take the shared lock of the service's processes; return its descriptor."""
        held = os.open(self.alive, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_SH)
        return held

    def secret(self) -> str:
        """Return the environment's secret, else the folder's secret (created once)."""
        given = Security.from_environment(os.environ).secret
        if given:
            try:
                return given.decode()
            except UnicodeDecodeError:
                rule = "a service needs a secret that is UTF-8"
                raise ConfigError("MULTIWORLD_SECRET_FILE", "...", rule) from None
        path = self.path / "secret"
        try:
            content = _kept_secret(path)
        except OSError as error:
            raise _unusable(path, error) from error
        if re.fullmatch(rb"[0-9a-f]{64}", content) is None:
            raise ServeError(
                f"{path} does not hold a secret (64 hexadecimal digits); if no process "
                "of this service runs, remove it"
            )
        return content.decode()

    def load(self) -> Record | None:
        try:
            data: Any = json.loads(self._record.read_text(encoding="utf-8"))
            found = data.get("format", FORMAT) if isinstance(data, dict) else FORMAT
            if found != FORMAT:
                raise ServeError(
                    f"{self._record} has format {found!r}, and this release reads "
                    f"{FORMAT}; use the release that wrote it"
                )
            return Record.model_validate(data)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(self._record, error) from error
        except ValueError as error:
            raise ServeError(
                f"{self._record} cannot be read ({error}); kill the processes that "
                "it names, and remove the file"
            ) from error

    def save(self, record: Record) -> None:
        fresh = self._record.with_suffix(".new")
        with fresh.open("w", encoding="utf-8") as file:
            file.write(record.model_dump_json(indent=1))
            _flush(file)
        fresh.replace(self._record)

    def next_number(self) -> int:
        """Return a number above the numbers of all processes that have logs here."""
        # If the disk was full, the record may lack the latest processes, so use the
        # logs.
        numbers = (NUMBERED.search(log.stem) for log in self.logs.glob("*.log"))
        return 1 + max((int(found[1]) for found in numbers if found), default=0)

    def forget(self) -> None:
        """Remove the record, the socket and copied files, once no process is left."""
        self._record.unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)
        shutil.rmtree(self.versions, ignore_errors=True)


class RecordWriter:
    """Writes records, skipping outdated ones; a slow disk blocks nothing else."""

    def __init__(self, save: Callable[[Record], None], log: RareLog) -> None:
        self._save, self._log = save, log
        self.trouble = ""  # why the newest record is not on disk; empty: it is
        self._newest: Record | None = None
        self._saved: Record | None = None
        self._writing: asyncio.Task[None] | None = None
        # ``_kept``: number of ``keep`` calls. ``_tried``: number of the latest call
        # whose record was written, or could not be written.
        self._kept = self._tried = 0
        self._tried_one = asyncio.Event()

    def keep(self, record: Record) -> None:
        """Write a record soon, unless it equals the last one written."""
        self._newest = record
        self._kept += 1
        if self._writing is not None and not self._writing.done():
            return
        if record == self._saved:
            self.trouble, self._tried = "", self._kept
        else:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def settled(self, limit_s: float) -> None:
        """Wait at most ``limit_s`` until the newest record is written or failed."""
        wanted = self._kept
        try:
            async with asyncio.timeout(limit_s):
                while self._tried < wanted:
                    await self._tried_one.wait()
        except TimeoutError:
            pass

    async def _write(self) -> None:
        while self._newest is not None and self._newest != self._saved:
            record, number = self._newest, self._kept
            try:
                await asyncio.to_thread(self._save, record)
            except Exception as error:
                # Only logged, because the next ``keep`` tries again.
                self.trouble = f"cannot write the record of the service: {error}"
                self._log.error("cannot write the record of the service", error)
                self._has_tried(self._kept)
                return
            self.trouble = ""
            self._saved = record
            self._has_tried(number)
        self._has_tried(self._kept)

    def _has_tried(self, number: int) -> None:
        self._tried = number
        self._tried_one.set()
        self._tried_one = asyncio.Event()
