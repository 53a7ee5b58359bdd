"""A manager's session with a store. Shell.

One session serves every world that the manager has at that store. It answers the
store's questions (does this process still hold that rank?) as long as it is up. Losing
it hurts no ready world: the store is needed to meet, not to live.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from multiworld.errors import (
    ProtocolVersionError,
    StoreUnreachableError,
    WrongSecretError,
)
from multiworld.net import frames
from multiworld.net.framed_connection import FramedConnection
from multiworld.net.handshake import HandshakeError, dialing
from multiworld.net.listener import read_frame
from multiworld.net.security import Security
from multiworld.net.streams import Stream, start_tls, write_all
from multiworld.net.tcp import resolve, tune
from multiworld.rendezvous.store_address import StoreAddress, StoreAddresses
from multiworld.rendezvous.store_service import StoreService

logger = logging.getLogger("multiworld.store")

Message = dict[str, Any]
RETRY_S = 0.05
"""Seconds between attempts to reach a store that is not there yet."""


TAKEN_S = 2.0
"""Seconds that a store has to say that a claim has arrived; else its process is stopped
or its host gone, and the session counts as lost."""

CONNECT_S = 2.0
"""Seconds that one store has to answer before the next address is tried."""


class SessionOwner(Protocol):
    """Whose sessions these are."""

    def holds(self, world: str, epoch: int, rank: int) -> bool:
        """Tell whether this process holds a rank."""

    def holdings(self, where: StoreAddresses) -> list[Message]:
        """Return what is held of the worlds that met there: world, epoch, rank, uid."""

    def member_waits(self, note: Message) -> None:
        """Take note that a stranger waits for a rank, or no longer."""

    def member_gave_up(self, note: Message) -> None:
        """Take note that a member was admitted and is not coming."""


class SessionLostError(Exception):
    """The connection to the store ended while an answer was awaited."""


class StoreConnection(Protocol):
    """What carries a session's messages to the store."""

    def send(self, message: Message) -> None:
        """Send one message; never waits."""

    def close(self) -> None:
        """End the session."""


class StoreSession:
    """Requests and their replies, over any wire."""

    def __init__(self, address: StoreAddress, owner: SessionOwner) -> None:
        self.address = address
        self.local_host = ""
        self._owner = owner
        self._on_lost: Callable[[], None] = _ignore
        self._taken: dict[int, asyncio.Future[None]] = {}
        self._wire: StoreConnection | None = None
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._requests = itertools.count(1)

    @property
    def is_open(self) -> bool:
        """True while the store can be reached through this session."""
        return self._wire is not None

    def attach(self, wire: StoreConnection) -> None:
        """Start to use ``wire``."""
        self._wire = wire

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call ``on_lost`` when the store goes away by itself."""
        self._on_lost = on_lost

    def announce(self, where: StoreAddresses) -> None:
        """Tell a store that may be new what this process holds."""
        for holding in self._owner.holdings(where):
            self._tell({"op": "announce", **holding})

    async def claim(self, op: str, fields: Message) -> Message:
        """Claim a rank (``op`` "claim" or "reform") and wait for the store's reply.

        Raises:
            SessionLostError: The store went away, or takes no claims.

        Cancellation: withdraws the claim.
        """
        place = list(self.address.place)
        request, future = self._ask(op, {**fields, "place": place})
        taken = self._taken[request] = asyncio.get_running_loop().create_future()
        try:
            waiting = (taken, future)
            await asyncio.wait(
                waiting, timeout=TAKEN_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not (taken.done() or future.done()):
                self.drop()
                raise SessionLostError
            return await future
        except asyncio.CancelledError:
            self._tell({"op": "withdraw", "request": request})
            raise
        finally:
            self._waiting.pop(request, None)
            self._taken.pop(request, None)
            if future.done() and not future.cancelled():
                future.exception()  # a session that was lost is raised here

    def left(
        self, world: str, epoch: int, rank: int, lost: frozenset[int] = frozenset()
    ) -> None:
        """Tell the store that this process holds ``rank`` no more, and who is lost."""
        where = {"world": world, "epoch": epoch, "rank": rank}
        self._tell({"op": "left", "lost": sorted(lost), **where})

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
        match message.get("op"):
            case "ask":
                where = message["world"], message["epoch"], message["rank"]
                answer = {"ask": message["ask"], "holds": self._owner.holds(*where)}
                self._tell({"op": "answer", **answer})
                return
            case "waiting":
                self._owner.member_waits(message)
                return
            case "abandoned":
                self._owner.member_gave_up(message)
                return
            case "taken":
                taken = self._taken.get(message.get("request", 0))
                if taken is not None and not taken.done():
                    taken.set_result(None)
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
        on_lost, self._on_lost = self._on_lost, _ignore
        on_lost()

    def drop(self) -> None:
        """Hang up on a store that does not answer."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self.ended()

    def close(self) -> None:
        """End the session; the store frees what it held."""
        self._on_lost = _ignore
        self.drop()


