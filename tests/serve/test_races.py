"""Concurrent events: updates, kills, scaling, two controllers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from multiworld.errors import ServeError
from tests.serve.harness import (
    START_S,
    WAIT_S,
    Served,
    body,
    served,
    spec_with,
    traffic,
)
from tests.serve.models import FINE, GROW, GROW_BYTES, SLEEP
from tests.serve.test_scaling import ON_DEMAND, stages

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

BATCH, FULL = 4, 200
"""Requests of a batch, and requests that fill the queues of three stages."""

KILLS = 8
"""Number of replicas killed during an update."""


async def test_update_under_kills_loses_nothing(tmp_path: Path) -> None:
    draw = random.Random(1)
    with served(tmp_path, spec_with(ready_s=60.0)) as service:
        async with traffic(service, 30.0):
            text = yaml.safe_dump(spec_with(m_version="2", ready_s=60.0))
            await asyncio.to_thread(service.update, text)
            for _ in range(KILLS):
                stage = draw.choice(["double", "add", "square"])
                with contextlib.suppress(ServeError):  # none is ready yet
                    await asyncio.to_thread(service.break_replica, "kill", stage)
                await asyncio.sleep(draw.uniform(0.05, 0.6))
            await asyncio.to_thread(
                service.until,
                lambda: (
                    service.status().active["m"] == "2"
                    and service.stages() == [1, 2, 1]
                ),
                "the new version has taken over",
                120.0,
            )
        assert service.infer(1.0).json()["model_version"] == "2"


async def test_only_replica_of_a_stage_is_replaced_under_a_backlog(
    tmp_path: Path,
) -> None:
    """Its probe must not wait behind the outputs that wait for this replica."""
    spec = spec_with(m_deadline_s=120.0)
    spec["models"]["m"]["stages"][1] = {"name": "add", "max_batch_size": BATCH}
    with served(tmp_path, spec) as service:
        (victim,) = [p for p in service.status().processes if p.model and p.stage == 1]
        assert victim.pid is not None
        url = f"{service.url}/v2/models/m/infer"
        limits = httpx.Limits(max_connections=BATCH + FULL)
        async with httpx.AsyncClient(timeout=START_S, limits=limits) as http:

            def ask(count: int, code: int) -> list[asyncio.Future[httpx.Response]]:
                return [
                    asyncio.ensure_future(http.post(url, json=body(1.0, code)))
                    for _ in range(count)
                ]

            asked = ask(BATCH, SLEEP)  # computed for a second
            await asyncio.sleep(0.2)
            asked += ask(FULL, FINE)  # wait behind them, there and in stage 0
            await asyncio.sleep(0.5)
            os.kill(victim.pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                answers = await asyncio.gather(*asked)
        assert {answer.status_code for answer in answers} == {200}


async def test_requests_that_arrive_as_the_last_replica_exits_are_answered(
    tmp_path: Path,
) -> None:
    """The model scales to zero and back at just about the time of each request."""
    draw = random.Random(2)
    config = {
        **ON_DEMAND,
        "downscale_delay_s": 0.3,
        "look_back_period_s": 0.5,
        "upscale_delay_s": 0.1,
    }
    with served(tmp_path, spec_with(m_stages=stages(config))) as service:
        starts = 0
        for number in range(30):
            answer = await asyncio.to_thread(service.infer, float(number))
            assert answer.status_code == 200, (number, answer.text)
            await asyncio.sleep(draw.uniform(0.3, 2.5))
            starts += service.stages() == [0, 0, 0]
        assert starts > 3, "it never scaled to zero"
        assert not service.events("lost")


def test_only_one_of_two_controllers_started_at_once_serves(tmp_path: Path) -> None:
    path = tmp_path / "app.yaml"
    path.write_text(yaml.safe_dump(spec_with()))
    command = [sys.executable, "-m", "multiworld.cli.main", "serve", str(path)]
    command += ["--state", str(tmp_path / "state"), "--json"]
    service = Served(tmp_path, spec_with())
    rival: subprocess.Popen[str] | None = None
    try:
        rival = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        own_lost = False
        try:
            service.start()
        except AssertionError:
            own_lost = True
        if own_lost:  # the other was first
            assert rival.stdout is not None
            assert rival.stdout.readline()
            assert "already" in (tmp_path / "serve.log").read_text()
            rival.terminate()
            assert rival.wait(START_S) == 0
        else:
            _, errors = rival.communicate(timeout=START_S)
            assert rival.returncode != 0
            assert "already" in errors
            assert service.infer(1.0).status_code == 200
            service.end()
            service.wait_gone()
    finally:
        if rival is not None and rival.poll() is None:
            rival.kill()
            rival.wait()
        service.destroy()


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a control group with a memory limit (version 1 or 2), or skip the test."""
    one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    base, name = (one, "memory.limit_in_bytes") if one.is_dir() else (two, "memory.max")
    group = base / f"multiworld-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (base / "cgroup.procs").write_text(pid)
        group.rmdir()


async def test_replica_that_the_kernel_kills_for_its_memory_is_replaced(
    tmp_path: Path,
) -> None:
    spec = spec_with()
    spec["models"]["m"]["stages"][1]["replicas"] = 1
    with memory_group(GROW_BYTES // 4) as group, served(tmp_path, spec) as service:
        async with traffic(service, 20.0):
            (victim,) = [
                p for p in service.status().processes if p.model and p.stage == 1
            ]
            (group / "cgroup.procs").write_text(str(victim.pid))
            answer = await asyncio.to_thread(service.infer, 3.0, GROW)
            assert answer.status_code == 200, answer.text
            names = [p.name for p in service.status().processes]
            assert victim.name not in names
