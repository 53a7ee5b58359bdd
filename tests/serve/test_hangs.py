"""Helper processes that hang: they are named and replaced, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.harness import served, spec_with, traffic

pytestmark = pytest.mark.timeout(240)


# Without the fork server: test_helper_process.py proves that a stopped one is named and
# killed, and test_generation.py that a service replaces a killed one.
@pytest.mark.parametrize(
    "has_fork_server",
    [
        pytest.param(False, id="store"),
        pytest.param(True, id="fork server and store", marks=pytest.mark.heavy),
    ],
)
async def test_hanging_helpers_are_named_and_replaced(
    tmp_path: Path, has_fork_server: bool
) -> None:
    with served(tmp_path, spec_with()) as service:

        async def until(is_so: Callable[[], bool], what: str) -> None:
            await asyncio.to_thread(service.until, is_so, what)

        async with traffic(service) as checked:
            server, store = service.fork_server(), service.store()
            if has_fork_server:
                os.kill(server, signal.SIGSTOP)
                await until(lambda: "fork server" in service.status().trouble, "named")
                await until(lambda: not service.status().trouble, "replaced")
                assert service.fork_server() != server
                await checked.goes_on()
            os.kill(store, signal.SIGSTOP)
            await until(lambda: "store" in service.status().trouble, "named")
            await until(lambda: not service.status().trouble, "replaced")
            await until(lambda: service.store() != store, "recorded")
            await asyncio.to_thread(service.scale, "add", 3)
            await until(lambda: service.stages() == [1, 3, 1], "scaled")
            await checked.goes_on()
    log = (tmp_path / "serve.log").read_text()
    named = f"fork_server (process {server}) has not answered" in log
    assert named == has_fork_server
    assert f"the store (process {store}) does not answer" in log


async def test_port_of_the_store_that_is_stolen_is_named_until_it_is_free(
    tmp_path: Path,
) -> None:
    with served(tmp_path, spec_with()) as service:

        async def until(is_so: Callable[[], bool], what: str) -> None:
            await asyncio.to_thread(service.until, is_so, what)

        async with traffic(service) as checked:
            store, port = service.store(), service.store_port()
            before = service.stages()
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                os.kill(store, signal.SIGKILL)
                while True:
                    with contextlib.suppress(OSError):
                        thief.bind(("127.0.0.1", port))
                        break
                    await asyncio.sleep(0.001)
                thief.listen()
                await until(lambda: "the store" in service.status().trouble, "named")
                assert str(port) in service.status().trouble
                await asyncio.to_thread(service.break_replica, "kill", "add")
                await checked.goes_on()
            await until(lambda: not service.status().trouble, "replaced")
            await until(lambda: service.store() != store, "recorded")
            await until(lambda: service.stages() == before, "whole again")
            await checked.goes_on()
