"""The store behind its sessions: claims, questions, values, and garbage."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from multiworld.rendezvous.registry import key_prefix
from multiworld.rendezvous.store_service import StoreService
from tests.unit.waiting import turns, until

Message = dict[str, Any]


class Client:
    """A session that keeps what the store tells it."""

    def __init__(self, service: StoreService, uid: str = "m") -> None:
        self.service, self.uid = service, uid
        self.got: list[Message] = []
        self.key = service.open_session(self.got.append)
        self._requests = 0

    def say(self, op: str, **fields: Any) -> None:
        self.service.receive(self.key, {"op": op, **fields})

    def claim(self, rank: int, size: int, **fields: Any) -> int:
        self._requests += 1
        self.say("claim", **claim_of(self._requests, rank, size, self.uid, **fields))
        return self._requests

    def ask(self, op: str, **fields: Any) -> Any:
        """Ask for a value; return the reply, or None if the store lets it wait."""
        self._requests += 1
        self.say(op, request=self._requests, **fields)
        return self.reply(self._requests)

    def reply(self, request: int) -> Any:
        found = [
            message
            for message in self.got
            if message["op"] == "reply" and message["request"] == request
        ]
        return found[0] if found else None

    def last(self, op: str) -> Message:
        return [message for message in self.got if message["op"] == op][-1]


def claim_of(
    request: int, rank: int, size: int, uid: str = "m", **fields: Any
) -> Message:
    """Return the fields of an ordinary claim, with some changed."""
    ordinary = {
        "request": request,
        "world": "w",
        "rank": rank,
        "size": size,
        "terms": "backend memory",
        "uid": uid,
        "seen": 0,
        "deadline_s": 10.0,
        "member": {"uid": uid},
    }
    return {**ordinary, **fields}


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
    """Each claim is acknowledged at once, and answered when the last has come."""
    service = StoreService()
    one, two = Client(service, "a"), Client(service, "b")
    first = one.claim(0, 2)
    assert one.got == [{"op": "taken", "request": first}]
    assert service.waiting_count == 1
    second = two.claim(1, 2)
    answers = one.reply(first), two.reply(second)
    assert all(answer["ok"] for answer in answers)
    assert answers[0]["epoch"] == answers[1]["epoch"] == 1
    assert answers[0]["nonce"] == answers[1]["nonce"] > 0
    assert [member["rank"] for member in answers[0]["members"]] == [0, 1]
    assert service.waiting_count == 0
    service.close()


async def test_claim_that_waits_too_long_is_told_who_is_missing() -> None:
    """The answer comes at its deadline, though nobody else says anything."""
    service = StoreService()
    one = Client(service)
    request = one.claim(1, 3, deadline_s=0.01)
    await until(lambda: one.reply(request))
    answer = one.reply(request)
    assert (answer["error"], answer["present"], answer["missing"]) == (
        "timeout",
        [1],
        [0, 2],
    )
    assert service.waiting_count == 0
    service.close()


async def test_session_that_dies_frees_its_claim() -> None:
    """A member that is started again can take the rank at once."""
    service = StoreService()
    one, two = Client(service, "a"), Client(service, "b")
    one.claim(0, 2)
    service.close_session(one.key)
    service.close_session(one.key)
    assert (service.session_count, service.waiting_count) == (1, 0)
    again = Client(service, "c")
    again.claim(0, 2)
    request = two.claim(1, 2)
    assert [m["uid"] for m in two.reply(request)["members"]] == ["c", "b"]
    service.close()


async def test_withdrawn_claim_is_forgotten() -> None:
    """The answer to it never comes, and the rank is free."""
    service = StoreService()
    one = Client(service)
    request = one.claim(0, 2)
    one.say("withdraw", request=request)
    one.say("withdraw", request=request)
    one.say("withdraw", request=999)
    assert service.waiting_count == 0
    assert one.reply(request) is None
    service.close()


async def test_holder_is_asked_before_its_rank_is_given_away() -> None:
    """A live holder keeps its rank; one that gives it up is replaced."""
    service = StoreService()
    holder, other = Client(service, "a"), Client(service, "b")
    holder.claim(0, 1)
    request = other.claim(0, 1)
    question = holder.last("ask")
    assert (question["world"], question["epoch"], question["rank"]) == ("w", 1, 0)
    holder.say("answer", ask=question["ask"], holds=True)
    assert other.reply(request)["error"] == "taken"
    request = other.claim(0, 1)
    holder.say("answer", ask=holder.last("ask")["ask"], holds=False)
    assert other.reply(request)["epoch"] == 2
    service.close()


async def test_holder_that_does_not_answer_loses_its_rank() -> None:
    """A hung holder delays its successor by the store's patience and no longer."""
    service = StoreService()
    holder, other = Client(service, "a"), Client(service, "b")
    holder.claim(0, 1)
    request = other.claim(0, 1)
    await until(lambda: other.reply(request))
    assert other.reply(request)["epoch"] == 2
    service.close()


