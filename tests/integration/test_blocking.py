"""The blocking facade, used from plain threads and with timeouts."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from multiworld import ConfigError, MemberLeftError, WorldReady
from multiworld.testing import no_leaks
from multiworld.world import blocking
from tests.ports import free_port


def in_threads(*bodies: Callable[[], None]) -> None:
    """Run each function in a thread; raise the first error."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]


def test_every_operation_without_an_event_loop() -> None:
    """Every operation works from plain threads."""
    store = f"tcp://127.0.0.1:{free_port()}"

    def leader() -> None:
        with blocking.WorldManager() as manager:
            events = manager.events()
            world = manager.join("w", rank=0, size=2, store=store)
            assert isinstance(next(events), WorldReady)
            assert "ready" in repr(world)
            world.send(torch.arange(3), dst=1)
            assert world.recv(src=1).tolist() == [0, 2, 4]
            with pytest.raises(TimeoutError, match=r"0\.05 s"):
                world.recv(src=1, tag=5, timeout_s=0.05)
            world.send_object({"go": 1}, dst=1)
            assert world.recv(src=1, tag=5).tolist() == [7]
            _collectives(world)
            assert world.recv_any()[0] == 1
            assert world.recv_bundle().meta == {"a": 1}
            with pytest.raises(MemberLeftError):
                world.recv(src=1)

    def worker() -> None:
        with blocking.WorldManager() as manager:
            world = manager.join("w", rank=1, size=2, store=store)
            world.send(world.recv(src=0) * 2, dst=0)
            assert world.recv_object() == {"go": 1}
            world.send(torch.tensor([7]), dst=0, tag=5)
            _collectives(world)
            world.send(torch.ones(1), dst=0)
            world.send_bundle({"x": torch.ones(1)}, meta={"a": 1}, dst=0)

    in_threads(leader, worker)


def _collectives(world: blocking.World) -> None:
    two = torch.full((2,), 2.0)
    assert torch.equal(world.all_reduce(torch.ones(2)), two)
    world.reduce(torch.ones(2), dst=0)
    world.broadcast(torch.ones(2), src=1)
    assert len(world.all_gather(torch.ones(2))) == 2
    world.gather(torch.ones(2), dst=1)
    out, both = torch.zeros(2), [torch.ones(2), torch.ones(2)]
    world.scatter(out, both, src=0)
    assert torch.equal(world.reduce_scatter(out, both), two)
    world.all_to_all([torch.zeros(2), torch.zeros(2)], both)
    world.barrier()
    assert world.statistics().phase == "ready"


async def test_inside_an_event_loop_is_refused() -> None:
    """A call inside an event loop is refused, because it would wait for itself."""
    with pytest.raises(ConfigError, match="event loop"):
        blocking.WorldManager()


async def test_nothing_is_left_behind() -> None:
    """The thread of the loop ends with the manager."""
    async with no_leaks(allow=("asyncio_",)):
        await_thread = threading.Thread(
            target=test_every_operation_without_an_event_loop
        )
        await_thread.start()
        await_thread.join()
