"""A session with a store: replies, silence, garbage, and the way to open one."""

from __future__ import annotations

import asyncio

import pytest

from multiworld import (
    ProtocolVersionError,
    Security,
    StoreUnreachableError,
    Tls,
    WrongSecretError,
)
from multiworld.errors import RendezvousError
from multiworld.net import forks, frames
from multiworld.net.handshake_messages import Answer
from multiworld.rendezvous import store_session
from multiworld.rendezvous.store_address import StoreAddresses, parse_store
from multiworld.rendezvous.store_messages import (
    Admitted,
    Announce,
    AskHolds,
    CheckKeys,
    Claim,
    ClaimOutcome,
    ClaimReceived,
    HoldsAnswer,
    Leave,
    MemberGaveUp,
    NewcomerWaits,
    NoValue,
    RankTaken,
    Reply,
    Result,
    StoreRequest,
    SurvivorClaim,
    Withdraw,
)
from multiworld.rendezvous.store_server import StoreServer
from multiworld.rendezvous.store_session import (
    SessionLostError,
    StoreSession,
    connect,
)
from multiworld.testing import no_leaks
from tests.ports import free_port
from tests.unit.inner_state import session_count
from tests.unit.rendezvous.sessions import (
    WELCOME,
    Impostor,
    Owner,
    claim_of,
    hangs_up,
    is_silent,
    raw,
    says,
    survivor_of,
)
from tests.unit.waiting import turns, until

SECRET = Security(secret=b"a secret long enough to be one")
OTHER = Security(secret=b"another that is long enough, too")
ADDRESS = parse_store("memory://unit").stores[0]
CLAIM = claim_of(0, 0, 1, place=(8, 9))


class Wire:
    def __init__(self) -> None:
        self.sent: list[StoreRequest] = []
        self.is_closed = False

    def send(self, message: StoreRequest) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


class Bench:
    def __init__(self, *held: tuple[str, int, int]) -> None:
        self.owner, self.wire = Owner(*held), Wire()
        self.session = StoreSession(ADDRESS, self.owner)
        self.session.attach(self.wire)
        self.lost = 0
        self.session.watch(self._on_lost)

    def _on_lost(self) -> None:
        self.lost += 1

    async def claim(
        self, claim: Claim | SurvivorClaim = CLAIM
    ) -> asyncio.Task[ClaimOutcome]:
        task = asyncio.create_task(self.session.claim(claim))
        await turns(3)
        return task

    def claims(self) -> list[Claim | SurvivorClaim]:
        return [m for m in self.wire.sent if isinstance(m, Claim | SurvivorClaim)]

    def request(self) -> int:
        return self.claims()[-1].request


async def test_claim_is_acknowledged_and_answered() -> None:
    bench = Bench()
    first, second = await bench.claim(), await bench.claim()
    assert bench.wire.sent == [
        claim_of(1, 0, 1, place=(0, 1)),
        claim_of(2, 0, 1, place=(0, 1)),
    ]
    for request in (1, 2):
        bench.session.receive(ClaimReceived(request))
    outcomes = [Admitted(epoch, 5, ()) for epoch in (1, 2)]
    bench.session.receive(Reply(2, outcomes[1]))
    bench.session.receive(Reply(1, outcomes[0]))
    assert await first == outcomes[0]
    assert await second == outcomes[1]


async def test_survivor_claims_in_the_same_way() -> None:
    """The session sets the request number and the store's place here as well."""
    bench = Bench()
    claim = await bench.claim(survivor_of(0, 1, 2, lost=frozenset({0}), place=(8, 9)))
    assert bench.wire.sent == [survivor_of(1, 1, 2, lost=frozenset({0}), place=(0, 1))]
    bench.session.receive(Reply(1, RankTaken()))
    assert await claim == RankTaken()


@pytest.mark.parametrize("outcome", [Result(1), Result(None), NoValue()])
async def test_value_is_no_outcome_of_a_claim(outcome: Result | NoValue) -> None:
    """A store that confuses its requests raises an error of the library, at once."""
    bench = Bench()
    claim = await bench.claim()
    bench.session.receive(Reply(bench.request(), outcome))
    with pytest.raises(RendezvousError, match="answered a claim"):
        await claim


async def test_store_that_does_not_acknowledge_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stopped store must not hold up a member for the whole of ``join_s``."""
    monkeypatch.setattr(store_session, "TAKEN_S", 0.01)
    bench = Bench()
    with pytest.raises(SessionLostError):
        await bench.session.claim(CLAIM)
    assert bench.wire.is_closed
    assert not bench.session.is_open
    assert bench.lost == 1


async def test_acknowledged_claim_waits_without_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit is for the acknowledgement alone."""
    monkeypatch.setattr(store_session, "TAKEN_S", 0.01)
    bench = Bench()
    claim = await bench.claim()
    bench.session.receive(ClaimReceived(bench.request()))
    await asyncio.sleep(0.03)
    assert not claim.done()
    bench.session.receive(Reply(bench.request(), RankTaken()))
    assert await claim == RankTaken()


