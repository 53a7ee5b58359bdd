"""The store behind its sessions: claims, questions, values, and garbage."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
import pytest

from multiworld.rendezvous.admission import key_prefix
from multiworld.rendezvous.store_messages import (
    AddAmount,
    Admitted,
    Announce,
    AskHolds,
    CheckKeys,
    ClaimReceived,
    CompareSet,
    Full,
    GetValues,
    HoldsAnswer,
    JoinTimedOut,
    Leave,
    MemberGaveUp,
    NewcomerWaits,
    NoValue,
    Outcome,
    RankTaken,
    Reply,
    Result,
    SetValue,
    StoreMessage,
    StoreRequest,
    TermsDiffer,
    ValueRequest,
    VersionDiffers,
    Withdraw,
)
from multiworld.rendezvous.store_service import StoreService
from multiworld.rendezvous.values import MAX_HELD
from tests.unit.inner_state import waiting_count
from tests.unit.rendezvous.sessions import claim_of, sealed_of, survivor_of
from tests.unit.waiting import turns, until

M = TypeVar("M", ClaimReceived, AskHolds, NewcomerWaits, MemberGaveUp)


class Client:
    def __init__(self, service: StoreService, uid: str = "m") -> None:
        self.service, self.uid = service, uid
        self.got: list[StoreMessage] = []
        self.key = service.open_session(self.got.append)
        self._requests = 0

    def say(self, message: StoreRequest) -> None:
        self.service.receive(self.key, message)

    def claim(self, rank: int, size: int, **fields: Any) -> int:
        self._requests += 1
        self.say(claim_of(self._requests, rank, size, self.uid, **fields))
        return self._requests

    def ask(self, message: ValueRequest) -> Outcome | None:
        """Ask for a value; return the outcome, or None if the store lets it wait."""
        self._requests += 1
        self.say(msgspec.structs.replace(message, request=self._requests))
        return self.outcome(self._requests)

    def value(self, message: ValueRequest) -> object:
        outcome = self.ask(message)
        assert isinstance(outcome, Result)
        return outcome.value

    def outcome(self, request: int) -> Outcome | None:
        """Return the outcome of a request, or None if there is none yet."""
        found = [
            message.outcome
            for message in self.got
            if isinstance(message, Reply) and message.request == request
        ]
        assert len(found) <= 1, "a request is answered once"
        return found[0] if found else None

    def admitted(self, request: int) -> Admitted:
        outcome = self.outcome(request)
        assert isinstance(outcome, Admitted)
        return outcome

    def last(self, kind: type[M]) -> M:
        return [message for message in self.got if isinstance(message, kind)][-1]


class Epochs:
    """A durable memory that can fail, as a full disk does."""

    def __init__(self, **known: int) -> None:
        self.known, self.is_full = known, False

    def epochs(self) -> dict[str, int]:
        return dict(self.known)

    def remember(self, world: str, epoch: int) -> None:
        if self.is_full:
            raise OSError("no space left on device")
        self.known[world] = epoch


async def test_members_are_admitted_together_with_one_epoch_and_nonce() -> None:
    service = StoreService()
    one, two = Client(service, "a"), Client(service, "b")
    first = one.claim(0, 2)
    assert one.got == [ClaimReceived(first)]
    assert waiting_count(service) == 1
    second = two.claim(1, 2)
    answer = one.admitted(first)
    assert two.admitted(second) == answer
    assert answer.epoch == 1
    assert answer.nonce > 0
    assert answer.members == (sealed_of(0, "a"), sealed_of(1, "b"))
    assert waiting_count(service) == 0
    service.close()


async def test_claim_that_waits_too_long_learns_who_is_missing() -> None:
    """The answer comes at the deadline, without another message."""
    service = StoreService()
    one = Client(service)
    request = one.claim(1, 3, deadline_s=0.01)
    await until(lambda: one.outcome(request))
    assert one.outcome(request) == JoinTimedOut(present=(1,), missing=(0, 2))
    assert waiting_count(service) == 0
    service.close()


async def test_session_that_dies_frees_its_claim() -> None:
    """A member that is started again can take the rank at once."""
    service = StoreService()
    one, two = Client(service, "a"), Client(service, "b")
    one.claim(0, 2)
    service.close_session(one.key)
    service.close_session(one.key)
    assert (service.session_count, waiting_count(service)) == (1, 0)
    again = Client(service, "c")
    again.claim(0, 2)
    request = two.claim(1, 2)
    members = two.admitted(request).members
    assert members == (sealed_of(0, "c"), sealed_of(1, "b"))
    service.close()


async def test_withdrawn_claim_is_forgotten() -> None:
    service = StoreService()
    one = Client(service)
    request = one.claim(0, 2)
    one.say(Withdraw(request))
    one.say(Withdraw(request))
    one.say(Withdraw(999))
    assert waiting_count(service) == 0
    assert one.outcome(request) is None
    service.close()


async def test_holder_is_asked_before_its_rank_is_given_away() -> None:
    service = StoreService()
    holder, other = Client(service, "a"), Client(service, "b")
    holder.claim(0, 1)
    request = other.claim(0, 1)
    question = holder.last(AskHolds)
    assert (question.world, question.epoch, question.rank) == ("w", 1, 0)
    holder.say(HoldsAnswer(question.ask, True))
    assert other.outcome(request) == RankTaken()
    request = other.claim(0, 1)
    holder.say(HoldsAnswer(holder.last(AskHolds).ask, False))
    assert other.admitted(request).epoch == 2
    service.close()


async def test_holder_that_does_not_answer_loses_its_rank() -> None:
    """A hung holder delays its successor only by the store's patience."""
    service = StoreService()
    holder, other = Client(service, "a"), Client(service, "b")
    holder.claim(0, 1)
    request = other.claim(0, 1)
    await until(lambda: other.outcome(request))
    assert other.admitted(request).epoch == 2
    service.close()


