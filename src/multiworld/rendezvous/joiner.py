"""A manager's sessions with stores, and the claims that lead to admission."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from dataclasses import asdict

import msgspec

from multiworld import errors
from multiworld.net import frames
from multiworld.net.security import Security
from multiworld.net.tcp import resolve_all
from multiworld.rendezvous.membership import Incarnation, Member
from multiworld.rendezvous.store_address import StoreAddress, StoreAddresses
from multiworld.rendezvous.store_messages import (
    Admitted,
    Claim,
    ClaimOutcome,
    Crowded,
    JoinTimedOut,
    Newcomer,
    RankTaken,
    SealedMember,
    Stale,
    StoreMessage,
    StoreRequest,
    Survivor,
    SurvivorClaim,
    TermsDiffer,
    VersionDiffers,
)
from multiworld.rendezvous.store_server import StoreServer
from multiworld.rendezvous.store_service import StoreService
from multiworld.rendezvous.store_session import (
    CONNECT_S,
    RETRY_S,
    SessionLostError,
    SessionOwner,
    StoreSession,
    check_store,
    connect,
)

logger = logging.getLogger("multiworld.store")

RETURN_S = 2.0  # maximum seconds for one attempt to reconnect to a lost store
# Maximum seconds between attempts to reconnect. It is below the 1 s for which a
# restarted store waits for the members of existing worlds.
MAX_RETRY_S = 0.5
# Stores inside this process by name; each is closed with its last session.
_local_services: dict[str, StoreService] = {}

PREFER_S = 5.0  # seconds between checks whether a preferred store is back

# Seconds to wait after the deadline, so that the store's list of missing ranks can
# arrive.
SLACK_S = 1.0


class Joiner:
    """Sessions and embedded stores of one manager; each closes with its last user."""

    def __init__(self, owner: SessionOwner, security: Security) -> None:
        self._owner, self.security = owner, security
        self._sessions: dict[StoreAddresses, StoreSession] = {}
        self._stores: dict[StoreAddresses, StoreServer] = {}
        self._opening: dict[StoreAddresses, asyncio.Lock] = {}
        self._users: dict[StoreAddresses, int] = {}
        self._returning: dict[StoreAddresses, asyncio.Task[None]] = {}
        # Tasks that check whether preferred stores are back.
        self._looking: dict[StoreAddresses, asyncio.Task[None]] = {}

    async def enter(
        self, address: StoreAddresses, *, may_host: bool, world: str, deadline: float
    ) -> StoreSession:
        """Return an open session with a store; every call needs one ``leave``."""
        self._users[address] = self._users.get(address, 0) + 1
        try:
            return await self.reopen(
                address, may_host=may_host, world=world, deadline=deadline
            )
        except BaseException:
            self.leave(address)
            raise

    async def reopen(
        self, address: StoreAddresses, *, may_host: bool, world: str, deadline: float
    ) -> StoreSession:
        """Return an open session with a store that this manager has entered."""
        if address not in self._users:
            raise errors.RendezvousError(
                f"this manager no longer uses the store at {address}"
            )
        opening = self._opening.setdefault(address, asyncio.Lock())
        try:
            async with asyncio.timeout_at(deadline):
                await opening.acquire()
        except TimeoutError as error:
            raise errors.StoreUnreachableError(
                f"no store answered at {address} for world {world!r} in time; another "
                "attempt of this process is still waiting",
                address=str(address),
            ) from error
        try:
            session = self._sessions.get(address)
            if session is None or not session.is_open:
                if may_host:
                    await self._host(address, deadline)
                session = await self._open(address, world, deadline)
                self._sessions[address] = session
                session.watch(lambda: self._lost(address))
                session.announce(address)
                self._prefer_earlier(address, session)
        finally:
            opening.release()
        return session

    def _prefer_earlier(self, addresses: StoreAddresses, session: StoreSession) -> None:
        """Return to a preferred store once it answers, because new processes use it."""
        if not session.address.place[0]:
            return

        async def look() -> None:
            while session.is_open:
                await asyncio.sleep(PREFER_S)
                for earlier in addresses.stores[: session.address.place[0]]:
                    if session.is_open and await self._is_served(earlier):
                        logger.info("the store at %s is back", earlier)
                        session.drop()
                        return

        _stop(self._looking, addresses)
        self._looking[addresses] = asyncio.get_running_loop().create_task(look())

    async def _is_served(self, address: StoreAddress) -> bool:
        try:
            async with asyncio.timeout(CONNECT_S):
                await check_store(address, self.security)
        except (OSError, errors.MultiWorldError):
            return False
        return True

    def _lost(self, address: StoreAddresses) -> None:
        """Reconnect: a store must know the held ranks before it admits members."""
        if address in self._users and address not in self._returning:
            loop = asyncio.get_running_loop()
            self._returning[address] = loop.create_task(
                self._come_back(address), name=f"multiworld back to {address}"
            )

    async def _come_back(self, address: StoreAddresses) -> None:
        loop = asyncio.get_running_loop()
        wait_s = RETRY_S
        try:
            while True:
                await asyncio.sleep(wait_s)
                try:
                    await self.reopen(
                        address,
                        may_host=False,
                        world="",
                        deadline=loop.time() + RETURN_S,
                    )
                # OSError: a certificate may be in the middle of a renewal.
                except (errors.MultiWorldError, OSError) as error:
                    logger.info("the store at %s is still down: %s", address, error)
                    wait_s = min(2 * wait_s, MAX_RETRY_S)
                else:
                    return
        finally:
            self._returning.pop(address, None)

    def leave(self, address: StoreAddresses) -> None:
        """Release a session; the last user's call closes it and its embedded store."""
        if address not in self._users:
            return  # the manager was closed, and all sessions with it
        self._users[address] -= 1
        if self._users[address] > 0:
            return
        del self._users[address]
        self._opening.pop(address, None)
        _stop(self._returning, address)
        _stop(self._looking, address)
        session = self._sessions.pop(address, None)
        if session is not None:
            session.close()
        self._close_store(address)

    def session(self, address: StoreAddresses) -> StoreSession | None:
        return self._sessions.get(address)

    def close_nowait(self) -> None:
        self._users.clear()
        for tasks in (self._returning, self._looking):
            for address in list(tasks):
                _stop(tasks, address)
        for session in self._sessions.values():
            session.close()
        for address in list(self._stores):
            self._close_store(address)
        self._sessions.clear()

    async def _host(self, addresses: StoreAddresses, deadline: float) -> None:
        # Embed no store if there are several addresses: different members could embed
        # different stores.
        if addresses.is_local or addresses in self._stores or len(addresses.stores) > 1:
            return
        (address,) = addresses.stores
        try:
            # If the name has several addresses, the first may be free although the
            # store listens on another one.
            several = await self._has_several(address, deadline)
            if several and await self._is_served(address):
                return
            store = await StoreServer.listen(
                address.host, address.port, security=self.security
            )
        except OSError as error:
            # EADDRINUSE: another process serves the address; ``connect`` checks whether
            # it is a store. EADDRNOTAVAIL: the address belongs to another host.
            if error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
                return
            raise errors.StoreUnreachableError(
                f"cannot listen at {address} ({error}); give an address of this host "
                "and a free port",
                address=str(address),
            ) from error
        self._stores[addresses] = store

    async def _has_several(self, address: StoreAddress, deadline: float) -> bool:
        """Return whether a name has several addresses; wait while it has none.

        Raises:
            OSError: The name still had no address at the deadline.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return len(await resolve_all(address.host, address.port)) > 1
            except socket.gaierror:  # retry, because the name may be published soon
                if loop.time() + RETRY_S > deadline:
                    raise
            await asyncio.sleep(RETRY_S)

    def _close_store(self, address: StoreAddresses) -> None:
        store = self._stores.pop(address, None)
        if store is not None:
            store.close_nowait()

    async def _open(
        self, addresses: StoreAddresses, world: str, deadline: float
    ) -> StoreSession:
        if not addresses.is_local:
            return await connect(
                addresses,
                self._owner,
                world=world,
                deadline=deadline,
                security=self.security,
            )
        (address,) = addresses.stores
        service = _local_services.get(address.host)
        if service is not None and service.is_elsewhere:
            raise errors.RendezvousError(
                f"memory://{address.host} is in use in another event loop of this "
                "process; use one loop (or one blocking manager), or a store at an "
                "address"
            )
        if service is None or not service.is_on_this_loop():
            service = _local_services[address.host] = StoreService()
        session = StoreSession(address, self._owner)
        session.attach(_LocalConnection(address.host, service, session))
        return session


def _stop(
    tasks: dict[StoreAddresses, asyncio.Task[None]], address: StoreAddresses
) -> None:
    task = tasks.pop(address, None)
    if task is not None:
        task.cancel()


class _LocalConnection:
    """Connection to a store in this process; the last connection closes the store."""

    def __init__(self, name: str, service: StoreService, session: StoreSession) -> None:
        self._loop = asyncio.get_running_loop()
        self._name, self._service, self._session = name, service, session
        self._key = service.open_session(self._deliver)

    def _deliver(self, message: StoreMessage) -> None:
        self._loop.call_soon(self._session.receive, message)

    def send(self, message: StoreRequest) -> None:
        self._loop.call_soon(self._service.receive, self._key, message)

    def close(self) -> None:
        self._service.close_session(self._key)
        if self._service.session_count == 0:
            self._service.close()
            if _local_services.get(self._name) is self._service:
                del _local_services[self._name]


async def meet(
    joiner: Joiner,
    addresses: StoreAddresses,
    session: StoreSession,
    wanted: Newcomer | Survivor,
    member: Member,
    deadline: float,
    *,
    may_host: bool,
) -> tuple[StoreSession, Incarnation]:
    """Claim a rank and wait for admission, even if the session is lost meanwhile."""
    loop = asyncio.get_running_loop()
    while True:
        sealed = _sealed(member, wanted.world, joiner.security)
        claim = _claim(wanted, sealed, max(0.0, deadline - loop.time()))
        try:
            async with asyncio.timeout_at(deadline + SLACK_S):
                outcome = await session.claim(claim)
        except TimeoutError as error:
            raise errors.StoreUnreachableError(
                f"the store at {session.address} accepted the claim on world "
                f"{wanted.world!r} but never answered; check that its process runs",
                address=str(session.address),
            ) from error
        except SessionLostError:
            await asyncio.sleep(RETRY_S)
            session = await joiner.reopen(
                addresses, may_host=may_host, world=wanted.world, deadline=deadline
            )
        else:
            return session, _admitted(wanted, outcome, joiner.security)


def _claim(
    wanted: Newcomer | Survivor, member: SealedMember, deadline_s: float
) -> Claim | SurvivorClaim:
    """Return a claim; the session sets its number and the store's place."""
    kind = Claim if isinstance(wanted, Newcomer) else SurvivorClaim
    return kind(
        **msgspec.structs.asdict(wanted),
        request=0,
        uid=member.member.uid,
        deadline_s=deadline_s,
        member=member,
        place=(0, 1),
    )