class LocalConnection:
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


class TcpConnection:
    """A session with a store over TCP, plain or under TLS."""

    def __init__(self, stream: Stream, session: StoreSession) -> None:
        self._session = session
        self._framed = FramedConnection(stream, session.receive, self._ended)

    def send(self, message: Message) -> None:
        """Queue ``message``."""
        self._framed.send(message)

    def close(self) -> None:
        """Hang up."""
        self._framed.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, which a forked child must close."""
        return self._framed.fileno()

    def _ended(self, evidence: str, is_broken: bool) -> None:
        if is_broken:
            logger.warning("%s broke the protocol: %s", self._session.address, evidence)
        self._session.ended()


async def connect(
    addresses: StoreAddresses,
    owner: SessionOwner,
    *,
    world: str,
    deadline: float,
    security: Security,
) -> StoreSession:
    """Open a session with the first store that answers, trying until ``deadline``.

    Args:
        addresses: Where the store may be.
        owner: Whose session it is.
        world: For the store's log.
        deadline: Of the loop's clock, in seconds.
        security: What both sides must show.

    Raises:
        StoreUnreachableError: Nobody answered in time.
        WrongSecretError: What answered does not hold our secret, or no TLS came about.
        ProtocolVersionError: What answered speaks another version, or is no store.
    """
    loop = asyncio.get_running_loop()
    failures: dict[StoreAddress, str] = {}
    while deadline > loop.time():
        for address in addresses.stores:
            remaining = deadline - loop.time()
            # The last hope gets all the time there is.
            limit_s = CONNECT_S if len(addresses.stores) > 1 else remaining
            try:
                async with asyncio.timeout(min(remaining, limit_s)):
                    return await _connect_once(address, owner, world, security)
            except (OSError, TimeoutError) as error:
                failures[address] = str(error) or type(error).__name__
        await asyncio.sleep(min(RETRY_S, max(0.0, deadline - loop.time())))
    why = "; ".join(f"{where}: {what}" for where, what in failures.items())
    raise StoreUnreachableError(
        f"no store answered at {addresses} for world {world!r} in time "
        f"({why or 'no attempt was made'}); start rank 0 there or `multiworld store`, "
        "and check address, port and firewall",
        address=str(addresses),
    )


async def _connect_once(
    address: StoreAddress, owner: SessionOwner, world: str, security: Security
) -> StoreSession:
    loop = asyncio.get_running_loop()
    family, where = await resolve(address.host, address.port)
    sock = socket.socket(family, socket.SOCK_STREAM)
    stream: Stream = sock
    try:
        tune(sock)
        await loop.sock_connect(sock, where)
        local_host = sock.getsockname()[0]
        if security.tls is not None:
            context = security.tls.context(is_server=False)
            stream = await start_tls(sock, context, is_server=False)
        await _shake_hands(address, stream, world, security)
    except ssl.SSLError as error:
        stream.close()
        raise tls_failed(address, error) from error
    except BaseException:
        stream.close()
        raise
    session = StoreSession(address, owner)
    session.local_host = local_host
    session.attach(TcpConnection(stream, session))
    return session


async def _shake_hands(
    address: StoreAddress, stream: Stream, world: str, security: Security
) -> None:
    steps = dialing({"world": world}, security)
    try:
        message = next(steps)
        while True:
            await write_all(stream, frames.encode(message))
            message = steps.send(await read_frame(stream))
    except StopIteration:
        return
    except frames.FrameError as error:
        raise other_version(address, 0) from error
    except HandshakeError as error:
        raise refused_by(address, error) from error


def refused_by(address: StoreAddress, error: HandshakeError) -> Exception:
    """Return what a refused handshake with a store means to the caller."""
    if error.kind == "version":
        return other_version(address, error.theirs)
    if error.kind == "secret":
        return WrongSecretError(
            f"the store at {address} and this process do not hold the same secret: "
            f"{error}; set MULTIWORLD_SECRET or MULTIWORLD_SECRET_FILE alike everywhere"
        )
    return error


def tls_failed(address: StoreAddress, error: ssl.SSLError) -> WrongSecretError:
    """Return what a failed TLS handshake means to the caller."""
    return WrongSecretError(
        f"no TLS connection with the store at {address}: {error}; check that both "
        "sides have certificates of one authority, and that the store has TLS on"
    )


def _ignore() -> None:
    """Nobody wants to know."""


def other_version(address: StoreAddress, theirs: int) -> ProtocolVersionError:
    """Return that a store speaks another version, or 0: no language of ours."""
    ours = frames.PROTOCOL_VERSION
    if theirs == 0:
        what = "what answers there is not a multiworld store; check the port"
    else:
        what = f"it speaks version {theirs}; use one release of multiworld everywhere"
    return ProtocolVersionError(
        f"cannot use the store at {address}: we speak version {ours}, {what}",
        ours=ours,
        theirs=theirs,
    )
