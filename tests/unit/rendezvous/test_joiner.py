"""Sessions and embedded stores of one manager, and the way from claim to admission."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from multiworld import (
    JoinMismatchError,
    JoinTimeoutError,
    ProtocolVersionError,
    RankTakenError,
    Security,
    StaleEpochError,
    StoreUnreachableError,
    WrongSecretError,
)
from multiworld.errors import RendezvousError
from multiworld.net import forks, frames
from multiworld.rendezvous import joiner as joiner_module
from multiworld.rendezvous.joiner import Joiner, meet
from multiworld.rendezvous.membership import Incarnation
from multiworld.rendezvous.store_address import StoreAddresses, parse_store
from multiworld.rendezvous.store_messages import (
    Admitted,
    ClaimOutcome,
    ClaimReceived,
    JoinTimedOut,
    Newcomer,
    NoValue,
    RankTaken,
    Reply,
    Result,
    Stale,
    Survivor,
    TermsDiffer,
    VersionDiffers,
)
from multiworld.rendezvous.store_server import StoreServer
from multiworld.rendezvous.store_session import StoreSession
from multiworld.testing import no_leaks
from tests.ports import free_port
from tests.unit.inner_state import session_count, waiting_count
from tests.unit.rendezvous.sessions import (
    Impostor,
    Owner,
    answers,
    member_of,
    raw,
    sealed_of,
    values_of,
)
from tests.unit.waiting import turns, until

MEMORY = parse_store("memory://joiner")
SECRET = Security(secret=b"a secret long enough to be one")
OTHER = Security(secret=b"another that is long enough, too")


def later(seconds: float = 10.0) -> float:
    return asyncio.get_running_loop().time() + seconds


async def enter(
    joiner: Joiner, address: StoreAddresses = MEMORY, *, may_host: bool = False
) -> StoreSession:
    return await joiner.enter(address, may_host=may_host, world="w", deadline=later())


def claim(rank: int = 0, size: int = 1, terms: str = "", seen: int = 0) -> Newcomer:
    return Newcomer(world="w", rank=rank, size=size, terms=terms, seen=seen)


async def join(
    joiner: Joiner,
    wanted: Newcomer | Survivor,
    address: StoreAddresses = MEMORY,
    seconds: float = 10.0,
    uid: str = "",
) -> Incarnation:
    session = await enter(joiner, address)
    _, incarnation = await meet(
        joiner,
        address,
        session,
        wanted,
        member_of(wanted.rank, uid),
        later(seconds),
        may_host=False,
    )
    return incarnation


@pytest.fixture
async def joiners() -> AsyncIterator[list[Joiner]]:
    async with no_leaks(allow=("asyncio_",)):  # a look-up of a name
        found = [Joiner(Owner(), Security()) for _ in range(3)]
        yield found
        for joiner in found:
            joiner.close_nowait()


async def test_session_is_shared_and_closes_with_its_last_user(
    joiners: list[Joiner],
) -> None:
    """Each ``enter`` needs one ``leave``; more of them do no harm."""
    joiner = joiners[0]
    first = await enter(joiner)
    assert await enter(joiner) is first
    joiner.leave(MEMORY)
    assert first.is_open
    assert joiner.session(MEMORY) is first
    joiner.leave(MEMORY)
    assert not first.is_open
    assert joiner.session(MEMORY) is None
    joiner.leave(MEMORY)
    with pytest.raises(RendezvousError, match="no longer uses"):
        await joiner.reopen(MEMORY, may_host=False, world="w", deadline=later())


async def test_concurrent_entries_open_one_session(joiners: list[Joiner]) -> None:
    server = await StoreServer.listen("127.0.0.1", 0)
    where = parse_store(f"tcp://127.0.0.1:{server.port}")
    sessions = await asyncio.gather(*(enter(joiners[0], where) for _ in range(10)))
    assert len(set(map(id, sessions))) == 1
    await until(lambda: session_count(server) == 1)
    for _ in range(10):
        joiners[0].leave(where)
    await until(lambda: session_count(server) == 0)
    await server.close()


async def test_only_a_host_embeds_the_store(joiners: list[Joiner]) -> None:
    """Rank 0 serves the address; it is free again after the last user."""
    where = parse_store(f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(StoreUnreachableError):
        await joiners[1].enter(where, may_host=False, world="w", deadline=later(0.05))
    session = await enter(joiners[0], where, may_host=True)
    other = await enter(joiners[1], where)
    assert session.is_open
    assert other.is_open
    joiners[0].leave(where)
    await until(lambda: not other.is_open)
    again = await StoreServer.listen("127.0.0.1", where.stores[0].port)
    await again.close()
    joiners[1].leave(where)


async def test_address_in_use_by_a_store_is_used_not_hosted(
    joiners: list[Joiner],
) -> None:
    """A separate store is preferred to an embedded one."""
    server = await StoreServer.listen("127.0.0.1", 0)
    where = parse_store(f"tcp://127.0.0.1:{server.port}")
    await enter(joiners[0], where, may_host=True)
    await until(lambda: session_count(server) == 1)
    joiners[0].leave(where)
    await server.close()


async def test_address_that_cannot_be_served_is_named(joiners: list[Joiner]) -> None:
    """Nobody knows the name; the error comes once the time is over."""
    where = parse_store("tcp://no.such.host.invalid:29500")
    with pytest.raises(StoreUnreachableError, match="cannot listen at"):
        await joiners[0].enter(where, may_host=True, world="w", deadline=later(0.2))
    assert joiners[0].session(where) is None


async def test_one_of_several_stores_is_never_embedded(joiners: list[Joiner]) -> None:
    """Different members could embed different stores."""
    ports = free_port(), free_port()
    where = parse_store(",".join(f"tcp://127.0.0.1:{port}" for port in ports))
    with pytest.raises(StoreUnreachableError):
        await joiners[0].enter(where, may_host=True, world="w", deadline=later(0.1))
    assert forks.filenos() == []


async def test_session_returns_to_an_earlier_store(
    joiners: list[Joiner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New processes use the first store that answers, so others must be there, too."""
    monkeypatch.setattr(joiner_module, "PREFER_S", 0.01)
    first = await StoreServer.listen("127.0.0.1", 0)
    second = await StoreServer.listen("127.0.0.1", 0)
    ports = first.port, second.port
    where = parse_store(",".join(f"tcp://127.0.0.1:{port}" for port in ports))
    await enter(joiners[0], where)
    await first.close()
    await until(lambda: session_count(second) == 1)
    first = await StoreServer.listen("127.0.0.1", ports[0])
    await until(lambda: session_count(first) == 1 and session_count(second) == 0)
    joiners[0].leave(where)
    await first.close()
    await second.close()