def _sealed(member: Member, world: str, security: Security) -> SealedMember:
    """Add a proof that a holder of the secret made this member for this world."""
    if not security.secret:
        return SealedMember(member)
    proof = security.proof("member", world, _lasting(member))
    return SealedMember(member, proof)


def _lasting(member: Member) -> dict[str, object]:
    """Return the fields that a proof covers: not the rank, which the store assigns."""
    address = asdict(member.address)
    return {"uid": member.uid, "pid": member.pid, "address": address}


def _unsealed(sealed: SealedMember, world: str, security: Security) -> Member:
    member = sealed.member
    if security.secret and not security.is_proof(
        sealed.proof, "member", world, _lasting(member)
    ):
        raise errors.WrongSecretError(
            f"world {world!r}: the record of rank {member.rank} was not made "
            "with our secret; give every member the same MULTIWORLD_SECRET"
        )
    return member


def _admitted(
    wanted: Newcomer | Survivor, outcome: ClaimOutcome, security: Security
) -> Incarnation:
    if not isinstance(outcome, Admitted):
        raise _refusal(wanted, outcome)
    members = tuple(
        _unsealed(sealed, wanted.world, security) for sealed in outcome.members
    )
    return Incarnation(
        world=wanted.world, epoch=outcome.epoch, nonce=outcome.nonce, members=members
    )


