"""Helper processes that hang: they are named and replaced, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.harness import served, spec_with, traffic

pytestmark = pytest.mark.timeout(240)


async def test_hanging_helpers_are_named_and_replaced(tmp_path: Path) -> None:
    """The fork server and the store are stopped under traffic, one after the other.

    What needs them works again afterwards: another replica starts and takes part.
    """
    with served(tmp_path, spec_with()) as service:

        async def until(is_so: Callable[[], bool], what: str) -> None:
            await asyncio.to_thread(service.until, is_so, what)

        async with traffic(service) as checked:
            server, store = service.fork_server(), service.store()
            os.kill(server, signal.SIGSTOP)
            await until(lambda: "fork server" in service.status().trouble, "named")
            await until(lambda: not service.status().trouble, "replaced")
            assert service.fork_server() != server
            await checked.goes_on()
            os.kill(store, signal.SIGSTOP)
            await until(lambda: "store" in service.status().trouble, "named")
            await until(lambda: not service.status().trouble, "replaced")
            assert service.store() != store
            await asyncio.to_thread(service.scale, "add", 3)
            await until(lambda: service.stages() == [1, 3, 1], "scaled")
            await checked.goes_on()
    log = (tmp_path / "serve.log").read_text()
    assert f"fork_server (process {server}) has not answered" in log
    assert f"the store (process {store}) does not answer" in log
