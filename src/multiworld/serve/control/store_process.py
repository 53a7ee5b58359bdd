"""The store of a service, as a process of its own that outlives the controller."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from multiworld.errors import LaunchError
from multiworld.serve.fleet.record import StateFolder, StoreRecord
from multiworld.serve.launchers.base import began_at

START_S = 30.0
END_S = 5.0
LOOK_S = 0.02


async def start_store(
    folder: StateFolder,
    env: dict[str, str],
    old: StoreRecord | None,
    host: str = "127.0.0.1",
) -> StoreRecord:
    """Return the store that runs, or start one at the address that is known.

    Raises:
        LaunchError: It does not start; the message has what it said.
    """
    if old is not None and began_at(old.pid) == old.began:
        return old
    port = "0" if old is None else old.address.rpartition(":")[2]
    command = [sys.executable, "-m", "multiworld.cli.main", "store", "--json"]
    command += ["--host", host, "--port", port]
    command += ["--state", str(folder.path / "epochs.json")]
    command += ["--while-locked", str(folder.alive)]
    log = folder.logs / "store.log"
    with open(log, "ab") as errors:  # noqa: ASYNC230 - opened, not read
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **env},
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = await process.stdout.readline()
    except TimeoutError:
        line = b""
    if not line:
        raise LaunchError(f"the store did not start: {_tail(log)}")
    address = json.loads(line)["store"]
    return StoreRecord(
        address=address, pid=process.pid, began=began_at(process.pid) or 0
    )


async def end_store(store: StoreRecord) -> None:
    """End a store that was started for nothing, and wait until it has ended.

    Cancellation: it ends all the same.
    """
    if began_at(store.pid) != store.began:
        return
    os.kill(store.pid, signal.SIGTERM)
    for _ in range(int(END_S / LOOK_S)):
        if began_at(store.pid) != store.began:
            return
        await asyncio.sleep(LOOK_S)


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {path}"