async def test_lost_connection_fails_every_claim_and_is_reported_once() -> None:
    """Nobody waits for a store that is gone."""
    bench = Bench()
    claims = [await bench.claim() for _ in range(2)]
    bench.session.ended()
    bench.session.ended()
    found = await asyncio.gather(*claims, return_exceptions=True)
    assert [type(error) for error in found] == [SessionLostError] * 2
    assert bench.lost == 1
    with pytest.raises(SessionLostError):
        await bench.session.claim(CLAIM)


async def test_close_is_not_a_loss() -> None:
    """A closed session is not opened again; its claims fail all the same."""
    bench = Bench()
    claim = await bench.claim()
    bench.session.close()
    bench.session.close()
    with pytest.raises(SessionLostError):
        await claim
    assert bench.wire.is_closed
    assert bench.lost == 0


async def test_cancelled_claim_is_withdrawn() -> None:
    """The store must not admit a member that has given up."""
    bench = Bench()
    claim = await bench.claim()
    request = bench.request()
    claim.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claim
    assert bench.wire.sent[-1] == Withdraw(request)
    bench.session.receive(Reply(request, RankTaken()))
    bench.session.receive(ClaimReceived(request))
    assert bench.session.is_open


async def test_question_is_answered_by_the_owner() -> None:
    """The store asks whether a rank is still held."""
    bench = Bench(("w", 3, 1))
    for ask, epoch in ((7, 3), (8, 2)):
        bench.session.receive(AskHolds(ask, "w", epoch, 1))
    assert bench.wire.sent == [HoldsAnswer(7, True), HoldsAnswer(8, False)]


async def test_notices_reach_the_owner_and_holdings_the_store() -> None:
    """A session announces every rank after a reconnection."""
    bench = Bench(("w", 3, 1), ("x", 1, 0))
    notes = NewcomerWaits("w", 3, 2, 3, False), MemberGaveUp("w", 3, 3)
    for note in notes:
        bench.session.receive(note)
    assert bench.owner.notes == list(notes)
    bench.session.announce(StoreAddresses((ADDRESS,)))
    assert bench.wire.sent == [Announce("w", 3, 1, "me"), Announce("x", 1, 0, "me")]
    bench.session.left("w", 3, 1, frozenset({2, 0}))
    assert bench.wire.sent[-1] == Leave("w", 3, 1, (0, 2))
    bench.session.close()
    bench.session.left("x", 1, 0)
    assert bench.wire.sent[-1] == Leave("w", 3, 1, (0, 2))


async def test_reply_to_nothing_is_ignored() -> None:
    """It may answer a request that was withdrawn meanwhile."""
    bench = Bench()
    claim = await bench.claim()
    for message in (ClaimReceived(9), Reply(9, RankTaken()), Reply(0, Result(1))):
        bench.session.receive(message)
    assert bench.session.is_open
    assert not claim.done()
    bench.session.close()
    with pytest.raises(SessionLostError):
        await claim


# Opening.


async def opened(
    address: str | StoreAddresses,
    seconds: float = 10.0,
    security: Security = Security(),  # noqa: B008 - frozen
) -> StoreSession:
    where = parse_store(address) if isinstance(address, str) else address
    deadline = asyncio.get_running_loop().time() + seconds
    return await connect(
        where, Owner(), world="w", deadline=deadline, security=security
    )


@pytest.mark.parametrize("security", [Security(), SECRET])
async def test_session_opens_with_a_store(security: Security) -> None:
    """The session knows the address by which this host reaches the store."""
    async with no_leaks():
        server = await StoreServer.listen("127.0.0.1", 0, security=security)
        session = await opened(f"tcp://127.0.0.1:{server.port}", security=security)
        assert session.is_open
        assert session.local_host == "127.0.0.1"
        await until(lambda: session_count(server) == 1)
        session.close()
        await until(lambda: session_count(server) == 0)
        await server.close()


