"""Common part of the ``*_end.py`` scripts: reads orders and carries them out.

Each line of standard input is an order in JSON: ``{"op": "send" | "recv" | "ping",
"size": bytes, "count": n, "is_first": bool}``. The script answers with one line when
the order is done, and exits at the end of its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from typing import Any, Protocol


class End(Protocol):
    """One end of a connection; never cancelled, because the process exits instead."""

    async def connect(self, rank: int, port: int) -> None:
        """Connect to the other end."""

    async def prepare(self, size: int) -> None:
        """Allocate the memory for messages of ``size`` bytes."""

    async def send(self) -> None:
        """Send one message."""

    async def recv(self) -> None:
        """Receive one message."""


async def obey(end: End, order: dict[str, Any]) -> None:
    await end.prepare(order["size"])
    for _ in range(order["count"]):
        match order["op"]:
            case "send":
                await end.send()
            case "recv":
                await end.recv()
            case "ping" if order["is_first"]:
                await end.send()
                await end.recv()
            case "ping":
                await end.recv()
                await end.send()


def serve(end: End) -> None:
    """Connect, and carry out orders until the input ends."""
    # Answers go to the original stdout. Output of libraries goes to stderr instead, so
    # that it cannot mix with them.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    rank, port = map(int, sys.argv[1:3])

    async def main() -> None:
        orders: asyncio.Queue[str] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen() -> None:
            """Queue orders; exit at the end of the input, even during an order."""
            for line in sys.stdin:
                loop.call_soon_threadsafe(orders.put_nowait, line)
            os._exit(0)

        threading.Thread(target=listen, daemon=True).start()
        await end.connect(rank, port)
        answers.write("ready\n")
        while True:
            await obey(end, json.loads(await orders.get()))
            answers.write("done\n")

    asyncio.run(main())


def meet(rank: int, port: int) -> socket.socket:
    """Return a TCP connection between the two ends, for exchanging addresses."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", port)) as server:
            server.settimeout(30)
            return server.accept()[0]
    for _ in range(300):
        try:
            return socket.create_connection(("127.0.0.1", port), 30)
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise ConnectionError(f"nothing listens on port {port}")


def swap(rank: int, port: int, blob: bytes) -> bytes:
    """Send bytes to the other end, and return the bytes that it sent."""
    with meet(rank, port) as sock:
        sock.sendall(len(blob).to_bytes(8, "little") + blob)
        with sock.makefile("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            return stream.read(size)
