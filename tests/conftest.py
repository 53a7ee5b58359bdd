"""What all tests share."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
import torch

from multiworld.testing import ProcessFleet, Role

torch.set_num_threads(1)  # a pool that starts in the middle of a test looks like a leak


async def _hello(role: Role) -> None:
    role.report("hello")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment where modules are compiled already, as when installed.

    asyncio's debug mode tells of every step over a tenth of a second, which importing
    this package for the first time can take where no compiled files may be written.
    """
    environment = {
        **os.environ,
        "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("c")),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    modules = "multiworld.world_manager, multiworld.backends.c10d.backend"
    command = [sys.executable, "-X", "dev", "-c", f"import {modules}"]
    subprocess.run(command, env=environment, check=True, timeout=50)
    return environment


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the fork server once, so that it is no test's leftover."""

    async def start() -> None:
        async with ProcessFleet() as fleet:
            await fleet.start(_hello).done(60)

    asyncio.run(start())