async def test_nobody_there_is_an_error_that_says_what_to_do() -> None:
    """The attempts continue until the deadline."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnreachableError, match="multiworld store") as missed:
        await opened(address, 0.1)
    assert missed.value.address == address
    with pytest.raises(StoreUnreachableError, match="no attempt"):
        await opened(address, -1.0)


async def test_store_that_starts_late_is_found() -> None:
    """Members may start before the store does."""
    port = free_port()
    opening = asyncio.create_task(opened(f"tcp://127.0.0.1:{port}"))
    await turns()
    server = await StoreServer.listen("127.0.0.1", port)
    session = await opening
    session.close()
    await server.close()


async def test_next_store_is_used_if_the_first_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stopped first store costs a moment, not the join."""
    monkeypatch.setattr(store_session, "CONNECT_S", 0.05)
    server = await StoreServer.listen("127.0.0.1", 0)
    async with Impostor(is_silent) as stopped:
        both = f"tcp://127.0.0.1:{stopped.port},tcp://127.0.0.1:{server.port}"
        session = await opened(both)
        assert session.address.port == server.port
        assert session.address.place == (1, 2)
        session.close()
    await server.close()


async def test_single_silent_store_is_waited_for_until_the_deadline() -> None:
    async with Impostor(is_silent) as stopped, no_leaks():
        with pytest.raises(StoreUnreachableError, match="TimeoutError"):
            await opened(stopped.address, 0.1)
        for sock in stopped.accepted:
            sock.close()
        stopped.accepted.clear()


async def test_store_that_hangs_up_is_tried_again() -> None:
    """A store that restarts may drop a connection or two."""
    async with Impostor(hangs_up) as flaky:
        with pytest.raises(StoreUnreachableError):
            await opened(flaky.address, 0.3)
        assert len(flaky.accepted) > 1


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x03{]}",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ],
)
async def test_process_that_is_no_store_is_named_at_once(data: bytes) -> None:
    """A wrong port must be found in an instant, not after ``join_s``."""
    async with Impostor(says(data)) as web:
        with pytest.raises(ProtocolVersionError, match="not a multiworld store"):
            await opened(web.address)


async def test_other_release_is_named_with_both_versions() -> None:
    """The error tells which of the two to replace."""
    answer = frames.encode(Answer(multiworld=999, ok=True))
    async with Impostor(says(answer)) as newer:
        with pytest.raises(ProtocolVersionError, match="999") as refused:
            await opened(newer.address)
    assert (refused.value.ours, refused.value.theirs) == (frames.PROTOCOL_VERSION, 999)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(SECRET, OTHER), (SECRET, Security()), (Security(), SECRET)],
)
async def test_other_secret_ends_the_attempts(ours: Security, theirs: Security) -> None:
    """Trying again cannot help."""
    server = await StoreServer.listen("127.0.0.1", 0, security=theirs)
    with pytest.raises(WrongSecretError, match="MULTIWORLD_SECRET"):
        await opened(f"tcp://127.0.0.1:{server.port}", security=ours)
    assert session_count(server) == 0
    await server.close()


async def test_store_without_tls_is_named_where_tls_is_on(tls: Tls) -> None:
    async with Impostor(says(b"no TLS here, sorry")) as plain:
        with pytest.raises(WrongSecretError, match="TLS"):
            await opened(plain.address, security=Security(tls=tls))


@pytest.mark.parametrize("has_tls", [False, True])
async def test_connection_is_closed_in_forks_from_its_handshake_on(
    tls: Tls, has_tls: bool
) -> None:
    """A child that is forked meanwhile must not hide its parent's death."""
    security = Security(tls=tls) if has_tls else Security()
    async with Impostor(is_silent) as stopped, no_leaks():
        opening = asyncio.create_task(opened(stopped.address, security=security))
        await until(lambda: stopped.accepted)
        await turns(20)
        assert len(forks.filenos()) == 1
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert forks.filenos() == []
        stopped.accepted.pop().close()


async def test_cancelled_attempt_leaves_nothing_open() -> None:
    async with Impostor(is_silent) as stopped, no_leaks():
        opening = asyncio.create_task(opened(stopped.address))
        await until(lambda: stopped.accepted)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        stopped.accepted.pop().close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        raw({}),
        raw(b"\xff"),
        raw({"op": "x", "request": 9}),
        raw({"op": "AskHolds"}),
        raw({"op": "AskHolds", "world": "w", "epoch": 1, "rank": 0}),
        raw({"op": "AskHolds", "world": "w", "rank": 0, "ask": 1}),
        raw({"op": "Reply"}),
        raw({"op": "Reply", "request": 1, "outcome": {}}),
        frames.encode(CheckKeys(1, ())),
    ],
    ids=lambda garbage: repr(garbage[4:44]),
)
async def test_store_that_turns_to_garbage_ends_the_session(garbage: bytes) -> None:
    """The owner is notified, as it is when the connection breaks."""
    async with Impostor(says(WELCOME)) as odd:
        session = await opened(odd.address)
        lost: list[bool] = []
        session.watch(lambda: lost.append(True))
        claim = asyncio.create_task(session.claim(CLAIM))
        await turns(3)
        odd.accepted[0].sendall(garbage)
        await until(lambda: lost)
        with pytest.raises(SessionLostError):
            await claim
    assert not session.is_open
