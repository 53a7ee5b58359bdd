"""The actors of a Ray cluster, tested without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from multiworld.errors import LaunchError
from multiworld.serve.controller.launchers.base import began_at
from multiworld.serve.controller.launchers.forks import Forks
from multiworld.serve.controller.launchers.ray import actor
from multiworld.serve.controller.launchers.ray.actor import (
    NodeLauncher,
    ReplicaHolder,
    wait_exit,
)
from tests.recorded import recorded
from tests.unit.serve.controller.launchers.test_local_launcher import (
    FAKE_ENTRY,
    WAIT_S,
    args,
    children,
    python_path,
)
from tests.until import until

pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fork servers import the fake entry."""
    monkeypatch.setenv("PYTHONPATH", python_path())


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[NodeLauncher]:
    with recorded(actor, Forks) as forks:
        made = NodeLauncher([FAKE_ENTRY], str(tmp_path), str(tmp_path), "one")
    yield made
    await forks[0].close()


async def start(launcher: NodeLauncher, what: str, log: Path) -> tuple[int, int, str]:
    env = {"GREETING": "hello"}
    text = args(what).model_dump_json()
    return await launcher.launch("app/rank", text, env, str(log))


async def test_rank_runs_until_it_ends_and_its_code_is_known(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    log = tmp_path / "rank.log"
    pid, began, leash = await start(launcher, "says", log)
    assert began_at(pid) == began
    ReplicaHolder().hold(leash)
    await launcher.let_go("app/rank")
    await until(log.exists, WAIT_S)
    await until(lambda: log.read_text().startswith(f"hello {pid} "), WAIT_S)
    os.kill(pid, signal.SIGTERM)
    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(wait_exit, pid, began)
    assert await launcher.exit_code("app/rank") == 7
    assert await launcher.exit_code("app/rank") is None, "asked for once"


async def test_rank_that_nobody_holds_is_killed(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    """The holder may not have started, or was killed."""
    pid, began, _ = await start(launcher, "waits", tmp_path / "rank.log")
    await launcher.let_go("app/rank")
    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(wait_exit, pid, began)
    assert await launcher.exit_code("app/rank") == -signal.SIGKILL


async def test_rank_without_a_folder_for_its_log_starts_all_the_same(
    launcher: NodeLauncher,
) -> None:
    """On other machines, the log folder may not exist."""
    pid, began, _ = await start(launcher, "waits", Path("/no/such/folder/rank.log"))
    assert began_at(pid) == began
    await launcher.let_go("app/rank")


async def test_rank_that_cannot_start_leaves_nothing(
    tmp_path: Path,
) -> None:
    preload = [f"{FAKE_ENTRY}_late_thread"]
    others = children()
    with recorded(actor, Forks) as forks:
        made = NodeLauncher(preload, str(tmp_path), "/no/logs", "one")
    try:
        before = len(os.listdir("/proc/self/fd"))
        await made.warm()
        held = len(os.listdir("/proc/self/fd"))
        (server,) = children() - others
        await until(lambda: len(os.listdir(f"/proc/{server}/task")) == 2)
        with pytest.raises(LaunchError, match="the fork server has 2 threads"):
            await start(made, "waits", tmp_path / "rank.log")
        assert len(os.listdir("/proc/self/fd")) <= held >= before
        assert await made.exit_code("app/rank") is None
        await until(lambda: bool(children() - others - {server}))
        assert (await start(made, "waits", tmp_path / "rank.log"))[0]
    finally:
        await forks[0].close()


def test_holder_names_the_gpus_that_ray_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert ReplicaHolder().gpu_variables() == {"CUDA_VISIBLE_DEVICES": "3"}


async def test_rank_that_is_let_go_before_it_starts_never_does(
    launcher: NodeLauncher, tmp_path: Path
) -> None:
    """By then, another rank's leash could have the same path."""
    starting = asyncio.ensure_future(start(launcher, "says", tmp_path / "rank.log"))
    await asyncio.sleep(0)
    await launcher.let_go("app/rank")
    with pytest.raises(LaunchError, match="was cancelled"):
        await asyncio.wait_for(starting, WAIT_S)
    assert not (tmp_path / "rank.log").exists()
    pid, _, _ = await start(launcher, "says", tmp_path / "rank.log")
    await launcher.let_go("app/rank")
    assert pid
