"""A manager's session with a store, for all its worlds there. Through the session, the
store asks whether this process still holds a rank. Losing the session harms no ready
world: members need it only to join and to change size."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from multiworld import errors
from multiworld.net import frames
from multiworld.net.framed_connection import FramedConnection
from multiworld.net.handshake import HandshakeError, dialing
from multiworld.net.listener import shake_hands
from multiworld.net.security import Security
from multiworld.net.streams import Stream, start_tls
from multiworld.net.tcp import connected, keep_alive, resolve_all
from multiworld.rendezvous import store_messages as messages
from multiworld.rendezvous.store_address import StoreAddress, StoreAddresses

logger = logging.getLogger("multiworld.store")

RETRY_S = 0.05  # seconds between attempts to reach a store that does not answer yet

# Seconds in which a store must acknowledge a claim. If it does not, its process is
# stopped or its host is down, and the session counts as lost.
TAKEN_S = 2.0
# Limit in seconds for trying one of several stores. If its name has several IP
# addresses, the limit covers all of them together.
CONNECT_S = 2.0


class SessionOwner(Protocol):
    """Receiver of the store's questions and notices."""

    def holds(self, world: str, epoch: int, rank: int) -> bool:
        """Return whether this process holds a rank."""

    def holdings(self, where: StoreAddresses) -> list[messages.Announce]:
        """Return each rank that this process holds in worlds of a store."""

    def noticed(self, notice: messages.NewcomerWaits | messages.MemberGaveUp) -> None:
        """Handle a notice: a newcomer waits for a rank or has stopped waiting, or an
        admitted member has withdrawn its claim."""


class SessionLostError(Exception):
    """The connection to the store ended before an answer arrived."""


class StoreConnection(Protocol):
    """Transport of a session's messages to the store."""

    def send(self, message: messages.StoreRequest) -> None:
        """Send one message without waiting."""

    def close(self) -> None:
        """End the session."""


class StoreSession:
    """Requests to a store and their replies; ``local_host`` is this side's address."""

    def __init__(self, address: StoreAddress, owner: SessionOwner) -> None:
        self.address = address
        self.local_host = ""
        self._owner = owner
        self._on_lost: Callable[[], None] = _ignore
        self._taken: dict[int, asyncio.Future[None]] = {}
        self._wire: StoreConnection | None = None
        self._waiting: dict[int, asyncio.Future[messages.Reply]] = {}
        self._requests = itertools.count(1)
        self._answered: dict[str, int] = {}

    @property
    def is_open(self) -> bool:
        return self._wire is not None

    def attach(self, wire: StoreConnection) -> None:
        self._wire = wire

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call ``on_lost`` when the session ends other than by ``close``."""
        self._on_lost = on_lost

    def announce(self, where: StoreAddresses) -> None:
        """Report the ranks that this process holds: the store may have restarted."""
        for holding in self._owner.holdings(where):
            self._send(holding)

    async def claim(
        self, claim: messages.Claim | messages.SurvivorClaim
    ) -> messages.ClaimOutcome:
        """Claim a rank and wait for the reply; cancelling withdraws the claim."""
        if self._wire is None:
            raise SessionLostError
        request, place = next(self._requests), self.address.place
        loop = asyncio.get_running_loop()
        future = self._waiting[request] = loop.create_future()
        taken = self._taken[request] = loop.create_future()
        self._wire.send(msgspec.structs.replace(claim, request=request, place=place))
        try:
            waiting = (taken, future)
            await asyncio.wait(
                waiting, timeout=TAKEN_S, return_when=asyncio.FIRST_COMPLETED
            )
            if not (taken.done() or future.done()):
                self.drop()
                raise SessionLostError
            outcome = (await future).outcome
            if isinstance(outcome, messages.ClaimOutcome):
                self._answered[claim.world] = request
                return outcome
            raise errors.RendezvousError(f"the store answered a claim with {outcome}")
        except asyncio.CancelledError:
            self._send(messages.Withdraw(request))
            raise
        finally:
            self._waiting.pop(request, None)
            self._taken.pop(request, None)
            if future.done() and not future.cancelled():
                future.exception()  # mark it as retrieved; the await raises it

    def withdraw(self, world: str) -> None:
        """Withdraw the last answered claim, if it was granted."""
        request = self._answered.pop(world, None)
        if request is not None:
            self._send(messages.Withdraw(request))

    def left(
        self, world: str, epoch: int, rank: int, lost: frozenset[int] = frozenset()
    ) -> None:
        """Report a rank that this process no longer holds, and others that are lost."""
        self._answered.pop(world, None)
        self._send(messages.Leave(world, epoch, rank, tuple(sorted(lost))))

    def _send(self, message: messages.StoreRequest) -> None:
        if self._wire is not None:
            self._wire.send(message)

    def receive(self, message: messages.StoreMessage) -> None:
        match message:
            case messages.AskHolds(ask, world, epoch, rank):
                holds = self._owner.holds(world, epoch, rank)
                self._send(messages.HoldsAnswer(ask, holds))
            case messages.NewcomerWaits() | messages.MemberGaveUp():
                self._owner.noticed(message)
            case messages.ClaimReceived(request):
                taken = self._taken.get(request)
                if taken is not None and not taken.done():
                    taken.set_result(None)
            case messages.Reply(request):
                future = self._waiting.get(request)
                if future is not None and not future.done():
                    future.set_result(message)

    def ended(self, evidence: str = "", is_broken: bool = False) -> None:
        """Mark the connection as lost and fail every waiting request."""
        if is_broken:
            where = self.address
            logger.warning("the store at %s violated the protocol: %s", where, evidence)
        self._wire = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SessionLostError())
        on_lost, self._on_lost = self._on_lost, _ignore
        on_lost()

    def drop(self) -> None:
        """Close the connection to a store that does not answer."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()
        self.ended()

    def close(self) -> None:
        """End the session; the store no longer protects the ranks that it held."""
        self._on_lost = _ignore
        self.drop()


