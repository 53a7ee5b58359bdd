"""Jumps of the wall clock by hours, forward and back."""

from __future__ import annotations

import asyncio
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serve.harness import served, spec_with, traffic

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

SOURCE = Path(__file__).parents[1] / "data" / "jumping_clock.c"
ROOT = Path(__file__).parents[2]
JUMPS_S = (3600.0, -86400.0, 400 * 86400.0)
"""Offsets of the clock from the true time, in seconds, one after the other."""


@pytest.fixture
def jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the wall clock of processes started from now on."""
    library, file = tmp_path / "jumping_clock.so", tmp_path / "clock"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)]
    subprocess.run([*command, "-ldl"], check=True)
    file.write_bytes(struct.pack("d", 0.0))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CLOCK_FILE", str(file))

    def set_clock(offset_s: float) -> None:
        with file.open("r+b") as opened:
            opened.write(struct.pack("d", offset_s))

    set_clock(3600.0)
    asked = "import time; print(time.time())"
    told = float(subprocess.check_output([sys.executable, "-c", asked]))
    assert told - time.time() > 3000, "the clock does not jump"
    set_clock(0.0)
    return set_clock


async def test_service_continues_whatever_the_clock_says(
    tmp_path: Path, jump: Callable[[float], None]
) -> None:
    with served(tmp_path / "service", spec_with()) as service:
        before = {p.name: p.pid for p in service.status().processes}
        async with traffic(service) as checked:
            for offset_s in JUMPS_S:
                jump(offset_s)
                await checked.goes_on()
                # Longer than any limit of silence.
                await asyncio.sleep(3.0)
        after = {p.name: p.pid for p in service.status().processes}
        assert after == before
        assert not service.events("lost")
        service.scale("add", 3)
        await asyncio.to_thread(
            service.until, lambda: service.stages() == [1, 3, 1], "scaled"
        )
        jump(-3600.0)
        service.break_replica("kill", "add")
        await asyncio.to_thread(
            service.until, lambda: len(service.events("lost")) == 1, "noticed"
        )


WORLD = """
import os, sys, time, torch
from multiworld import blocking, WorldConfig
rank = int(sys.argv[1])
config = WorldConfig(join_s=60, silence_s=2.0)
with blocking.WorldManager() as manager:
    world = manager.join("w", rank=rank, size=2, store=sys.argv[2], config=config)
    print("joined", flush=True)
    while True:
        if rank == 0:
            is_over = os.path.exists(sys.argv[3])
            world.send(torch.tensor([int(is_over)]), dst=1)
            assert int(world.recv(src=1)) == int(is_over)
        else:
            found = world.recv(src=0)
            world.send(found, dst=0)
            is_over = bool(found)
        if is_over:
            break
        time.sleep(0.01)
    print("whole")
"""


async def test_world_stays_whole_whatever_the_clock_says(
    tmp_path: Path, jump: Callable[[float], None]
) -> None:
    from multiworld.rendezvous.store_server import StoreServer

    server = await StoreServer.listen("127.0.0.1", 0)
    store, over = f"tcp://127.0.0.1:{server.port}", tmp_path / "over"
    members = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", WORLD, str(rank), store, str(over)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    for member in members:
        assert member.stdout is not None
        assert await member.stdout.readline() == b"joined\n"
    ends = asyncio.gather(*(member.communicate() for member in members))
    for offset_s in JUMPS_S:
        jump(offset_s)
        # Longer than the limit of silence.
        await asyncio.sleep(2.5)
    over.touch()
    for out, error in await ends:
        assert out == b"whole\n", error.decode()
    await server.close()