async def test_announced_rank_is_protected_after_a_restart() -> None:
    """A store that lost everything learns who holds what, and goes on counting."""
    service = StoreService()
    holder, other = Client(service, "a"), Client(service, "b")
    holder.say("announce", world="w", epoch=7, rank=0, uid="a")
    request = other.claim(0, 1)
    holder.say("answer", ask=holder.last("ask")["ask"], holds=True)
    assert other.reply(request)["error"] == "taken"
    holder.say("left", world="w", epoch=7, rank=0)
    request = other.claim(0, 1)
    assert other.reply(request)["epoch"] == 8
    service.close()


async def test_claims_wait_until_a_restarted_store_has_settled() -> None:
    """Members of older worlds report first; withdrawn and dead claims never count."""
    service = StoreService(settle_s=0.05)
    one, gone, dead = (Client(service, uid) for uid in "abc")
    withdrawn = gone.claim(0, 1, world="x")
    gone.say("withdraw", request=withdrawn)
    dead.claim(0, 1, world="y")
    service.close_session(dead.key)
    request = one.claim(0, 1)
    assert one.got == [{"op": "taken", "request": request}]
    assert service.waiting_count == 0
    await until(lambda: one.reply(request))
    assert one.reply(request)["epoch"] == 1
    await asyncio.sleep(0.02)  # for what must not come
    assert gone.reply(withdrawn) is None
    assert [message["op"] for message in dead.got] == ["taken"]
    service.close()


async def test_closed_store_answers_no_deferred_claim() -> None:
    """Its timers end with it."""
    service = StoreService(settle_s=0.01)
    one = Client(service)
    request = one.claim(0, 1)
    service.close()
    await asyncio.sleep(0.03)
    assert one.reply(request) is None


async def test_epochs_continue_from_memory_and_are_stored_there() -> None:
    """A full disk is no reason to refuse members."""
    epochs = Epochs(w=41)
    service = StoreService(memory=epochs)
    one = Client(service)
    request = one.claim(0, 1)
    assert one.reply(request)["epoch"] == 42
    assert epochs.known["w"] == 42
    epochs.is_full = True
    request = one.claim(0, 1, world="other")
    assert one.reply(request)["ok"]
    service.close()


async def test_refused_version_is_told_to_those_who_wait() -> None:
    """They learn why the world does not come together."""
    service = StoreService()
    one, two = Client(service, "a"), Client(service, "b")
    request = one.claim(0, 2)
    other = two.claim(0, 2, world="x")
    service.refuse("w", {"error": "version", "theirs": 9, "detail": "it is old"})
    assert one.reply(request)["error"] == "version"
    assert two.reply(other) is None
    service.close()


async def test_survivors_reform_and_are_renumbered() -> None:
    """Two of three members go on, in their old order."""
    service = StoreService()
    members = [Client(service, uid) for uid in "abc"]
    for rank, member in enumerate(members):
        member.claim(rank, 3)
    for rank in (2, 1):
        fields = claim_of(50 + rank, rank, 3, members[rank].uid, epoch=1, lost=[0])
        del fields["seen"]
        members[rank].say("reform", **fields)
    answer = members[1].reply(51)
    assert answer["epoch"] == 2
    assert [member["uid"] for member in answer["members"]] == ["b", "c"]
    service.close()


async def test_newcomer_is_announced_to_the_members_of_a_living_world() -> None:
    """They also hear that it has stopped waiting."""
    service = StoreService()
    member, newcomer = Client(service, "a"), Client(service, "b")
    member.claim(0, 1)
    request = newcomer.claim(1, 2)
    note = member.last("waiting")
    assert (note["rank"], note["size"], note["is_gone"]) == (1, 2, False)
    newcomer.say("withdraw", request=request)
    assert member.last("waiting")["is_gone"]
    service.close()


# Values.


async def test_values_are_set_counted_compared_and_deleted() -> None:
    """These are the operations that c10d needs of a store."""
    service = StoreService()
    one = Client(service)
    assert one.ask("check", keys=["k"])["result"] is False
    one.ask("set", key="k", value="v")
    assert one.ask("check", keys=["k"])["result"] is True
    assert one.ask("get", keys=["k"], deadline_s=1)["result"] == ["v"]
    assert one.ask("add", key="n", amount=3)["result"] == 3
    assert one.ask("add", key="n", amount=-1)["result"] == 2
    swap = {"key": "k", "expected": "other", "desired": "w"}
    assert one.ask("compare_set", **swap)["result"] == "v"
    assert one.ask("count")["result"] == 2
    assert one.ask("delete", key="k")["result"] is True
    assert one.ask("delete", key="k")["result"] is False
    service.close()