async def connect(
    addresses: StoreAddresses,
    owner: SessionOwner,
    *,
    world: str,
    deadline: float,
    security: Security,
) -> StoreSession:
    """Open a session with the first store that answers, trying until the deadline."""
    loop = asyncio.get_running_loop()
    failures: dict[StoreAddress, str] = {}
    while deadline > loop.time():
        for address in addresses.stores:
            remaining = deadline - loop.time()
            # A single store gets all the remaining time.
            limit_s = CONNECT_S if len(addresses.stores) > 1 else remaining
            try:
                async with asyncio.timeout(min(remaining, limit_s)):
                    return await _connect_once(address, owner, world, security)
            except TimeoutError:
                # The last attempt may lack time; an earlier error says more.
                failures.setdefault(address, TimeoutError.__name__)
            except OSError as error:
                failures[address] = str(error) or type(error).__name__
        await asyncio.sleep(min(RETRY_S, max(0.0, deadline - loop.time())))
    why = "; ".join(f"{where}: {what}" for where, what in failures.items())
    raise errors.StoreUnreachableError(
        f"no store answered at {addresses} for world {world!r} in time "
        f"({why or 'no attempt was made'}); start rank 0 or `multiworld store` there, "
        "and check the address, the port and the firewall",
        address=str(addresses),
    )


async def check_store(address: StoreAddress, security: Security) -> None:
    """Check by a handshake that a store answers and can be used."""
    stream, _ = await _open(address, "", security)
    stream.close()


async def _connect_once(
    address: StoreAddress, owner: SessionOwner, world: str, security: Security
) -> StoreSession:
    stream, local_host = await _open(address, world, security)
    session = StoreSession(address, owner)
    session.local_host = local_host
    session.attach(
        FramedConnection(stream, messages.replies, session.receive, session.ended)
    )
    return session


async def _open(
    address: StoreAddress, world: str, security: Security
) -> tuple[Stream, str]:
    """Return a connection after its handshake, and this side's address."""
    sock = await _dial(await resolve_all(address.host, address.port))
    stream: Stream = sock
    try:
        local_host: str = sock.getsockname()[0]
        if security.tls is not None:
            context = security.tls.context(is_server=False)
            stream = await start_tls(sock, context, is_server=False)
        await _shake_hands(address, stream, world, security)
    except ssl.SSLError as error:
        stream.close()
        raise tls_failed(address, error) from error
    except ConnectionError as error:
        stream.close()
        has_tls = security.tls is not None
        hint = "does not use TLS" if has_tls else "requires TLS"
        why = f"{error} in the handshake; perhaps the store {hint}"
        raise ConnectionResetError(why) from error
    except BaseException:
        stream.close()
        raise
    return stream, local_host


async def _dial(places: Sequence[tuple[int, Any]]) -> socket.socket:
    """Connect to the first address that accepts the connection."""
    # All addresses of a store share ``CONNECT_S``, the limit for one store of several.
    # The last address gets all the remaining time.
    limit_s = CONNECT_S / (len(places) + 1)
    failure = OSError("the name has no address")
    for number, (family, where) in enumerate(places, 1):
        try:
            is_last = number == len(places)
            async with asyncio.timeout(None if is_last else limit_s):
                sock = await connected(family, where)
            keep_alive(sock)
            return sock
        except OSError as error:  # TimeoutError is one
            failure = error
    raise failure


async def _shake_hands(
    address: StoreAddress, stream: Stream, world: str, security: Security
) -> None:
    try:
        await shake_hands(stream, dialing(messages.StoreHello(world=world), security))
    except frames.FrameError as error:
        raise other_version(address, 0) from error
    except HandshakeError as error:
        raise refused_by(address, error) from error


def refused_by(address: StoreAddress, error: HandshakeError) -> Exception:
    if error.kind == "version":
        return other_version(address, error.theirs)
    if error.kind == "secret":
        return errors.WrongSecretError(
            f"the store at {address} and this process do not hold the same secret: "
            f"{error}; set the same MULTIWORLD_SECRET or MULTIWORLD_SECRET_FILE "
            "everywhere"
        )
    return error


def tls_failed(address: StoreAddress, error: ssl.SSLError) -> errors.WrongSecretError:
    return errors.WrongSecretError(
        f"the TLS handshake with the store at {address} failed: {error}; check that "
        "both sides have certificates of one authority, and that the store has TLS on"
    )


def _ignore() -> None:
    """Do nothing when the session is lost."""


def other_version(address: StoreAddress, theirs: int) -> errors.ProtocolVersionError:
    """Return the error for a store of another version; 0: not a store at all."""
    ours = frames.PROTOCOL_VERSION
    if theirs == 0:
        what = "and the process there is not a multiworld store; check the port"
    else:
        what = (
            f"the store speaks version {theirs}; use one release of multiworld "
            "everywhere"
        )
    return errors.ProtocolVersionError(
        f"cannot use the store at {address}: this process speaks version {ours}, "
        f"{what}",
        ours=ours,
        theirs=theirs,
    )
