"""Real processes that start in about 10 ms, to be killed and stopped.

Their fork server has imported torch but has run no operation: after a parallel
operation in the fork server, every child would hang. A child runs an
``async`` function of an importable module, and talks to the test through its ``Role``.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import traceback
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from multiworld.testing.hosts import Host, enter_namespace

PRELOAD = ["torch", "torch.distributed", "multiworld.world.manager"]
"""Modules that the fork server imports."""

LENGTH = struct.Struct("!Q")
READ_BYTES = 1024 * 1024

REPORT_S = 30.0
"""Default seconds to wait for a report."""


class ChildFailedError(AssertionError):
    """A child failed, or sent no report in time."""


class _Mail:
    """Messages over a pipe: 8 bytes of length, then a pickle."""

    # The event loop reads the messages without a thread. An incomplete message never
    # blocks it.

    def __init__(self, connection: Connection) -> None:
        with connection:
            self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._data = bytearray()
        self._messages: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._has_ended = True
            self._loop.remove_reader(self._socket.fileno())
        self._data += data
        while (end := _end_of(self._data)) <= len(self._data):
            content = bytes(self._data[LENGTH.size : end])
            del self._data[:end]
            self._messages.append(_unpickled(content))
        self._arrived.set()

    async def get(self) -> Any:
        while not self._messages:
            if self._has_ended:
                raise EOFError
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()

    def put(self, message: Any) -> None:
        content = pickle.dumps(message)
        with contextlib.suppress(OSError):
            self._socket.sendall(LENGTH.pack(len(content)) + content)

    def close(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()


def _end_of(data: bytearray) -> int:
    """Return where the first message ends; beyond the data if that is unknown."""
    if len(data) < LENGTH.size:
        return LENGTH.size
    (size,) = LENGTH.unpack_from(data)
    return LENGTH.size + int(size)


def _unpickled(content: bytes) -> Any:
    try:
        return pickle.loads(content)
    except Exception:  # e.g. the report has a class of a module that only the child has
        return "failed", f"its report cannot be read: {traceback.format_exc()}"


class Role:
    """A child's connection to the test; the first argument of the child's function."""

    def __init__(self, mail: _Mail) -> None:
        self._mail = mail

    def report(self, what: Any) -> None:
        """Send a report to the test.

        Args:
            what: An object that can be pickled.
        """
        self._mail.put(("report", what))

    async def order(self) -> Any:
        """Return the test's next order, or raise ``EOFError`` if the test has ended.

        Cancellation:
            Safe; no order is lost.
        """
        return await self._mail.get()


Body = Callable[..., Awaitable[None]]
"""Coroutine function that a child runs, with its ``Role`` as first argument."""


def _run(
    connection: Connection, body: Body, args: tuple[Any, ...], namespace: str | None
) -> None:
    import torch

    if namespace is not None:
        enter_namespace(namespace)
    torch.set_num_threads(1)

    async def main() -> None:
        mail = _Mail(connection)
        try:
            await body(Role(mail), *args)
            mail.put(("done", None))
        except Exception:
            mail.put(("failed", traceback.format_exc()))
            raise SystemExit(1) from None

    asyncio.run(main())


class Child:
    """The test's handle of one process."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self._process = process
        self._mail = _Mail(connection)
        self._is_ended = False

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def order(self, what: Any) -> None:
        """Send an order to the child; do nothing if it has ended.

        Args:
            what: An object that can be pickled.
        """
        self._mail.put(what)

    async def report(self, limit_s: float = REPORT_S) -> Any:
        """Return the next report; ``ChildFailedError`` if none arrives in time.

        Args:
            limit_s: Maximum seconds to wait.

        Cancellation:
            Safe; no report is lost.
        """
        async with self._in_time(limit_s, "sent no report in time"):
            kind, what = await self._mail.get()
        if kind != "report":
            raise ChildFailedError(f"process {self.pid} ended ({kind}): {what}")
        return what

    async def done(self, limit_s: float = REPORT_S) -> None:
        """Wait until the child's function has returned and the process has ended.

        Raises ``ChildFailedError`` if either fails, and drops unread reports.

        Args:
            limit_s: Maximum seconds to wait.

        Cancellation:
            Safe, but it also drops unread reports.
        """
        async with self._in_time(limit_s, "did not end in time"):
            while True:
                kind, what = await self._mail.get()
                if kind == "done":
                    break
                if kind == "failed":
                    raise ChildFailedError(f"process {self.pid} failed: {what}")
            await asyncio.to_thread(self._process.join)

    @contextlib.asynccontextmanager
    async def _in_time(self, limit_s: float, failure: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise ChildFailedError(f"process {self.pid} {failure}") from None
        except EOFError:
            why = "ended without a report"
            raise ChildFailedError(f"process {self.pid} {why}") from None

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Suspend the process with SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the process with SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill the process if it is alive, and free its resources; safe to repeat."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._mail.close()
        self._process.close()


class ProcessFleet:
    """Context manager that starts children, and kills all of them at its end::

    async with ProcessFleet() as fleet:
        child = fleet.start(body, 1, 2)
        assert await child.report() == "ready"
        child.kill()
    """

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._children: list[Child] = []

    async def __aenter__(self) -> ProcessFleet:
        return self

    async def __aexit__(self, *error: object) -> None:
        for child in self._children:
            child.end()

    def start(self, body: Body, *args: Any, host: Host | None = None) -> Child:
        """Return a new process that runs ``await body(role, *args)``.

        Args:
            body: Coroutine function of an importable module.
            args: Its arguments after the ``Role``; they must be picklable.
            host: Emulated host to run on; by default this machine.
        """
        ours, theirs = self._context.Pipe()
        namespace = None if host is None else host.namespace
        process = self._context.Process(
            target=_run, args=(theirs, body, args, namespace)
        )
        process.start()
        theirs.close()
        child = Child(process, ours)
        self._children.append(child)
        return child
