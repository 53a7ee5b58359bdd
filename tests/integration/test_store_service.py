"""``multiworld store``: its loss, its restart, and a second store beside it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
import torch

from multiworld import (
    ConfigError,
    RankTakenError,
    StoreUnreachableError,
    World,
    WorldConfig,
    WorldManager,
)
from tests.ports import free_port

COMMAND = Path(sys.executable).parent / "multiworld"
CONFIG = WorldConfig(join_s=10)
HANG_S = 20.0


class Store:
    def __init__(self, stack: ExitStack, *options: str) -> None:
        self._stack, self.port = stack, free_port()
        self._options = options
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [COMMAND, "store", "--port", str(self.port), "--json", *self._options],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(self.kill, self.process)
        assert self.process.stdout is not None
        self._stack.callback(self.process.stdout.close)
        assert json.loads(self.process.stdout.readline())["store"] == self.address

    def kill(self, process: subprocess.Popen[str] | None = None) -> None:
        process = process or self.process
        process.kill()
        process.wait()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
async def managers() -> AsyncIterator[list[WorldManager]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(WorldManager(config=CONFIG))
            for _ in range(3)
        ]


async def join(
    managers: list[WorldManager], store: str | None, name: str = "w"
) -> list[World]:
    size = len(managers)
    return list(
        await asyncio.gather(
            *(
                manager.join(name, rank=rank, size=size, store=store)
                for rank, manager in enumerate(managers)
            )
        )
    )


async def works(worlds: list[World]) -> None:
    tensors = [torch.ones(2) for _ in worlds]
    await asyncio.gather(
        *(w.all_reduce(t) for w, t in zip(worlds, tensors, strict=True))
    )
    assert tensors[0].tolist() == [len(worlds)] * 2


async def test_lost_store_breaks_no_ready_world_and_joining_works_again(
    stack: ExitStack, managers: list[WorldManager]
) -> None:
    """A restarted store learns from the members."""
    store = Store(stack)
    old = await join(managers[:2], store.address)
    assert old[0].epoch == 1
    store.kill()
    await works(old)
    with pytest.raises(StoreUnreachableError, match="multiworld store"):
        await managers[0].join(
            "x",
            rank=1,
            size=2,
            store=store.address,
            config=CONFIG.replace(join_s=0.5),
        )
    await works(old)
    store.start()
    # A claim on a held rank: the store knows it from the members, and asks the holder.
    with pytest.raises(RankTakenError):
        await managers[2].join("w", rank=1, size=2, store=store.address)
    await works(old)
    new = await join(managers[1:], store.address, "x")
    await works(new)
    for manager in managers[:2]:
        await manager.leave("w")
    # Newcomers that have seen no epoch do not get one that was used.
    (again, _) = await join(managers[1:], store.address)
    assert again.epoch == 2


async def test_stopped_store_is_noticed_and_a_second_address_is_used(
    stack: ExitStack, managers: list[WorldManager]
) -> None:
    """The second store gives out other epochs."""
    first, second = Store(stack), Store(stack)
    both = f"{first.address},{second.address}"
    old = await join(managers[:2], both)
    assert old[0].epoch == 1
    first.kill()
    for manager in managers[:2]:
        await manager.leave("w")
    there = await join(managers[:2], both)
    assert there[0].epoch == 2
    await works(there)
    first.start()
    for manager in managers[:2]:
        await manager.leave("w")
    back = await join(managers[1:], both)
    assert back[0].epoch % 2 == 1
    assert back[0].epoch > 2
    await works(back)


async def test_epochs_outlast_a_restart_in_a_file(
    stack: ExitStack, managers: list[WorldManager], tmp_path: Path
) -> None:
    state = tmp_path / "epochs"
    store = Store(stack, "--state", str(state))
    await join(managers[:1], store.address)
    await managers[0].leave("w")
    store.kill()
    with state.open("a") as file:
        file.write('{"world": "w", "epo')  # the machine lost power
    store.start()
    (world,) = await join(managers[1:2], store.address)
    assert world.epoch == 2


async def test_store_is_found_by_the_environment(
    stack: ExitStack, managers: list[WorldManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MULTIWORLD_STORE", raising=False)
    with pytest.raises(ConfigError, match="MULTIWORLD_STORE"):
        await managers[0].join("w", rank=0, size=1)
    monkeypatch.setenv("MULTIWORLD_STORE", Store(stack).address)
    await works(await join(managers, None))


def test_store_that_cannot_listen_says_so() -> None:
    done = subprocess.run(
        [COMMAND, "store", "--host", "192.0.2.1"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 1
    assert "--host" in done.stderr
    assert "Traceback" not in done.stderr


def test_store_exits_cleanly_on_sigterm(stack: ExitStack) -> None:
    store = Store(stack)
    store.process.terminate()
    assert store.process.wait(HANG_S) == 0
