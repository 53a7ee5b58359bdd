"""A test program that forks a fork server and does what its second argument says."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
from pathlib import Path

import click

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers.base import began_at
from multiworld.serve.controller.launchers.fork_server import (
    WaitingServer,
    fork_waiting,
)
from tests.unit.serve.controller.launchers.test_local_launcher import (
    Launched,
    parent_of,
)


def inherited(pid: int) -> list[str]:
    links = Path(f"/proc/{pid}/fd").iterdir()
    return [f for f in map(os.readlink, links) if f.endswith("/inherited")]


async def start(folder: Path, word: str, waiting: WaitingServer) -> None:
    if word == "dies":
        os.kill(waiting.pid, signal.SIGKILL)
    launched = Launched(folder, waiting=waiting)
    if word == "goes unused":
        await launched.launcher.close()
        return
    try:
        running = await launched.launch("a", "says")
    except LaunchError as error:
        click.echo(error)
        running = await launched.launch("b", "says")
    said = await launched.log_of(running.name)
    click.echo(said == f"hello {running.pid} {running.pid}\n")
    click.echo(parent_of(running.pid) == waiting.pid)
    click.echo(len(inherited(running.pid)))
    limits = resource.prlimit(running.pid, resource.RLIMIT_NOFILE)
    click.echo(len(set(limits)))
    click.echo(await launched.end(running))
    await launched.launcher.close()
    click.echo(str(began_at(waiting.pid)))


def main() -> None:
    folder, word = Path(sys.argv[1]), sys.argv[2]
    sys.stdout.write("before the fork\n")  # and not flushed
    if word == "has threads":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        click.echo(str(fork_waiting()))
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    kept = os.open(folder / "inherited", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(kept, True)  # as by a shell that holds a lock
    waiting = fork_waiting()
    assert waiting is not None
    click.echo(waiting.pid)
    if word == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    asyncio.run(start(folder, word, waiting))


if __name__ == "__main__":
    main()