def _refusal(
    claim: Newcomer | Survivor,
    outcome: JoinTimedOut | Stale | RankTaken | TermsDiffer | VersionDiffers | Crowded,
) -> Exception:
    where = f"world {claim.world!r}"
    match outcome:
        case JoinTimedOut(present, missing):
            return errors.JoinTimeoutError(
                f"{where}: rank {', '.join(map(str, missing))} of {claim.size} did not "
                f"join in time (present: {', '.join(map(str, present))}); start the "
                "missing members, or raise join_s",
                world=claim.world,
                present=present,
                missing=missing,
            )
        case Stale(current):
            seen = claim.epoch if isinstance(claim, Survivor) else claim.seen
            return errors.StaleEpochError(
                claim.world,
                "the other members continued without this process; join again",
                seen=seen,
                expected=max(current, seen + 1),
                evidence=f"the store is at epoch {current}",
            )
        case RankTaken():
            return errors.RankTakenError(
                f"{where}: rank {claim.rank} is held by another live process; take a "
                "free rank, or stop the holder first",
                world=claim.world,
            )
        case TermsDiffer(detail):
            return errors.JoinMismatchError(
                f"{where}: the members disagree: {detail}; start all of them "
                "with the same size, backend and options",
                world=claim.world,
            )
        case Crowded(limit):
            return errors.RendezvousError(
                f"{where}: the store holds {limit} claims of this process that wait "
                "for members, and takes no more; start the missing members, or join "
                "fewer worlds at a time"
            )
        case VersionDiffers(theirs, detail):
            return errors.ProtocolVersionError(
                f"{where}: {detail}, but this process speaks version "
                f"{frames.PROTOCOL_VERSION}; use one release of multiworld everywhere",
                ours=frames.PROTOCOL_VERSION,
                theirs=theirs,
            )
