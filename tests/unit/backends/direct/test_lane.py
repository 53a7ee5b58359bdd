"""A lane over a socket pair: stalls, pauses, and several that wait for its end."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest
import torch

from multiworld.backends import header as wire
from multiworld.backends.arrivals import Arrival, Description, Receive
from multiworld.backends.channel import Channel
from multiworld.backends.direct.lane import Lane
from multiworld.backends.dtypes import CODES, memory_of
from multiworld.backends.offload import OFFLOAD_BYTES
from multiworld.config import WorldConfig
from tests.unit.backends.direct.test_shared_memory import Owner
from tests.unit.waiting import turns, until

NONCE = 7


class Bench:
    def __init__(self, budget: int) -> None:
        ours, theirs = socket.socketpair()
        config = WorldConfig(shared_memory_bytes=0)
        self.channel = Channel([1], budget)
        for end in (ours, theirs):
            end.setblocking(False)
        other = Channel([0], 1 << 20)
        self.owner = Owner()
        self.lane = Lane(ours, 1, NONCE, self.channel.mailbox, config, self.owner)
        self.sender = Lane(theirs, 0, NONCE, other.mailbox, config, Owner())
        self.channel.lanes[1] = self.lane

    async def send(self, tensor: torch.Tensor, tag: int = 0) -> None:
        memory = memory_of(tensor)
        code = CODES[tensor.dtype]
        description = Description(
            wire.TENSOR, code, tuple(tensor.shape), len(memory), tag, 0
        )
        await self.sender.send(description, memory, tensor)

    def post(self, out: torch.Tensor | None = None, tag: int = 0) -> Receive:
        def check(_: int, found: Description) -> Exception | None:
            fits = out is None or out.nbytes == found.size
            return None if fits else ValueError("it does not fit")

        return self.channel.post(1, tag, check, lambda _: out)

    def close(self) -> None:
        self.lane.close_nowait()
        self.sender.close_nowait()


def bytes_of(size: int) -> torch.Tensor:
    return torch.arange(size).remainder(251).to(torch.uint8)


async def test_refused_message_behind_one_that_is_taken_waits_for_room() -> None:
    """The mailbox has no room for it; the lane reads on once a receive takes it."""
    bench = Bench(budget=0)
    refusing = bench.post(bytes_of(3), tag=1)
    await bench.send(bytes_of(10))
    await bench.send(bytes_of(2000), tag=1)
    found = None
    for _ in range(100):
        found = found or bench.channel.next_from(1, 0)
        if found is not None:
            break
        await asyncio.sleep(0)
    assert found is not None
    first = torch.zeros(10, dtype=torch.uint8)
    bench.lane.take(memory_of(first))
    assert torch.equal(first, bytes_of(10))
    await turns(5)
    with pytest.raises(ValueError, match="fit"):
        await bench.channel.wait(refusing)
    async with asyncio.timeout(10):
        arrival = await bench.channel.wait(bench.post(tag=1))
    assert torch.equal(arrival.tensor, bytes_of(2000))
    assert not bench.owner.evidence
    bench.close()


async def test_world_that_breaks_while_a_message_moves_delivers_no_half_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The receive was cancelled, and what had arrived is being copied."""
    bench = Bench(budget=1 << 30)
    size, goes_on, copied = OFFLOAD_BYTES + (1 << 20), threading.Event(), []
    own = Arrival.own

    def slowly(arrival: Arrival) -> None:
        own(arrival)
        copied.append(arrival)
        goes_on.wait(20)

    sending = asyncio.ensure_future(bench.send(bytes_of(size)))
    receive = bench.post(torch.zeros(size, dtype=torch.uint8))
    waiting = asyncio.ensure_future(bench.channel.wait(receive))
    async with asyncio.timeout(20):
        await until(
            lambda: (
                receive.arrival is not None and receive.arrival.received > OFFLOAD_BYTES
            )
        )
        arrival = receive.arrival
        assert arrival is not None
        if arrival.is_complete:
            pytest.skip("the kernel took all of it at once")
        monkeypatch.setattr(Arrival, "own", slowly)
        waiting.cancel()
        await until(lambda: bool(copied))
        received = arrival.received
        await turns(50)
        bench.channel.abort(lambda: ConnectionError("broken"))
        assert arrival.received == received, "more was read into the old memory"
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not bench.channel.mailbox.has_message(1, 0)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    bench.close()


async def test_everybody_who_waits_for_the_end_sees_it() -> None:
    """Two tasks may close one world."""
    bench = Bench(budget=1 << 20)
    sending = asyncio.ensure_future(bench.send(bytes_of(4 << 20)))
    await turns(3)
    waiting = [asyncio.ensure_future(bench.sender.wait_drained()) for _ in range(2)]
    await turns(3)
    assert not any(task.done() for task in waiting)
    receiving = asyncio.ensure_future(bench.channel.wait(bench.post()))
    async with asyncio.timeout(20):
        await asyncio.gather(*waiting, sending, receiving)
    bench.close()
