"""Contenders: ways to move a tensor between two processes.

All have the methods of ``Contender``. Rank 0 and rank 1 call them at the same time.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from multiworld.backends import spin
from multiworld.backends.dtypes import memory_of
from multiworld.config import WorldConfig
from multiworld.world.manager import WorldManager


class Contender(Protocol):
    """One end of a connection between two processes, rank 0 and rank 1."""

    def send_many(self, tensor: Tensor, count: int) -> None:
        """Send the same tensor ``count`` times."""

    def recv_many(self, out: Tensor | None, count: int) -> None:
        """Receive ``count`` times into ``out``; None: into new tensors."""
        # Raises NotImplementedError if ``out`` is None and this contender must know the
        # shape.

    def ping(self, tensor: Tensor, count: int, *, is_first: bool) -> None:
        """Make ``count`` round trips; the end with ``is_first`` sends first."""
        # ``tensor`` is the message, and the buffer for the answer.

    def close(self) -> None:
        """Close the connection."""


class Blocking:
    """Base of the contenders without an event loop."""

    def send(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def recv(self, out: Tensor) -> None:
        raise NotImplementedError

    def send_many(self, tensor: Tensor, count: int) -> None:
        for _ in range(count):
            self.send(tensor)

    def recv_many(self, out: Tensor | None, count: int) -> None:
        if out is None:
            raise NotImplementedError("this contender needs a tensor to receive into")
        for _ in range(count):
            self.recv(out)

    def ping(self, tensor: Tensor, count: int, *, is_first: bool) -> None:
        for _ in range(count):
            if is_first:
                self.send(tensor)
                self.recv(tensor)
            else:
                self.recv(tensor)
                self.send(tensor)


class PlainGloo(Blocking):
    """``send`` and ``recv`` of torch.distributed, on Gloo."""

    def __init__(self, rank: int, port: int, size: int = 2) -> None:
        store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        self._peer = 1 - rank

    def send(self, tensor: Tensor) -> None:
        dist.send(tensor, self._peer)

    def recv(self, out: Tensor) -> None:
        dist.recv(out, self._peer)

    def close(self) -> None:
        dist.destroy_process_group()


class GlooInThreads:
    """torch.distributed under asyncio: every send and receive blocks a thread."""

    # Uses the default group, which ``PlainGloo`` has created.

    def __init__(self, rank: int, port: int) -> None:
        self._peer = 1 - rank
        self._runner = asyncio.Runner()

    async def _send(self, tensor: Tensor) -> None:
        await asyncio.to_thread(dist.send, tensor, self._peer)

    async def _recv(self, tensor: Tensor) -> None:
        await asyncio.to_thread(dist.recv, tensor, self._peer)

    def send_many(self, tensor: Tensor, count: int) -> None:
        async def run() -> None:
            for _ in range(count):
                await self._send(tensor)

        self._runner.run(run())

    def recv_many(self, out: Tensor | None, count: int) -> None:
        if out is None:
            raise NotImplementedError("this contender needs a tensor to receive into")

        async def run() -> None:
            for _ in range(count):
                await self._recv(out)

        self._runner.run(run())

    def ping(self, tensor: Tensor, count: int, *, is_first: bool) -> None:
        async def run() -> None:
            for _ in range(count):
                if is_first:
                    await self._send(tensor)
                    await self._recv(tensor)
                else:
                    await self._recv(tensor)
                    await self._send(tensor)

        self._runner.run(run())

    def close(self) -> None:
        self._runner.close()


class OneWorld:
    """A world of two, on an event loop that runs only during calls."""

    def __init__(
        self,
        rank: int,
        port: int,
        backend: str = "direct",
        *,
        # Whether heartbeats are sent and checked, see ``unwatch``.
        is_watched: bool = True,
        config: WorldConfig | None = None,  # config of both the manager and the world
    ) -> None:
        self._peer = 1 - rank
        self._runner = asyncio.Runner()
        self.manager, self.world = self._runner.run(
            self._join(rank, port, backend, config)
        )
        if not is_watched:
            self._runner.run(unwatch(self.manager))

    async def _join(
        self, rank: int, port: int, backend: str, config: WorldConfig | None
    ) -> tuple[WorldManager, Any]:
        manager = WorldManager(config=config)
        world = await manager.join(
            "bench",
            rank=rank,
            size=2,
            store=f"tcp://127.0.0.1:{port}",
            backend=backend,
            config=config,
        )
        return manager, world

    def send_many(self, tensor: Tensor, count: int) -> None:
        async def run() -> None:
            for _ in range(count):
                await self.world.send(tensor, dst=self._peer)

        self._runner.run(run())

    def recv_many(self, out: Tensor | None, count: int) -> None:
        async def run() -> None:
            for _ in range(count):
                await self.world.recv(out, src=self._peer)

        self._runner.run(run())

    def ping(self, tensor: Tensor, count: int, *, is_first: bool) -> None:
        async def run() -> None:
            for _ in range(count):
                if is_first:
                    await self.world.send(tensor, dst=self._peer)
                    await self.world.recv(tensor, src=self._peer)
                else:
                    await self.world.recv(tensor, src=self._peer)
                    await self.world.send(tensor, dst=self._peer)

        self._runner.run(run())

    def watch(self, *, is_on: bool) -> None:
        """Switch heartbeats and their checks on or off; see ``unwatch``."""

        async def turn_on() -> None:
            wake(self.manager)
            self.manager.watchdog._ticker = None
            self.manager.watchdog._start_ticking()

        self._runner.run(unwatch(self.manager))
        if is_on:
            self._runner.run(turn_on())

    def close(self) -> None:
        wake(self.manager)
        self._runner.run(self.manager.close())
        self._runner.close()


class ByName(OneWorld):
    """A world of two behind ``WorldCommunicator``, the interface of pymultiworld."""

    def ping(self, tensor: Tensor, count: int, *, is_first: bool) -> None:
        worlds, peer = self.manager.communicator, self._peer

        async def run() -> None:
            for _ in range(count):
                if is_first:
                    await worlds.send(tensor, peer, "bench")
                    await worlds.recv(tensor, peer, "bench")
                else:
                    await worlds.recv(tensor, peer, "bench")
                    await worlds.send(tensor, peer, "bench")

        self._runner.run(run())


class Unspun(OneWorld):
    """A world of two whose receives never spin before they sleep in the selector."""

    def ping(self, tensor: Tensor, count: int, *, is_first: bool) -> None:
        most_s, spin.MAX_SPIN_S = spin.MAX_SPIN_S, 0.0
        try:
            super().ping(tensor, count, is_first=is_first)
        finally:
            spin.MAX_SPIN_S = most_s


async def unwatch(manager: WorldManager) -> None:
    """Stop sending heartbeats, and stop checking those of the peers."""
    # SIGSTOP stops the heartbeat helper; ``wake`` resumes it. This function never
    # waits, so it cannot be cancelled half way.
    watchdog = manager.watchdog
    if watchdog.helper_pid is not None:
        os.kill(watchdog.helper_pid, signal.SIGSTOP)
    ticker = watchdog._ticker
    assert ticker is not None
    ticker.cancel()


def wake(manager: WorldManager) -> None:
    """Resume the heartbeat helper that ``unwatch`` stopped, so that it can exit."""
    helper = manager.watchdog.helper_pid
    if helper is not None:
        os.kill(helper, signal.SIGCONT)


def stream(
    rank: int, rival: Contender, tensor: Tensor, count: int, *, is_known: bool = True
) -> float:
    """Send from rank 0 to rank 1; return the seconds until everything has arrived."""
    # ``is_known``: the receiver passes a buffer; otherwise it gets new tensors.
    one = torch.zeros(1)
    began = time.perf_counter()
    if rank == 0:
        rival.send_many(tensor, count)
        rival.recv_many(one, 1)
    else:
        rival.recv_many(tensor if is_known else None, count)
        rival.send_many(one, 1)
    return time.perf_counter() - began


class RawSocket(Blocking):
    """A blocking socket: the lower bound for data that the kernel copies."""

    def __init__(self, rank: int, port: int, family: str) -> None:
        kind: int
        address: Any
        if family == "unix":
            kind, address = socket.AF_UNIX, f"\0multiworld-bench-{port}"
        else:
            kind, address = socket.AF_INET, ("127.0.0.1", port)
        self.sock = connect(kind, address, is_server=rank == 0)
        if family == "tcp":
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, tensor: Tensor) -> None:
        self.sock.sendall(memory_of(tensor))

    def recv(self, out: Tensor) -> None:
        memory = memory_of(out)
        while len(memory):
            count = self.sock.recv_into(memory)
            if not count:
                raise ConnectionError("the other end closed the connection")
            memory = memory[count:]

    def close(self) -> None:
        self.sock.close()


def connect(family: int, address: Any, *, is_server: bool) -> socket.socket:
    """Return one end of a connection; retry for a minute as the client."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    if is_server:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1)
        sock.settimeout(60)
        found, _ = sock.accept()
        sock.close()
        return found
    for _ in range(600):
        try:
            sock.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            time.sleep(0.1)
        else:
            return sock
    raise ConnectionError(f"nothing listens on {address!r}")


