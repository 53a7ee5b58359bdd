"""A manager's session with a store. Shell.

One session serves every world that the manager has at that store. It answers the
store's questions (does this process still hold that rank?) as long as it is up. Losing
it hurts no ready world: the store is needed to meet, not to live.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from typing import Any, Protocol

from multiworld.errors import ProtocolVersionError, StoreUnreachableError
from multiworld.rendezvous import frames
from multiworld.rendezvous.address import StoreAddress
from multiworld.rendezvous.service import StoreService

Message = dict[str, Any]
Holds = Callable[[str, int, int], bool]

RETRY_S = 0.05
"""Seconds between attempts to reach a store that is not there yet."""


class SessionLostError(Exception):
    """The connection to the store ended while an answer was awaited."""


class Wire(Protocol):
    """What carries a session's messages to the store."""

    def send(self, message: Message) -> None:
        """Send one message; never waits."""

    def close(self) -> None:
        """End the session."""


class StoreSession:
    """Requests and their replies, over any wire."""

    def __init__(self, address: StoreAddress, holds: Holds) -> None:
        self.address = address
        self.local_host = ""
        self._holds = holds
        self._wire: Wire | None = None
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._requests = itertools.count(1)

    @property
    def is_open(self) -> bool:
        """True while the store can be reached through this session."""
        return self._wire is not None

    def attach(self, wire: Wire) -> None:
        """Start to use ``wire``."""
        self._wire = wire

    async def claim(self, fields: Message) -> Message:
        """Claim a rank and wait for the store's reply.

        Raises:
            SessionLostError: The store went away.

        Cancellation: withdraws the claim.
        """
        request, future = self._ask("claim", fields)
        try:
            return await future
        except asyncio.CancelledError:
            self._tell({"op": "withdraw", "request": request})
            raise
        finally:
            self._waiting.pop(request, None)

    def left(self, world: str, epoch: int, rank: int) -> None:
        """Tell the store that this process holds ``rank`` no longer."""
        self._tell({"op": "left", "world": world, "epoch": epoch, "rank": rank})

    def _ask(self, op: str, fields: Message) -> tuple[int, asyncio.Future[Message]]:
        if self._wire is None:
            raise SessionLostError
        request = next(self._requests)
        future = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        self._wire.send({"op": op, "request": request, **fields})
        return request, future

    def _tell(self, message: Message) -> None:
        if self._wire is not None:
            self._wire.send(message)

    def receive(self, message: Message) -> None:
        """Take one message of the store."""
        if message.get("op") == "ask":
            where = message["world"], message["epoch"], message["rank"]
            answer = {"ask": message["ask"], "holds": self._holds(*where)}
            self._tell({"op": "answer", **answer})
            return
        future = self._waiting.get(message.get("request", 0))
        if future is not None and not future.done():
            future.set_result(message)

    def ended(self) -> None:
        """Note that the wire is gone, and fail whoever waits."""
        self._wire = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SessionLostError())

    def close(self) -> None:
        """End the session; the store frees what it held."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self.ended()


class LocalWire:
    """A session with a store inside this process."""

    def __init__(self, service: StoreService, session: StoreSession) -> None:
        loop = asyncio.get_running_loop()
        self._loop, self._service = loop, service
        self._session = session
        self._key = service.open_session(self._deliver)

    def _deliver(self, message: Message) -> None:
        self._loop.call_soon(self._session.receive, message)

    def send(self, message: Message) -> None:
        """Hand ``message`` over on the next turn of the loop."""
        self._loop.call_soon(self._service.receive, self._key, message)

    def close(self) -> None:
        """End the session."""
        self._loop.call_soon(self._service.close_session, self._key)


class TcpWire:
    """A session with a store over TCP."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        session: StoreSession,
    ) -> None:
        self._writer = writer
        self._task = asyncio.get_running_loop().create_task(
            self._read(reader, session), name=f"multiworld store {session.address}"
        )

    def send(self, message: Message) -> None:
        """Queue ``message``."""
        if not self._writer.is_closing():
            self._writer.write(frames.encode(message))

    def close(self) -> None:
        """Send what is queued and hang up."""
        self._writer.close()
        self._task.cancel()

    def fileno(self) -> int:
        """Return the socket's descriptor, which a forked child must close."""
        sock = self._writer.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    async def _read(self, reader: asyncio.StreamReader, session: StoreSession) -> None:
        with contextlib.suppress(
            OSError, asyncio.IncompleteReadError, frames.FrameError
        ):
            while True:
                session.receive(await frames.read(reader))
        self._writer.close()
        session.ended()


async def connect(
    address: StoreAddress, holds: Holds, *, world: str, deadline: float
) -> StoreSession:
    """Open a session over TCP, trying again until ``deadline`` (loop time, seconds).

    Raises:
        StoreUnreachableError: Nobody answered in time.
        ProtocolVersionError: What answered speaks another version, or is no store.
    """
    loop = asyncio.get_running_loop()
    failure = "no attempt was made"
    while True:
        remaining = deadline - loop.time()
        if remaining <= 0:
            break
        try:
            async with asyncio.timeout(remaining):
                return await _connect_once(address, holds, world)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            failure = str(error) or type(error).__name__
        await asyncio.sleep(min(RETRY_S, max(0.0, deadline - loop.time())))
    raise StoreUnreachableError(
        f"no store answered at {address} for world {world!r} in time ({failure}); "
        "start rank 0 there or `multiworld store`, and check address, port and "
        "firewall",
        address=str(address),
    )


async def _connect_once(
    address: StoreAddress, holds: Holds, world: str
) -> StoreSession:
    reader, writer = await asyncio.open_connection(address.host, address.port)
    try:
        ours = frames.PROTOCOL_VERSION
        writer.write(frames.encode({"multiworld": ours, "world": world}))
        try:
            hello = await frames.read(reader)
            theirs = int(hello.get("multiworld", 0))
        except (frames.FrameError, ValueError, TypeError):
            theirs = 0
        if theirs != ours:
            raise _other_version(address, ours, theirs)
        session = StoreSession(address, holds)
        session.local_host = writer.get_extra_info("sockname")[0]
        session.attach(TcpWire(reader, writer, session))
    except BaseException:
        writer.close()
        raise
    return session


def _other_version(
    address: StoreAddress, ours: int, theirs: int
) -> ProtocolVersionError:
    if theirs == 0:
        what = "what answers there is not a multiworld store; check the port"
    else:
        what = f"it speaks version {theirs}; use one release of multiworld everywhere"
    return ProtocolVersionError(
        f"cannot use the store at {address}: we speak version {ours}, {what}",
        ours=ours,
        theirs=theirs,
    )
