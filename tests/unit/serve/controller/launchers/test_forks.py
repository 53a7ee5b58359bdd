"""Replacement of a fork server, including replacements that fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers import forks
from multiworld.serve.controller.launchers.forks import Forks
from multiworld.serve.controller.launchers.helper_process import HelperProcess
from multiworld.serve.machines.usage import family_of
from tests.unit.serve.edges import until


@pytest.mark.parametrize("error", [LaunchError("no memory"), OSError("no process")])
async def test_replacement_that_fails_is_repeated(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else retries it: without a fork server no replica is ordered."""
    monkeypatch.setattr(forks, "RETRY_S", 0.01)
    start, errors = HelperProcess.start, [error, error]
    is_lost = False

    async def fails(self: HelperProcess[Any], *given: Any) -> Any:
        if is_lost and errors:
            raise errors.pop()
        return await start(self, *given)

    monkeypatch.setattr(HelperProcess, "start", fails)
    before = set(family_of(os.getpid()))
    server = Forks(["json"], {}, tmp_path / "log", lambda name, code: None)
    await server.warm()
    try:
        is_lost = True
        for pid in set(family_of(os.getpid())) - before:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: bool(server.trouble))
        await until(lambda: not server.trouble)
        assert not errors
    finally:
        await server.close()