class Zmq(Blocking):
    """pyzmq over a Unix socket, with a header of the size that dtype and shape need."""

    def __init__(self, rank: int, port: int) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        path = Path(tempfile.gettempdir()) / f"multiworld-bench-{port}.sock"
        if rank == 0:
            self._socket.bind(f"ipc://{path}")
        else:
            self._socket.connect(f"ipc://{path}")
        self._path = path if rank == 0 else None
        self._head = struct.pack("<QQ", 0, 0)
        self._sending: Tensor | None = None

    def send(self, tensor: Tensor) -> None:
        self._sending = tensor  # keep it, because zmq's thread still reads it later
        self._socket.send_multipart([self._head, memory_of(tensor)], copy=False)

    def recv(self, out: Tensor) -> None:
        _, frame = self._socket.recv_multipart(copy=False)
        out.copy_(torch.frombuffer(frame.buffer, dtype=out.dtype).view(out.shape))

    def close(self) -> None:
        self._socket.close(linger=1000)
        self._context.term()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


COLD_BYTES = 2**27
"""Total bytes of the buffers that are copied in turn, more than caches hold."""


class Memcpy:
    """Copies inside one process, to show the cost of a copy on this machine."""

    def __init__(self, rank: int, port: int, min_bytes: int = 0) -> None:
        # Minimum total bytes of the buffers that are copied in turn.
        self._min_bytes = min_bytes
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def send_many(self, tensor: Tensor, count: int) -> None:
        """Do nothing; ``recv_many`` copies."""

    def recv_many(self, out: Tensor | None, count: int) -> None:
        """Copy ``count`` times."""
        if out is None:
            raise NotImplementedError("this contender needs a tensor to receive into")
        if not self._buffers or self._buffers[0][0].shape != out.shape:
            needed = max(1, self._min_bytes // max(1, out.nbytes))
            self._buffers = [(out.clone(), out.clone()) for _ in range(needed)]
        for number in range(count):
            target, source = self._buffers[number % len(self._buffers)]
            target.copy_(source)

    def ping(self, tensor: Tensor, count: int, *, is_first: bool) -> None:
        raise NotImplementedError("memcpy has no round trip")

    def close(self) -> None:
        """Do nothing."""


COPIES = {"memcpy": 0, "memcpy, cold": 2**18}
"""Contenders that only copy, each with its minimum bytes of a message. The second one
copies memory that is not in the cache."""

Maker = Callable[[int, int], Contender]

MAKERS: dict[str, Maker] = {
    "plain gloo": PlainGloo,
    "gloo, asyncio": GlooInThreads,
    "world, gloo": lambda rank, port: OneWorld(rank, port, "gloo"),
    "world, direct": OneWorld,
    "by name": ByName,
    "no spin": Unspun,
    "unwatched": lambda rank, port: OneWorld(rank, port, is_watched=False),
    "unix socket": lambda rank, port: RawSocket(rank, port, "unix"),
    "tcp socket": lambda rank, port: RawSocket(rank, port, "tcp"),
    "pyzmq": Zmq,
    "memcpy": Memcpy,
    "memcpy, cold": lambda rank, port: Memcpy(rank, port, COLD_BYTES),
}
"""Constructors by contender, in the order they are measured and shown."""


def available() -> list[str]:
    """Return the contenders whose packages are installed."""
    has_zmq = importlib.util.find_spec("zmq") is not None
    return [name for name in MAKERS if name != "pyzmq" or has_zmq]
