"""A helper process of the controller, spoken to in lines of JSON. Shell."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multiworld.errors import LaunchError

logger = logging.getLogger("multiworld.serve")

END_S = 5.0
LINE = 2**24
"""Bytes of the longest line: thousands of machines."""


class HelperProcess:
    """``python -m MODULE FD WORDS...``: it says one line when it is ready.

    Args:
        module: What it runs.
        log: Where its output goes.
        on_news: Told every line after the first.
        on_end: Told when it has ended.
    """

    def __init__(
        self,
        module: str,
        log: Path,
        on_news: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._module, self._log = module, log
        self._on_news, self._on_end = on_news, on_end
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has said that it is ready, and has not ended."""
        return self._reading is not None and not self._reading.done()

    async def start(
        self, words: list[str], env: dict[str, str], limit_s: float
    ) -> dict[str, Any]:
        """Start it; return what it said first.

        Raises:
            LaunchError: It ended, or took longer than ``limit_s``.

        Cancellation: the process ends when this one drops its socket.
        """
        ours, theirs = socket.socketpair()
        with open(self._log, "ab") as log:  # noqa: ASYNC230 - opened, not read
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                str(theirs.fileno()),
                *words,
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
            )
        theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE)
        try:
            async with asyncio.timeout(limit_s):
                line = await reader.readline()
        except TimeoutError:
            line = b""
        if not line:
            await self.close(limit_s=0.0)
            raise LaunchError(f"{self._module} did not start; see {self._log}")
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))
        first: dict[str, Any] = json.loads(line)
        return first

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                self._on_news(json.loads(line))
        except (OSError, ValueError) as error:  # it ended in the midst of a line
            logger.warning("%s: %s", self._module, error)
        self._on_end()

    def tell(self, order: dict[str, Any]) -> None:
        """Send it an order; nobody takes it if it has ended."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(order).encode() + b"\n")

    async def close(self, limit_s: float = END_S) -> None:
        """End it by closing its socket; it is killed if it does not.

        Cancellation: it may live on until it sees its socket closed.
        """
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._process is None or self._process.returncode is not None:
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