async def test_announced_rank_is_protected_after_a_restart() -> None:
    """A store that lost everything learns who holds what, and continues counting."""
    service = StoreService()
    holder, other = Client(service, "a"), Client(service, "b")
    holder.say(Announce("w", 7, 0, "a"))
    request = other.claim(0, 1)
    holder.say(HoldsAnswer(holder.last(AskHolds).ask, True))
    assert other.outcome(request) == RankTaken()
    holder.say(Leave("w", 7, 0))
    request = other.claim(0, 1)
    assert other.admitted(request).epoch == 8
    service.close()


async def test_claims_wait_until_a_restarted_store_has_settled() -> None:
    """Members of older worlds report first; withdrawn and dead claims never count."""
    service = StoreService(settle_s=0.05)
    one, gone, dead = (Client(service, uid) for uid in "abc")
    withdrawn = gone.claim(0, 1, world="x")
    gone.say(Withdraw(withdrawn))
    dead.claim(0, 1, world="y")
    service.close_session(dead.key)
    request = one.claim(0, 1)
    assert one.got == [ClaimReceived(request)]
    assert waiting_count(service) == 0
    await until(lambda: one.outcome(request))
    assert one.admitted(request).epoch == 1
    await asyncio.sleep(0.02)  # for what must not come
    assert gone.outcome(withdrawn) is None
    assert [type(message) for message in dead.got] == [ClaimReceived]
    service.close()


async def test_closed_store_answers_no_deferred_claim() -> None:
    """Its timers end with it."""
    service = StoreService(settle_s=0.01)
    one = Client(service)
    request = one.claim(0, 1)
    service.close()
    await asyncio.sleep(0.03)
    assert one.outcome(request) is None


async def test_epochs_continue_from_memory_and_are_stored_there() -> None:
    """A full disk is no reason to refuse members."""
    epochs = Epochs(w=41)
    service = StoreService(memory=epochs)
    one = Client(service)
    request = one.claim(0, 1)
    assert one.admitted(request).epoch == 42
    assert epochs.known["w"] == 42
    epochs.is_full = True
    request = one.claim(0, 1, world="other")
    assert one.admitted(request).epoch == 1
    service.close()


async def test_refused_version_is_reported_to_waiting_members() -> None:
    """They learn why the world cannot form."""
    service = StoreService()
    one, two = Client(service, "a"), Client(service, "b")
    request = one.claim(0, 2)
    other = two.claim(0, 2, world="x")
    service.refuse("w", VersionDiffers(9, "it is old"))
    assert one.outcome(request) == VersionDiffers(9, "it is old")
    assert two.outcome(other) is None
    service.close()


async def test_survivors_reform_and_are_renumbered() -> None:
    service = StoreService()
    members = [Client(service, uid) for uid in "abc"]
    for rank, member in enumerate(members):
        member.claim(rank, 3)
    for rank in (2, 1):
        uid = members[rank].uid
        members[rank].say(survivor_of(50 + rank, rank, 3, uid, lost=frozenset({0})))
    answer = members[1].admitted(51)
    assert members[2].admitted(52) == answer
    assert answer.epoch == 2
    assert answer.members == (sealed_of(0, "b"), sealed_of(1, "c"))
    service.close()


async def test_newcomer_is_announced_to_the_members_of_a_living_world() -> None:
    service = StoreService()
    member, newcomer = Client(service, "a"), Client(service, "b")
    member.claim(0, 1)
    request = newcomer.claim(1, 2)
    assert member.last(NewcomerWaits) == NewcomerWaits("w", 1, 1, 2, False)
    newcomer.say(Withdraw(request))
    assert member.last(NewcomerWaits) == NewcomerWaits("w", 1, 1, 2, True)
    service.close()


