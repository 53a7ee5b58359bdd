"""Fixtures and settings of all tests."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trustme
from hypothesis import HealthCheck, settings

import multiworld
from multiworld import Tls
from multiworld.testing import ProcessFleet, Role

SOURCE = Path(multiworld.__file__).parent

# Deadlines would measure how busy the machine is. `make test` draws the same examples
# each time, so that everybody gets the same failures; `make test-all` draws new ones.
settings.register_profile(
    "same",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("new", settings.get_profile("same"), derandomize=False)
settings.load_profile("same")

# A shell starts a background job with these ignored, and every child would inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

torch.set_num_threads(1)  # the tests of several workers share the processors


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


def certificates(authority: trustme.CA, folder: Path) -> Tls:
    """Return TLS files with one certificate for both sides."""
    issued = authority.issue_cert("multiworld.test", "127.0.0.1")
    names = [folder / name for name in ("certificate", "key", "authority")]
    issued.cert_chain_pems[0].write_to_path(str(names[0]))
    issued.private_key_pem.write_to_path(str(names[1]))
    authority.cert_pem.write_to_path(str(names[2]))
    return Tls(certificate=names[0], key=names[1], authority=names[2])


@pytest.fixture(scope="session")
def tls(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return certificates(authority, tmp_path_factory.mktemp("tls"))


async def _hello(role: Role) -> None:
    role.report("hello")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment with compiled modules, as after an installation.

    asyncio's debug mode reports every step over 0.1 s. Importing this package can take
    that long if it cannot write compiled files.
    """
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if not os.access(SOURCE, os.W_OK):
        environment["PYTHONPYCACHEPREFIX"] = str(tmp_path_factory.mktemp("c"))
    modules = "multiworld.world.manager, multiworld.backends.c10d.backend"
    command = [sys.executable, "-X", "dev", "-c", f"import {modules}"]
    subprocess.run(command, env=environment, check=True, timeout=50)
    return environment


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Start the fork server once, so that no test counts it as a leak."""

    async def start() -> None:
        async with ProcessFleet() as fleet:
            await fleet.start(_hello).done(60)

    asyncio.run(start())


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Exclude what is imported by now from garbage collection.

    There are millions of objects, and a collection takes most of a second. Every leak
    check would take that long, and event loops under test would stop meanwhile.
    """
    gc.collect()
    gc.freeze()