async def test_short_wait_for_a_store_is_kept_beside_a_long_one(
    joiners: list[Joiner],
) -> None:
    """Both wait for one store that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = parse_store(f"tcp://127.0.0.1:{silent.getsockname()[1]}")
        long = asyncio.ensure_future(enter(joiners[0], where))
        await turns(3)
        with pytest.raises(StoreUnreachableError, match="another attempt"):
            await joiners[0].enter(
                where, may_host=False, world="w", deadline=later(0.1)
            )
        assert not long.done()
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


def names(monkeypatch: pytest.MonkeyPatch, *found: str | socket.gaierror) -> None:
    """Make names resolve to these addresses; an error comes first, once."""
    answers, loop = list(found), asyncio.get_running_loop()

    async def look_up(host: str, port: int, **_: object) -> list[object]:
        if answers and isinstance(answers[0], socket.gaierror):
            error = answers.pop(0)
            assert isinstance(error, socket.gaierror)
            raise error
        kind = socket.SOCK_STREAM
        return [(socket.AF_INET, kind, 6, "", (answer, port)) for answer in answers]

    monkeypatch.setattr(loop, "getaddrinfo", look_up)


@pytest.mark.parametrize("may_host", [False, True])
async def test_all_addresses_of_a_name_are_tried(
    joiners: list[Joiner], monkeypatch: pytest.MonkeyPatch, may_host: bool
) -> None:
    """No second store is embedded at the first address, where nobody listens."""
    server = await StoreServer.listen("127.0.0.1", 0)
    names(monkeypatch, "127.0.0.2", "127.0.0.1")
    where = parse_store(f"tcp://store.example:{server.port}")
    await enter(joiners[0], where, may_host=may_host)
    assert session_count(server) == 1
    joiners[0].leave(where)
    await server.close()


@pytest.mark.parametrize("number", [socket.EAI_AGAIN, socket.EAI_NONAME])
async def test_name_that_is_not_published_yet_is_looked_up_again(
    joiners: list[Joiner], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Rank 0 embeds the store once the name is published."""
    soon = socket.gaierror(number, "failure")
    names(monkeypatch, soon, soon, "127.0.0.1")
    where = parse_store(f"tcp://store.example:{free_port()}")
    assert (await enter(joiners[0], where, may_host=True)).is_open
    joiners[0].leave(where)