async def test_get_waits_for_its_keys_or_its_deadline() -> None:
    """Another session's set completes it; without one it times out."""
    service = StoreService()
    one, two = Client(service), Client(service)
    assert one.ask("get", keys=["a", "b"], deadline_s=10) is None
    assert one.ask("get", keys=["never"], deadline_s=0.01) is None
    two.ask("set", key="b", value="2")
    assert one.reply(1) is None
    two.ask("set", key="a", value="1")
    assert one.reply(1)["result"] == ["1", "2"]
    await until(lambda: one.reply(2))
    assert (one.reply(2)["ok"], one.reply(2)["error"]) == (False, "timeout")
    service.close()


async def test_values_of_an_ended_incarnation_are_deleted() -> None:
    """A store that runs for months does not fill up with old keys."""
    service = StoreService()
    one = Client(service)
    answer = one.reply(one.claim(0, 1))
    prefix = key_prefix("w", 1, answer["nonce"])
    one.ask("set", key=f"{prefix}gloo", value="x")
    one.ask("set", key="other", value="x")
    assert one.ask("count")["result"] == 2
    one.say("left", world="w", epoch=1, rank=0)
    assert one.ask("check", keys=[f"{prefix}gloo"])["result"] is False
    assert one.ask("check", keys=["other"])["result"] is True
    service.close()


# Garbage.

GARBAGE: list[Message] = [
    {},
    {"op": "unknown", "request": 1},
    {"op": None, "request": 1},
    {"op": ["claim"], "request": 1},
    {"op": "claim"},
    {"op": "set", "request": "x", "key": "k", "value": "v"},
    {"op": "get", "request": 1, "keys": 5, "deadline_s": 1},
    {"op": "get", "request": 1, "keys": ["k"], "deadline_s": None},
    {"op": "add", "request": 1, "key": "k", "amount": "many"},
    {"op": "left", "world": "w", "epoch": 1, "rank": 0, "lost": 3},
    {"op": "left", "world": "w", "epoch": None, "rank": 0},
    {"op": "answer", "ask": []},
    {"op": "withdraw"},
    {"op": "announce", "world": "w", "epoch": "x", "rank": 0, "uid": "a"},
    *(
        {"op": "claim", **claim_of(1, 0, 2), **fields}
        for fields in (
            {"rank": -1},
            {"rank": 2},
            {"size": 0},
            {"size": 10**6},
            {"size": None},
            {"deadline_s": -1},
            {"deadline_s": float("nan")},
            {"deadline_s": float("inf")},
            {"deadline_s": "soon"},
            {"seen": -1},
            {"seen": 1 << 60},
            {"member": "text"},
            {"member": 5},
            {"place": [3, 2]},
            {"place": [0]},
            {"place": 7},
            {"lost": [5]},
        )
    ),
]


@pytest.mark.parametrize("message", GARBAGE, ids=lambda m: json.dumps(m)[:60])
async def test_garbage_raises_what_ends_its_session_and_changes_nothing(
    message: Message,
) -> None:
    """KeyError, TypeError and ValueError are violations of the protocol."""
    service = StoreService()
    bad, good = Client(service), Client(service, "good")
    with pytest.raises((KeyError, TypeError, ValueError)):
        service.receive(bad.key, message)
    assert service.waiting_count == 0
    assert good.reply(good.claim(0, 1))["epoch"] == 1
    service.close()


@pytest.mark.parametrize(
    "message",
    [
        {"op": "claim", **claim_of(1, 0, 2), "rank": float("inf")},
        {"op": "claim", **claim_of(1, 0, 2, deadline_s=10**400)},
        {"op": "left", "world": "w", "epoch": float("inf"), "rank": 0},
        {"op": "get", "request": 1, "keys": ["k"], "deadline_s": 10**400},
    ],
    ids=lambda m: m["op"],
)
async def test_number_beyond_a_float_is_a_violation(message: Message) -> None:
    """JSON can say 1e999, and an integer of any length."""
    service = StoreService()
    bad = Client(service)
    try:
        with pytest.raises((KeyError, TypeError, ValueError)):
            service.receive(bad.key, message)
    finally:
        service.close()


async def test_wait_until_not_a_number_is_refused() -> None:
    """A get with such a deadline would keep the store's loop busy for ever."""
    service = StoreService()
    bad = Client(service)
    try:
        with pytest.raises(ValueError, match="deadline"):
            bad.ask("get", keys=["k"], deadline_s=float("nan"))
    finally:
        service.close()


@pytest.mark.xfail(strict=True, reason="the claim of a dead session waits as a ghost")
async def test_message_of_a_session_that_has_ended_is_dropped() -> None:
    """In a store inside the process, messages may be on their way when it ends."""
    service = StoreService()
    one = Client(service)
    service.close_session(one.key)
    one.claim(0, 2)
    await turns()
    service.close()
    assert service.waiting_count == 0


async def test_service_knows_its_loop() -> None:
    """A store inside a process may be left over from a loop that has ended."""
    service = StoreService()
    assert service.is_on_this_loop()

    async def elsewhere() -> bool:
        return service.is_on_this_loop()

    assert await asyncio.to_thread(asyncio.run, elsewhere()) is False
