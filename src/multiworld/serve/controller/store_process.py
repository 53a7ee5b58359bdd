"""The store of a service: a separate process that outlives the controller."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from multiworld.errors import (
    LaunchError,
    RendezvousError,
    ServeError,
    WrongSecretError,
)
from multiworld.net.security import Security
from multiworld.rendezvous.store_address import parse_store
from multiworld.rendezvous.store_session import check_store
from multiworld.serve.controller.detached_process import start_detached
from multiworld.serve.controller.fleet.record import StateFolder, StoreRecord
from multiworld.serve.controller.launchers.base import began_at
from multiworld.serve.controller.status import last_words
from multiworld.serve.deadlines import STORE_ANSWER_S

# File in the state folder: id and start time of a store's process.
STARTED = "store.started"
START_S = 30.0  # maximum seconds for the store to start
END_S = 5.0  # maximum seconds for the store to exit after SIGTERM
LOOK_S = 0.02  # seconds between checks whether the store has exited


async def start_store(
    folder: StateFolder,
    env: dict[str, str],
    old: StoreRecord | None,
    host: str = "127.0.0.1",
) -> StoreRecord:
    """Return the running store, or start one at its old address."""
    if old is not None and began_at(old.pid) == old.began:
        return old
    started = folder.path / STARTED
    await _end_unrecorded(started)
    port = "0" if old is None else old.address.rpartition(":")[2]
    command = [sys.executable, "-m", "multiworld.cli.main", "store", "--json"]
    command += ["--host", host, "--port", port]
    command += ["--state", str(folder.path / "epochs.json")]
    command += ["--while-locked", str(folder.alive)]
    log = folder.logs / "store.log"
    # If this is cancelled, the store runs unrecorded until all processes exit.
    process = start_detached(command, log, env)
    began = began_at(process.pid) or 0
    try:
        # Keep the store's process id on disk until the record has it: an unrecorded
        # store would block the port and the state of its successor.
        with contextlib.suppress(OSError):
            # The disk may be full: start the store anyway.
            started.write_text(json.dumps([process.pid, began]))
        async with asyncio.timeout(START_S):
            line = await process.first_line()
    except TimeoutError:
        line = b""
    except OSError:
        process.kill()
        raise
    if not line:
        process.kill()
        raise LaunchError(f"the store did not start: {last_words(log) or f'see {log}'}")
    address = json.loads(line)["store"]
    return StoreRecord(address=address, pid=process.pid, began=began)


async def _end_unrecorded(started: Path) -> None:
    """Kill a store whose controller died before recording it."""
    try:
        pid, began = json.loads(started.read_text())  # noqa: ASYNC240 - reads a line
    except (FileNotFoundError, ValueError, TypeError):
        return
    store = StoreRecord(address="", pid=int(pid), began=int(began))
    if store.began:
        kill_store(store)
        await _until_ended(store)


async def store_answers(store: StoreRecord, security: Security) -> bool:
    (address,) = parse_store(store.address).stores
    try:
        async with asyncio.timeout(STORE_ANSWER_S):
            await check_store(address, security)
    except (OSError, TimeoutError, RendezvousError):
        return False
    return True


async def check_secret(store: StoreRecord, security: Security) -> None:
    """Raise ServeError if the store, and so every process, has another secret."""
    (address,) = parse_store(store.address).stores
    try:
        async with asyncio.timeout(STORE_ANSWER_S):
            await check_store(address, security)
    except WrongSecretError as error:
        raise ServeError(
            f"the running processes of this service hold another secret: {error}; give "
            "this controller the secret that the service was started with, or shut the "
            "service down with `multiworld shutdown` first"
        ) from error
    except (OSError, TimeoutError, RendezvousError):
        pass  # the store is lost or hangs, so its secret cannot be checked


def kill_store(store: StoreRecord) -> None:
    if began_at(store.pid) == store.began:
        with contextlib.suppress(ProcessLookupError):
            os.kill(store.pid, signal.SIGKILL)


async def end_store(store: StoreRecord) -> None:
    """Stop a store that no process uses, and wait until it has exited."""
    if began_at(store.pid) != store.began:
        return
    os.kill(store.pid, signal.SIGTERM)
    await _until_ended(store)


async def _until_ended(store: StoreRecord) -> None:
    for _ in range(int(END_S / LOOK_S)):
        if began_at(store.pid) != store.began:
            return
        await asyncio.sleep(LOOK_S)
