"""The state folder of a service: its record, locks and secret."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import ConfigError, ServeError
from multiworld.net.rare_log import RareLog
from multiworld.serve.controller.fleet.record import (
    AlreadyServedError,
    ProcessRecord,
    Record,
    RecordWriter,
    StateFolder,
    StoreRecord,
    sizes_before,
    state_root,
)
from multiworld.serve.spec.schema import AppSpec
from tests.unit.waiting import until

APP = AppSpec.model_validate({"models": {"m": {"factory": "x:y", "stages": [{}]}}})


def record(**more: Any) -> Record:
    processes = [
        ProcessRecord(
            name=f"m/0/{pid}",
            model="m",
            version="1",
            stage=0,
            phase="ready",
            pid=pid,
            began=9,
        )
        for pid in (11, 12)
    ]
    given: dict[str, Any] = {
        "app": APP,
        "specs": {"m": {"1": APP.models["m"]}},
        "active": {"m": "1"},
        "store": StoreRecord(address="tcp://127.0.0.1:1", pid=10, began=8),
        "processes": processes,
    }
    return Record(**{**given, **more})


def version(number: str, replicas: int) -> AppSpec:
    model = {"factory": "x:y", "version": number, "stages": [{"replicas": replicas}]}
    return AppSpec.model_validate({"models": {"m": model}})


def test_size_before_is_that_of_the_same_version_or_of_the_active_one() -> None:
    """A controller that exits during an update has recorded sizes of both versions."""
    specs = {"m": {n: version(n, k).models["m"] for n, k in (("1", 4), ("2", 1))}}
    old = record(
        app=version("2", 1),
        specs=specs,
        sizes={"m": {"1": [5], "2": [1]}},
    )
    for number, size in (("1", 5), ("2", 1), ("3", 5)):
        found = sizes_before(old, version(number, 4))["m"]
        assert found.replicas == [size]
        assert found.spec == specs["m"]["2" if number == "2" else "1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateFolder:
    monkeypatch.delenv("MULTIWORLD_SECRET", raising=False)
    made = StateFolder(tmp_path / "state" / "app")
    made.make()
    return made


def test_root_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.delenv("MULTIWORLD_STATE", raising=False)
    assert state_root() == tmp_path / ".local/state/multiworld"
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert state_root() == Path("/xdg/multiworld")
    monkeypatch.setenv("MULTIWORLD_STATE", "/ours")
    assert state_root() == Path("/ours")


# The record.


def test_record_is_read_as_it_was_written(folder: StateFolder) -> None:
    assert folder.load() is None
    folder.save(record(number=3))
    assert folder.load() == record(number=3)
    with open(folder.path / "record.json") as file:
        folder.save(record(number=4, processes=[]))
        # A concurrent reader sees the previous record, not a mix of both.
        assert Record.model_validate_json(file.read()) == record(number=3)
    assert folder.load() == record(number=4, processes=[])
    folder.socket.touch()
    folder.forget()
    folder.forget()
    assert folder.load() is None
    assert not folder.socket.exists()


def test_save_that_fails_leaves_the_record_before(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.save(record(number=1))

    def full(descriptor: int) -> None:
        os.truncate(descriptor, 10)
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="no space"):
            folder.save(record(number=2))
    assert folder.load() == record(number=1)
    folder.save(record(number=3))
    assert folder.load() == record(number=3)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"app": 1}', b"\xff\xfe"]
)
def test_record_that_cannot_be_read_is_named(
    folder: StateFolder, content: bytes
) -> None:
    """An unreadable record must not pass for a service that is not running."""
    (folder.path / "record.json").write_bytes(content)
    with pytest.raises(ServeError, match=r"record\.json cannot be read"):
        folder.load()


# Locks.


def test_only_one_controller_holds_the_folder(folder: StateFolder) -> None:
    """The kernel releases the lock however the controller exits."""
    assert not StateFolder(folder.path.parent / "none").is_controlled()
    assert not folder.is_controlled()
    code = (
        "import sys; from pathlib import Path\n"
        "from multiworld.serve.controller.fleet.record import StateFolder\n"
        "StateFolder(Path(sys.argv[1])).lock()\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == b"locked\n"
        assert folder.is_controlled()
        with pytest.raises(AlreadyServedError, match="a controller already runs"):
            folder.lock()
        process.kill()
        process.wait()
    assert not folder.is_controlled()
    lock = folder.lock()
    assert StateFolder(folder.path).is_controlled()
    os.close(lock)
    assert not StateFolder(folder.path).is_controlled()


def test_living_processes_share_their_lock(folder: StateFolder) -> None:
    """The store notices when the last of them exits."""
    one, other = folder.hold(), folder.hold()
    with open(folder.alive, "rb") as file:
        for held in (one, other):
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(held)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_asking_for_a_controller_keeps_none_from_starting(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``multiworld status`` may ask at any time."""
    os.close(folder.lock())
    real, asked, controller = fcntl.fcntl, 0, -1

    def ask(file: Any, command: int, lock: bytes) -> Any:
        nonlocal asked, controller
        asked += 1
        found = real(file, command, lock)
        if asked == 1:  # the controller starts at this very moment
            controller = folder.lock()
        return found

    monkeypatch.setattr(fcntl, "fcntl", ask)
    assert not StateFolder(folder.path).is_controlled()
    assert StateFolder(folder.path).is_controlled()
    os.close(controller)


# The secret and who may read it.