async def test_member_that_withdraws_as_it_is_admitted_is_reported_to_the_others() -> (
    None
):
    """Its withdrawal and the admission cross on the wire."""
    service = StoreService()
    one, two = Client(service, "a"), Client(service, "b")
    request = one.claim(0, 2)
    two.claim(1, 2)
    one.say(Withdraw(request))
    assert two.last(MemberGaveUp) == MemberGaveUp("w", 1, 0)
    service.close()


# Values.


async def test_values_are_set_counted_and_compared() -> None:
    """These are the operations that c10d needs of a store."""
    service = StoreService()
    one = Client(service)
    assert one.value(CheckKeys(0, ("k",))) is False
    assert one.value(SetValue(0, "k", "v")) is None
    assert one.value(CheckKeys(0, ("k",))) is True
    assert one.value(GetValues(0, ("k",), 1)) == ["v"]
    assert one.value(AddAmount(0, "n", 3)) == 3
    assert one.value(AddAmount(0, "n", -1)) == 2
    assert one.value(CompareSet(0, "k", "other", "w")) == "v"
    assert one.value(CompareSet(0, "k", "v", "w")) == "w"
    service.close()


async def test_store_that_is_full_says_so() -> None:
    service = StoreService()
    one = Client(service)
    for number in range(63):
        one.value(SetValue(0, f"k{number}", "v" * 2**20))
    assert one.ask(SetValue(0, "more", "v" * 2**20)) == Full(MAX_HELD)
    assert one.value(CheckKeys(0, ("k62",))) is True
    assert one.value(CheckKeys(0, ("more",))) is False
    service.close()


async def test_get_waits_for_its_keys_or_its_deadline() -> None:
    service = StoreService()
    one, two = Client(service), Client(service)
    assert one.ask(GetValues(0, ("a", "b"), 10)) is None
    assert one.ask(GetValues(0, ("never",), 0.01)) is None
    two.ask(SetValue(0, "b", "2"))
    assert one.outcome(1) is None
    two.ask(SetValue(0, "a", "1"))
    assert one.outcome(1) == Result(["1", "2"])
    await until(lambda: one.outcome(2))
    assert one.outcome(2) == NoValue()
    service.close()


async def test_values_of_an_ended_incarnation_are_deleted() -> None:
    """A store that runs for months does not fill up with old keys."""
    service = StoreService()
    one = Client(service)
    answer = one.admitted(one.claim(0, 1))
    prefix = key_prefix("w", 1, answer.nonce)
    one.ask(SetValue(0, f"{prefix}gloo", "x"))
    one.ask(SetValue(0, "other", "x"))
    assert one.value(CheckKeys(0, (f"{prefix}gloo", "other"))) is True
    one.say(Leave("w", 1, 0))
    assert one.value(CheckKeys(0, (f"{prefix}gloo",))) is False
    assert one.value(CheckKeys(0, ("other",))) is True
    service.close()


# Garbage.


@pytest.mark.parametrize(
    "claim",
    [
        claim_of(1, 2, 2),
        claim_of(1, 0, 2, place=(3, 2)),
        claim_of(1, 0, 2, place=(2, 2)),
        claim_of(1, 0, 2, place=(-1, 2)),
        claim_of(1, 0, 2, place=(0, 0)),
        survivor_of(1, 2, 2),
        survivor_of(1, 0, 2, lost=frozenset({5})),
        survivor_of(1, 0, 2, place=(3, 2)),
    ],
)
async def test_claim_whose_fields_contradict_each_other_is_refused_to_all_who_wait(
    claim: StoreRequest,
) -> None:
    """They would wait for a member that cannot come."""
    service = StoreService()
    bad, waits = Client(service), Client(service, "waits")
    number = waits.claim(0, 2)
    bad.say(claim)
    for client, request in ((bad, 1), (waits, number)):
        outcome = client.outcome(request)
        assert isinstance(outcome, TermsDiffer)
        assert "out of range" in outcome.detail
    assert waiting_count(service) == 0
    assert waits.admitted(waits.claim(0, 1)).epoch == 1
    service.close()


async def test_message_of_a_session_that_has_ended_is_dropped() -> None:
    """In a store inside the process, messages may be on their way when it ends."""
    service = StoreService()
    one = Client(service)
    service.close_session(one.key)
    one.claim(0, 2)
    one.say(survivor_of(9, 0, 2))
    await turns()
    service.close()
    assert waiting_count(service) == 0
    assert one.got == []


async def test_service_knows_its_loop() -> None:
    """A store inside a process may be left over from a loop that has ended."""
    service = StoreService()
    assert service.is_on_this_loop()

    async def elsewhere() -> bool:
        return service.is_on_this_loop()

    assert await asyncio.to_thread(asyncio.run, elsewhere()) is False
