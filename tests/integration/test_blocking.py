"""The blocking facade, used from plain threads and with timeouts."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from multiworld import (
    ConfigError,
    MemberLeftError,
    WorldClosedError,
    WorldConfig,
    WorldReady,
)
from multiworld import World as WorldOnLoop
from multiworld.testing import no_leaks
from multiworld.world import blocking
from tests.ports import free_port


def in_threads(*bodies: Callable[[], None]) -> None:
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


@pytest.mark.parametrize("after_s", [0.15, 0.37, 1.15])
def test_iterators_of_other_threads_end_when_the_manager_is_closed(
    after_s: float,
) -> None:
    """In a join that nobody answers, and in the pause before the next one."""
    manager = blocking.WorldManager(config=WorldConfig(join_s=0.3))
    events = manager.events()
    for number in range(4):
        manager.join(f"w{number}", rank=0, size=1, store="memory://x", backend="memory")

    def listen() -> None:
        assert len(list(events)) >= 4

    def keep() -> None:
        store = f"tcp://127.0.0.1:{free_port()}"
        assert not list(manager.keep("k", rank=1, size=2, store=store))

    def close() -> None:
        time.sleep(after_s)
        manager.close()

    in_threads(listen, keep, close)


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


def test_message_that_arrives_at_the_deadline_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timeout passes before the loop's next turn; the message is not dropped."""
    store = f"tcp://127.0.0.1:{free_port()}"
    recv = WorldOnLoop.recv

    async def slow(self: WorldOnLoop, *args: Any, **options: Any) -> torch.Tensor:
        found = await recv(self, *args, **options)
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        return found

    def receiver() -> None:
        with blocking.WorldManager() as manager:
            world = manager.join("w", rank=0, size=2, store=store)
            monkeypatch.setattr(WorldOnLoop, "recv", slow)
            world.send(torch.ones(1), dst=1)
            assert world.recv(src=1, timeout_s=0.3).tolist() == [5.0]

    def sender() -> None:
        with blocking.WorldManager() as manager:
            world = manager.join("w", rank=1, size=2, store=store)
            world.recv_any()
            time.sleep(0.1)
            world.send(torch.tensor([5.0]), dst=0)
            world.barrier(timeout_s=20)

    with pytest.raises(WorldClosedError):  # of the sender's barrier
        in_threads(receiver, sender)


def test_forked_child_is_refused_at_once() -> None:
    """The child has no thread that runs the loop, so a call must not wait for it."""
    store = f"tcp://127.0.0.1:{free_port()}"

    def member(rank: int) -> None:
        with blocking.WorldManager() as manager:
            world = manager.join("w", rank=rank, size=2, store=store)
            if rank == 0:
                text = in_a_fork(manager, lambda: world.recv(src=1, timeout_s=1))
                assert text.startswith("UsedAfterForkError"), text
            world.barrier(timeout_s=20)

    in_threads(lambda: member(0), lambda: member(1))


def in_a_fork(manager: blocking.WorldManager, call: Callable[[], object]) -> str:
    """Return the error of a call in a forked child, which also closes the manager."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except Exception as error:
            manager.close()
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        there, _, _ = select.select([pipe], [], [], 20.0)
        text = pipe.read() if there else b"it hangs"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return text.decode()


def test_closed_manager_says_so() -> None:
    """It raises the errors of a world, not those of an event loop."""
    store = f"tcp://127.0.0.1:{free_port()}"
    with blocking.WorldManager() as manager:
        world = manager.join("w", rank=0, size=1, store=store)
    manager.close()
    for call in (
        lambda: world.send(torch.ones(1), dst=0),
        lambda: manager.join("x", rank=0, size=1, store=store),
    ):
        with pytest.raises(WorldClosedError, match="closed"):
            call()


def test_operation_of_another_thread_ends_with_the_manager() -> None:
    store = f"tcp://127.0.0.1:{free_port()}"
    manager = blocking.WorldManager()
    others: list[BaseException] = []

    def wait() -> None:
        try:
            while True:
                manager.join("never", rank=0, size=2, store=store, timeout_s=0.05)
        except BaseException as error:
            if isinstance(error, TimeoutError):
                return wait()
            others.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    manager.close()
    thread.join(30)
    assert not thread.is_alive()
    (error,) = others
    assert isinstance(error, WorldClosedError | CancelledError), error


def test_results_are_freed_when_the_caller_drops_them() -> None:
    """They may be large: they are freed at once, not by garbage collection."""
    store = f"tcp://127.0.0.1:{free_port()}"
    manager = blocking.WorldManager()
    gc.disable()
    try:
        world = manager.join("w", rank=0, size=1, store=store)
        found = weakref.ref(world.all_gather(torch.ones(4))[0])
        assert found() is None
    finally:
        gc.enable()
        manager.close()


async def test_use_inside_an_event_loop_is_refused() -> None:
    """It would wait for itself."""
    with pytest.raises(ConfigError, match="event loop"):
        blocking.WorldManager()


async def test_nothing_is_left_behind() -> None:
    async with no_leaks(allow=("asyncio_",)):
        await_thread = threading.Thread(
            target=test_every_operation_without_an_event_loop
        )
        await_thread.start()
        await_thread.join()


def test_manager_that_is_closed_in_an_event_loop_says_so_and_stays() -> None:
    """Otherwise, its worlds are never left, and their members wait for ever."""
    store = f"tcp://127.0.0.1:{free_port()}"
    manager = blocking.WorldManager()
    manager.join("w", rank=0, size=1, store=store)

    async def close() -> None:
        manager.close()

    with pytest.raises(ConfigError):
        asyncio.run(close())
    manager.close()
    manager.close()