async def test_cancelled_entry_leaves_nothing(joiners: list[Joiner]) -> None:
    where = parse_store(f"tcp://127.0.0.1:{free_port()}")
    entering = asyncio.create_task(enter(joiners[0], where))
    await turns(3)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    with pytest.raises(RendezvousError, match="no longer uses"):
        await joiners[0].reopen(where, may_host=False, world="w", deadline=later())


async def test_lost_store_is_found_again_and_learns_what_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store asks the holder before it gives the rank away."""
    monkeypatch.setattr(joiner_module, "RETRY_S", 0.01)
    joiner = Joiner(Owner(("w", 4, 0)), Security())
    other = Joiner(Owner(), Security())
    first = await StoreServer.listen("127.0.0.1", 0)
    where = parse_store(f"tcp://127.0.0.1:{first.port}")
    session = await enter(joiner, where)
    await first.close()
    await until(lambda: not session.is_open)
    second = await StoreServer.listen("127.0.0.1", first.port)
    await until(lambda: session_count(second) == 1)
    with pytest.raises(RankTakenError):
        await join(other, claim(), where)
    for each in (joiner, other):
        each.close_nowait()
    await second.close()


async def test_store_that_stays_away_is_not_looked_for_after_leaving(
    joiners: list[Joiner],
) -> None:
    """The background task ends with the last user."""
    server = await StoreServer.listen("127.0.0.1", 0)
    where = parse_store(f"tcp://127.0.0.1:{server.port}")
    session = await enter(joiners[0], where)
    await server.close()
    await until(lambda: not session.is_open)
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert f"multiworld back to {where}" in names
    joiners[0].leave(where)
    await turns()
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert f"multiworld back to {where}" not in names


async def test_members_meet(joiners: list[Joiner]) -> None:
    found = await asyncio.gather(
        *(join(joiners[rank], claim(rank, 3)) for rank in range(3))
    )
    assert found[0] == found[1] == found[2]
    assert (found[0].epoch, found[0].size) == (1, 3)
    assert [member.uid for member in found[0].members] == ["m0", "m1", "m2"]


async def test_each_refusal_has_an_error_of_its_own(joiners: list[Joiner]) -> None:
    with pytest.raises(JoinTimeoutError, match="rank 1 of 2") as late:
        await join(joiners[0], claim(0, 2), seconds=0.02)
    assert (late.value.present, late.value.missing) == ((0,), (1,))
    found = await asyncio.gather(
        join(joiners[0], claim(0, 2, "backend direct")),
        join(joiners[1], claim(1, 2, "backend gloo")),
        return_exceptions=True,
    )
    assert [type(error) for error in found] == [JoinMismatchError] * 2
    assert "backend gloo" in str(found[0])


async def test_cancelled_claim_is_withdrawn(joiners: list[Joiner]) -> None:
    joining = asyncio.create_task(join(joiners[0], claim(0, 2)))
    await turns()
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    found = await asyncio.gather(
        *(join(joiners[rank + 1], claim(rank, 2), uid=f"u{rank}") for rank in (0, 1))
    )
    assert [member.uid for member in found[0].members] == ["u0", "u1"]


async def test_claim_outlives_a_lost_session(joiners: list[Joiner]) -> None:
    """A store that restarts while members wait gets their claims again."""
    first = await StoreServer.listen("127.0.0.1", 0)
    where = parse_store(f"tcp://127.0.0.1:{first.port}")
    joining = asyncio.create_task(join(joiners[0], claim(0, 2), where))
    await until(lambda: waiting_count(first) == 1)
    await first.close()
    second = await StoreServer.listen("127.0.0.1", first.port)
    await until(lambda: waiting_count(second) == 1)
    assert (await join(joiners[1], claim(1, 2), where)).epoch == 1
    assert (await joining).size == 2
    for joiner in joiners:
        joiner.close_nowait()
    await second.close()


async def test_survivor_that_the_others_left_behind_is_stale(
    joiners: list[Joiner],
) -> None:
    """It lives, but the world continued without it."""
    await asyncio.gather(*(join(joiners[rank], claim(rank, 2)) for rank in (0, 1)))

    def survivor(rank: int, lost: int) -> Survivor:
        return Survivor(
            world="w", epoch=1, rank=rank, size=2, terms="", lost=frozenset({lost})
        )

    assert (await join(joiners[0], survivor(0, 1))).epoch == 2
    with pytest.raises(StaleEpochError) as stale:
        await join(joiners[1], survivor(1, 0))
    assert stale.value.world == "w"


async def test_forged_member_record_is_refused() -> None:
    """A store may be open to others, so records carry a proof of the secret."""
    server = await StoreServer.listen("127.0.0.1", 0, security=SECRET)
    where = parse_store(f"tcp://127.0.0.1:{server.port}")
    joiners = [Joiner(Owner(), SECRET) for _ in range(2)]
    sessions = [await enter(joiner, where) for joiner in joiners]
    joiners[1].security = OTHER  # it knows the store's secret, but seals with its own
    found = await asyncio.gather(
        *(
            meet(
                joiners[rank],
                where,
                sessions[rank],
                claim(rank, 2),
                member_of(rank),
                later(),
                may_host=False,
            )
            for rank in (0, 1)
        ),
        return_exceptions=True,
    )
    assert [type(error) for error in found] == [WrongSecretError] * 2
    assert "rank 1" in str(found[0])
    for joiner in joiners:
        joiner.close_nowait()
    await server.close()


async def answered(joiner: Joiner, reply: bytes, seconds: float = 10.0) -> Incarnation:
    """Claim rank 0 of 1 at a store that answers every claim with ``reply``."""
    async with Impostor(answers(reply)) as store:
        try:
            return await join(joiner, claim(seen=3), store.address, seconds)
        finally:
            joiner.close_nowait()


async def test_admission_is_taken_as_the_store_says(joiners: list[Joiner]) -> None:
    members = (sealed_of(0, "a"), sealed_of(1, "b"))
    found = await answered(joiners[0], frames.encode(Reply(1, Admitted(8, 5, members))))
    assert found == Incarnation(
        world="w", epoch=8, nonce=5, members=(member_of(0, "a"), member_of(1, "b"))
    )


@pytest.mark.parametrize(
    ("outcome", "kind", "words"),
    [
        (VersionDiffers(9, "x"), ProtocolVersionError, "x"),
        (JoinTimedOut((1,), (0, 2)), JoinTimeoutError, "rank 0, 2"),
        (Stale(7), StaleEpochError, "at epoch 7"),
        (RankTaken(), RankTakenError, "rank 0"),
        (TermsDiffer("rank 1 asked"), JoinMismatchError, "rank 1 asked"),
        (Result(1), RendezvousError, "answered a claim"),
        (NoValue(), RendezvousError, "answered a claim"),
    ],
)
async def test_each_outcome_but_admission_is_an_error(
    joiners: list[Joiner],
    outcome: ClaimOutcome | Result | NoValue,
    kind: type[Exception],
    words: str,
) -> None:
    """The first reply decides; nobody tries again."""
    with pytest.raises(kind, match=words) as error:
        await answered(joiners[0], frames.encode(Reply(1, outcome)))
    assert not isinstance(error.value, StoreUnreachableError)


ADMITTED = values_of(Admitted(1, 5, (sealed_of(0),)))
RECORD = values_of(sealed_of(0))
MEMBER = RECORD["member"]


@pytest.mark.parametrize(
    "outcome",
    [
        {},
        {"op": "something new"},
        {"op": "Admitted"},
        {**ADMITTED, "members": 3},
        {**ADMITTED, "members": ["text"]},
        {**ADMITTED, "members": [{}]},
        {**ADMITTED, "members": [{**RECORD, "member": {**MEMBER, "rank": "x"}}]},
        {**ADMITTED, "members": [{**RECORD, "member": {**MEMBER, "address": 7}}]},
        {**ADMITTED, "epoch": "x"},
        {**ADMITTED, "nonce": None},
        {"op": "JoinTimedOut"},
        {"op": "TermsDiffer"},
        {"op": "VersionDiffers", "theirs": "new", "detail": "x"},
        {"op": "Stale", "current": None},
    ],
    ids=lambda outcome: repr(outcome)[:50],
)
async def test_reply_that_lacks_a_field_is_an_error_of_ours(
    joiners: list[Joiner],
    outcome: object,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``join`` promises MultiWorldErrors, whatever the store says."""
    monkeypatch.setattr(joiner_module, "SLACK_S", 0.02)
    reply = raw({"op": "Reply", "request": 1, "outcome": outcome})
    with pytest.raises(RendezvousError):
        await answered(joiners[0], reply, seconds=0.1)
    assert "violated the protocol" in caplog.text


async def test_store_that_never_answers_is_unreachable(
    joiners: list[Joiner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It acknowledged the claim, and then its process was stopped."""
    monkeypatch.setattr(joiner_module, "SLACK_S", 0.02)
    async with Impostor(answers(frames.encode(ClaimReceived(1)))) as store:
        with pytest.raises(StoreUnreachableError, match="never answered"):
            await join(joiners[0], claim(), store.address, seconds=0.05)
        joiners[0].close_nowait()
