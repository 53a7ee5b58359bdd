"""What all tests share."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trustme

from multiworld import Tls
from multiworld.testing import ProcessFleet, Role

torch.set_num_threads(1)  # a pool that starts in the middle of a test looks like a leak


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    """Return who signs this session's certificates."""
    return trustme.CA()


def certificates(authority: trustme.CA, folder: Path) -> Tls:
    """Return files with a certificate of ``authority``, for both sides."""
    issued = authority.issue_cert("multiworld.test", "127.0.0.1")
    names = [folder / name for name in ("certificate", "key", "authority")]
    issued.cert_chain_pems[0].write_to_path(str(names[0]))
    issued.private_key_pem.write_to_path(str(names[1]))
    authority.cert_pem.write_to_path(str(names[2]))
    return Tls(certificate=names[0], key=names[1], authority=names[2])


@pytest.fixture(scope="session")
def tls(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """Return certificates that all members of a test share."""
    return certificates(authority, tmp_path_factory.mktemp("tls"))


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
    modules = "multiworld.world.manager, multiworld.backends.c10d.backend"
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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what was imported out of the collector's sight.

    There are over a million objects; looking at all takes a quarter of a second,
    which the leak checks would pay each time, and which stops a loop that is measured.
    """
    gc.collect()
    gc.freeze()
