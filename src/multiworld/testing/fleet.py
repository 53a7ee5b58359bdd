"""Real processes that start in hundredths of a second, and can be broken on purpose.

They are forked from a server that has imported torch and run nothing (a preload that
runs any parallel operation would hang every child). A child runs an ``async`` function
of an importable module, reports to the test with ``Role.report`` and takes orders with
``Role.order``.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from multiworld.testing.hosts import Host, enter_namespace

PRELOAD = ["torch", "torch.distributed", "multiworld.world.manager"]

REPORT_S = 30.0
"""How long a report may take before the test is told that none came."""


class ChildFailedError(AssertionError):
    """A child ended with an error, or said nothing in time."""


class _Mail:
    """Messages over a pipe, without a thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._is_over = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._read)

    def _read(self) -> None:
        try:
            while self._connection.poll():
                self._messages.append(self._connection.recv())
        except (EOFError, OSError):
            self._is_over = True
            self._loop.remove_reader(self._connection.fileno())
        self._arrived.set()

    async def get(self) -> Any:
        while not self._messages:
            if self._is_over:
                raise EOFError
            self._arrived.clear()
            await self._arrived.wait()
        return self._messages.popleft()

    def put(self, message: Any) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def close(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._loop.remove_reader(self._connection.fileno())
        self._connection.close()


class Role:
    """What a child's function gets."""

    def __init__(self, mail: _Mail) -> None:
        self._mail = mail

    def report(self, what: Any) -> None:
        """Tell the test something that can be pickled."""
        self._mail.put(("report", what))

    async def order(self) -> Any:
        """Wait for the test's next order.

        Raises:
            EOFError: The test has ended.
        """
        return await self._mail.get()


Body = Callable[..., Awaitable[None]]


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
    """One process, seen from the test."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self._process = process
        self._mail = _Mail(connection)
        self._is_ended = False

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process.pid is not None
        return self._process.pid

    def order(self, what: Any) -> None:
        """Tell the child something."""
        self._mail.put(what)

    async def report(self, limit_s: float = REPORT_S) -> Any:
        """Wait for the child's next report.

        Raises:
            ChildFailedError: It ended instead, or said nothing in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                kind, what = await self._mail.get()
        except TimeoutError:
            raise ChildFailedError(f"process {self.pid} said nothing") from None
        except EOFError:
            raise ChildFailedError(f"process {self.pid} ended silently") from None
        if kind != "report":
            raise ChildFailedError(f"process {self.pid} is {kind}: {what}")
        return what

    async def done(self, limit_s: float = REPORT_S) -> None:
        """Wait until the child's function has returned.

        Raises:
            ChildFailedError: It raised, or has not returned in time.
        """
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    kind, what = await self._mail.get()
                    if kind == "done":
                        break
                    if kind == "failed":
                        raise ChildFailedError(f"process {self.pid} failed: {what}")
                await asyncio.to_thread(self._process.join)
        except TimeoutError:
            raise ChildFailedError(f"process {self.pid} does not end") from None
        except EOFError:
            raise ChildFailedError(f"process {self.pid} ended silently") from None

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Kill it if it lives, and forget it; safe to repeat."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._mail.close()
        self._process.close()


class ProcessFleet:
    """Starts children, and ends all of them at the end.

    ::

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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.end()

    def start(self, body: Body, *args: Any, host: Host | None = None) -> Child:
        """Run ``await body(role, *args)`` in a new process, on ``host`` if given."""
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
