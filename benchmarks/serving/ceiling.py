"""Upper bounds for a pipeline: a bare route, and a route before three processes.

``python -m benchmarks.serving.ceiling FD STAGES`` serves on the listening socket FD.
The route is FastAPI's and returns the JSON of the request. If STAGES is not 0, the
bytes first pass through this many forked processes, over Unix sockets that keep packet
boundaries, and return from the last one. Nothing is checked, kept or retried.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
import sys

import uvicorn
from fastapi import FastAPI, Request, Response

NUMBER = struct.Struct("<Q")
"""Number of a request, before its bytes."""

PACKET_BYTES = 1 << 16
"""Maximum bytes of a packet."""


def fork_stages(count: int) -> tuple[socket.socket, socket.socket]:
    """Fork the stages; return the sockets to the first and from the last stage."""
    first, incoming = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = [first]
    for _ in range(count):
        outgoing, following = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            for sock in (*ends, following):
                if sock is not incoming:
                    sock.close()
            asyncio.run(_pass_on(incoming, outgoing))
            os._exit(0)
        incoming.close()
        outgoing.close()
        incoming = following
        ends.append(following)
    return first, incoming


async def _pass_on(incoming: socket.socket, outgoing: socket.socket) -> None:
    """Forward every packet until the sender closes its socket."""
    loop = asyncio.get_running_loop()
    incoming.setblocking(False)
    outgoing.setblocking(False)
    while packet := await loop.sock_recv(incoming, PACKET_BYTES):
        await loop.sock_sendall(outgoing, packet)


class Chain:
    """The stages, as the route calls them."""

    def __init__(self, first: socket.socket, last: socket.socket) -> None:
        self._first, self._last = first, last
        first.setblocking(False)
        last.setblocking(False)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._reading: asyncio.Task[None] | None = None

    async def call(self, content: bytes) -> bytes:
        """Send ``content`` through all stages, and return the last one's output."""
        loop = asyncio.get_running_loop()
        if self._reading is None:
            self._reading = loop.create_task(self._read())
        number = next(self._numbers)
        future: asyncio.Future[bytes] = loop.create_future()
        self._waiting[number] = future
        await loop.sock_sendall(self._first, NUMBER.pack(number) + content)
        return await future

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while packet := await loop.sock_recv(self._last, PACKET_BYTES):
            (number,) = NUMBER.unpack_from(packet)
            self._waiting.pop(number).set_result(packet[NUMBER.size :])


def make_app(chain: Chain | None) -> FastAPI:
    """Return the application; without a chain, the route answers by itself."""
    app = FastAPI()

    @app.post("/")
    async def echo(request: Request) -> Response:
        content = await request.body()
        if chain is not None:
            content = await chain.call(content)
        return Response(content, media_type="application/json")

    return app


def main() -> None:
    """Serve until standard input ends."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    count = int(sys.argv[2])
    chain = Chain(*fork_stages(count)) if count else None
    config = uvicorn.Config(make_app(chain), log_config=None, access_log=False)
    server = uvicorn.Server(config)

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        serving = loop.create_task(server.serve(sockets=[sock]))
        await loop.run_in_executor(None, sys.stdin.read)
        server.should_exit = True
        await serving

    asyncio.run(serve())


if __name__ == "__main__":
    main()