def test_secret_is_made_once_and_for_this_user_only(folder: StateFolder) -> None:
    secret = folder.secret()
    assert len(bytes.fromhex(secret)) == 32
    assert StateFolder(folder.path).secret() == secret
    assert stat.S_IMODE((folder.path / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.alive.stat().st_mode) == 0o600
    folder.make()  # again: a new controller of the same service
    assert folder.secret() == secret


def test_secret_of_the_environment_goes_before(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MULTIWORLD_SECRET", "theirs, of 16 bytes")
    assert folder.secret() == "theirs, of 16 bytes"
    assert not (folder.path / "secret").exists()


def test_secret_that_was_not_written_is_made_anew(folder: StateFolder) -> None:
    """The previous process may have died, or the disk filled up, while writing it."""
    (folder.path / "secret").touch()
    assert folder.secret() != ""


# What is in the way.


@pytest.mark.parametrize("name", ["logs", "alive", "admin.sock"])
def test_what_has_the_name_of_a_part_of_the_folder_is_named(
    tmp_path: Path, name: str
) -> None:
    if name == "logs":
        (tmp_path / name).write_text("")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(ServeError, match=f"cannot use .*{name}") as refused:
        StateFolder(tmp_path).make()
    assert "--state" in str(refused.value)


@pytest.mark.parametrize("name", ["controller", "secret", "record.json"])
def test_folder_in_place_of_a_file_is_named(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("MULTIWORLD_SECRET", raising=False)
    (folder.path / name).mkdir()
    assert not folder.is_controlled()

    def use() -> None:
        folder.lock()
        folder.secret()
        folder.load()

    with pytest.raises(ServeError, match=f"cannot use .*{name}: Is a directory"):
        use()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"abc", b"", b"x" * 64, b"a" * 63])
def test_invalid_secret_is_named(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.delenv("MULTIWORLD_SECRET", raising=False)
    (folder.path / "secret").write_bytes(content)
    if not content:
        assert len(folder.secret()) == 64
        return
    with pytest.raises(ServeError, match="secret does not hold a secret"):
        folder.secret()


class Disk:
    def __init__(self) -> None:
        self.found: list[int] = []
        self.is_full = False
        self.may_go_on = threading.Event()

    def save(self, one: Record) -> None:
        assert self.may_go_on.wait(10.0)
        if self.is_full:
            raise OSError("no space left on device")
        self.found.append(one.number)


async def test_disk_that_hangs_blocks_nothing_and_gets_the_newest_record() -> None:
    disk = Disk()
    keeper = RecordWriter(disk.save, RareLog(logging.getLogger("test")))
    for number in range(5):
        keeper.keep(record(number=number))
        await asyncio.sleep(0)
    await keeper.settled(0.05)
    assert disk.found == []
    disk.may_go_on.set()
    await keeper.settled(10.0)
    assert disk.found[-1] == 4
    assert len(disk.found) <= 2
    keeper.keep(record(number=4))
    await keeper.settled(10.0)
    assert disk.found.count(4) == 1


async def test_nobody_waits_for_later_records() -> None:
    """A busy fleet always produces another record."""
    disk = Disk()
    keeper = RecordWriter(disk.save, RareLog(logging.getLogger("test")))
    keeper.keep(record(number=1))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(keeper.settled(30.0))
    await asyncio.sleep(0)
    disk.may_go_on.set()
    number = 1
    async with asyncio.timeout(10.0):
        while not waiting.done():
            number += 1
            keeper.keep(record(number=number))
            await asyncio.sleep(0.001)


async def test_record_that_cannot_be_encoded_is_reported() -> None:
    """A record that cannot be encoded is reported and does not stop the keeper."""

    def fail(one: Record) -> None:
        raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")

    keeper = RecordWriter(fail, RareLog(logging.getLogger("test")))
    keeper.keep(record(number=1))
    await keeper.settled(10.0)
    assert "surrogates" in keeper.trouble


async def test_record_that_could_not_be_written_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The next event retries, even if it changes nothing in the record."""
    disk = Disk()
    disk.may_go_on.set()
    disk.is_full = True
    keeper = RecordWriter(disk.save, RareLog(logging.getLogger("test")))
    keeper.keep(record(number=1))
    await keeper.settled(10.0)
    assert "no space left" in caplog.text
    assert "no space left" in keeper.trouble
    disk.is_full = False
    keeper.keep(record(number=1))
    await until(lambda: disk.found == [1])
    await keeper.settled(10.0)
    assert not keeper.trouble


def test_folder_whose_socket_cannot_be_is_refused(tmp_path: Path) -> None:
    """Without its socket, nobody could manage the service."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with pytest.raises(ServeError, match=r"107; give a shorter --state"):
        StateFolder(deep).make()
    assert not deep.exists()


@pytest.mark.parametrize("content", [b"0123456789abcdef0123\n", b"\xff" * 20])
def test_secret_may_stand_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """It must be text, because processes receive it in an environment variable."""
    path = tmp_path / "given"
    path.write_bytes(content)
    monkeypatch.delenv("MULTIWORLD_SECRET", raising=False)
    monkeypatch.setenv("MULTIWORLD_SECRET_FILE", str(path))
    folder = StateFolder(tmp_path / "state")
    folder.make()
    if content[0] == 0xFF:
        with pytest.raises(ConfigError, match="UTF-8"):
            folder.secret()
    else:
        assert folder.secret() == content.decode().strip()
    assert not (tmp_path / "state" / "secret").exists()
