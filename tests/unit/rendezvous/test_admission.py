"""The registry: claims, epochs, holders, deadlines. No network, no clock."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.rendezvous.admission import (
    ASK_S,
    MAX_CLAIMS,
    RESERVE,
    Registry,
    next_epoch,
)
from multiworld.rendezvous.claims import (
    Claimed,
    Forget,
    Received,
    Refused,
    Remember,
    Send,
    SessionEnded,
    Ticked,
)
from multiworld.rendezvous.reform import ReformClaim
from multiworld.rendezvous.store_messages import (
    MAX_EPOCH,
    Admitted,
    Announce,
    AskHolds,
    Crowded,
    HoldsAnswer,
    JoinTimedOut,
    Leave,
    MemberGaveUp,
    NewcomerWaits,
    RankTaken,
    Reply,
    Stale,
    TermsDiffer,
    VersionDiffers,
    Withdraw,
)
from tests.lines import lines_of
from tests.unit.inner_state import waiting_count, world_count
from tests.unit.rendezvous.sessions import sealed_of


class Bench:
    """A registry with shorthands. Session n is process n."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.now = 0.0
        self.requests = 0
        self.place = (0, 1)

    def handle(self, happening: Any) -> list[Any]:
        return list(self.registry.handle(happening, self.now))

    def claim(
        self, session: int, rank: int, size: int = 2, *, seen: int = 0, terms: str = "t"
    ) -> list[Any]:
        self.requests += 1
        return self.handle(
            Claimed(
                session=session,
                request=self.requests,
                world="w",
                rank=rank,
                size=size,
                terms=terms,
                uid=f"u{session}",
                seen=seen,
                deadline=self.now + 30,
                member=sealed_of(rank, f"u{session}"),
                deadline_s=30,
                fresh_nonce=self.requests,
                place=self.place,
            )
        )

    def admitted(self, actions: list[Any]) -> tuple[int, set[int]]:
        admitted = admitted_of(actions)
        assert len(admitted) == len(replies_of(actions)), actions
        (epoch,) = {outcome.epoch for _, outcome in admitted}
        return epoch, {session for session, _ in admitted}


def left(session: int, world: str, epoch: int, rank: int, *lost: int) -> Received:
    return Received(session, Leave(world, epoch, rank, lost))


def withdrawn(session: int, request: int) -> Received:
    return Received(session, Withdraw(request))


def answered(session: int, ask: int, holds: bool) -> Received:
    return Received(session, HoldsAnswer(ask, holds))


def announced(session: int, epoch: int, rank: int) -> Received:
    """Return the message of a session that has held a rank since before."""
    return Received(session, Announce("w", epoch, rank, f"u{session}"))


def replies_of(actions: list[Any]) -> list[Any]:
    return [action for action in actions if kind_of(action) is Reply]


def kind_of(action: Any) -> type:
    """Return the type of an action, or of the message that it sends."""
    return type(action.message if isinstance(action, Send) else action)


def admitted_of(actions: list[Any]) -> list[tuple[int, Admitted]]:
    return [
        (reply.session, reply.message.outcome)
        for reply in replies_of(actions)
        if isinstance(reply.message.outcome, Admitted)
    ]


def kinds(actions: list[Any]) -> list[type]:
    return [kind_of(action) for action in actions]


def errors(actions: list[Any]) -> list[tuple[int, type]]:
    return [
        (reply.session, type(reply.message.outcome))
        for reply in replies_of(actions)
        if not isinstance(reply.message.outcome, Admitted)
    ]


def test_claims_when_complete_then_all_are_admitted_together() -> None:
    bench = Bench()
    assert bench.claim(1, 1) == []
    actions = bench.claim(2, 0)
    assert bench.admitted(actions) == (1, {1, 2})
    (_, first), (_, second) = admitted_of(actions)
    assert first == second
    assert first.members == (sealed_of(0, "u2"), sealed_of(1, "u1"))
    assert Remember("w", 1) in actions


def test_epoch_is_one_more_than_any_joiner_has_seen() -> None:
    """Epochs do not go back, even in a new registry."""
    bench = Bench()
    bench.claim(1, 0, seen=0)
    assert bench.admitted(bench.claim(2, 1, seen=7))[0] == 8


def test_claim_on_a_waiting_rank_is_refused() -> None:
    bench = Bench()
    bench.claim(1, 0)
    assert errors(bench.claim(2, 0)) == [(2, RankTaken)]
    assert bench.admitted(bench.claim(3, 1)) == (1, {1, 3})


def held() -> Bench:
    """Return a bench where sessions 1 and 2 hold ranks 0 and 1."""
    bench = Bench()
    bench.claim(1, 0)
    bench.claim(2, 1)
    return bench


def test_claim_on_a_held_rank_asks_the_holder_who_keeps_it() -> None:
    bench = held()
    (ask,) = bench.claim(3, 1)
    assert isinstance(ask.message, AskHolds)
    assert ask.session == 2
    asked = ask.message
    assert (asked.world, asked.epoch, asked.rank) == ("w", 1, 1)
    assert errors(bench.handle(answered(ask.session, ask.message.ask, True))) == [
        (3, RankTaken)
    ]


def test_only_the_holder_answers_whether_it_holds_its_rank() -> None:
    """Another session may guess the number of the question."""
    bench = held()
    (ask,) = bench.claim(3, 1)
    assert isinstance(ask.message, AskHolds)
    for session in (1, 3, 7):
        for holds in (False, True):
            assert bench.handle(answered(session, ask.message.ask, holds)) == []
    assert errors(bench.handle(answered(2, ask.message.ask, True))) == [(3, RankTaken)]


def test_only_the_holder_leaves_its_rank() -> None:
    bench = held()
    for session in (1, 3):
        assert bench.handle(left(session, "w", 1, 1)) == []
    (ask,) = bench.claim(3, 1)
    assert isinstance(ask.message, AskHolds), "it is held still"


def test_claim_on_a_held_rank_when_the_holder_is_silent_then_next_epoch() -> None:
    bench = held()
    bench.claim(3, 1)
    bench.now += ASK_S
    assert kinds(bench.handle(Ticked())) == [NewcomerWaits]
    bench.handle(left(1, "w", 1, 0))
    assert bench.admitted(replies_of(bench.claim(1, 0)))[0] == 2


def test_claim_on_a_dead_holders_rank_needs_no_question() -> None:
    """Its session has ended."""
    bench = held()
    bench.handle(SessionEnded(2))
    (note,) = bench.claim(3, 1)  # the remaining holder is notified
    told = note.message
    assert (note.session, told.epoch, told.rank, told.is_gone) == (1, 1, 1, False)
    actions = bench.claim(1, 0)
    assert isinstance(actions[0], Forget)
    assert bench.admitted(actions[1:]) == (2, {1, 3})


def test_holder_that_dies_while_it_is_asked_lets_the_claim_in() -> None:
    """The claim need not wait for the deadline of the question."""
    bench = held()
    bench.claim(3, 1)
    bench.handle(SessionEnded(2))
    bench.handle(left(1, "w", 1, 0))
    replies = replies_of(bench.claim(1, 0))
    assert bench.admitted(replies) == (2, {1, 3})


def test_rank_that_a_member_knows_to_be_lost_is_free_at_once() -> None:
    """Nobody asks a dead host; a session that holds no rank is not believed."""
    bench = held()
    bench.handle(left(9, "w", 1, 0, 1))
    (ask,) = bench.claim(3, 1)
    assert isinstance(ask.message, AskHolds)
    bench.handle(left(1, "w", 1, 0, 1))
    assert AskHolds not in kinds(bench.claim(4, 1))


def test_holder_that_claims_again_replaces_itself() -> None:
    """A process may return without having announced that it left."""
    bench = held()
    assert bench.claim(2, 1) == []


def test_different_terms_dissolve_the_gathering() -> None:
    bench = Bench()
    bench.claim(1, 0, 2)
    actions = bench.claim(2, 1, 3)
    assert errors(actions) == [(1, TermsDiffer), (2, TermsDiffer)]
    asked = "rank 0 asked for size 2, t; rank 1 asked for size 3, t"
    assert [reply.message.outcome for reply in replies_of(actions)] == [
        TermsDiffer(asked)
    ] * 2
    assert bench.registry.next_deadline() is None


def test_deadline_names_present_and_missing() -> None:
    bench = Bench()
    bench.claim(1, 0, 3)
    bench.claim(2, 2, 3)
    assert bench.registry.next_deadline() == 30
    bench.now = 30
    actions = bench.handle(Ticked())
    assert errors(actions) == [(1, JoinTimedOut), (2, JoinTimedOut)]
    outcomes = [reply.message.outcome for reply in replies_of(actions)]
    assert outcomes == [JoinTimedOut(present=(0, 2), missing=(1,))] * 2


def test_withdrawn_claim_frees_its_rank() -> None:
    bench = Bench()
    bench.claim(1, 0)
    bench.handle(withdrawn(1, 1))
    bench.claim(2, 0)
    assert bench.admitted(bench.claim(3, 1)) == (1, {2, 3})


def test_refused_peer_is_reported_to_waiting_members() -> None:
    """A member that speaks another version can never join."""
    bench = Bench()
    bench.claim(1, 0)
    why = VersionDiffers(9, "it is old")
    (reply,) = replies_of(bench.handle(Refused("w", why)))
    assert reply == Send(1, Reply(1, why))
    assert bench.handle(Refused("unknown", why)) == []


def test_names_that_nobody_holds_are_forgotten_but_their_numbers() -> None:
    """The keys of their last incarnation are deleted too."""
    bench = held()
    assert bench.handle(left(1, "w", 1, 0)) == []
    (forget,) = bench.handle(left(2, "w", 1, 1))
    assert isinstance(forget, Forget)
    bench.claim(1, 0)
    assert bench.admitted(bench.claim(2, 1))[0] == 2


def test_two_claims_on_a_silent_rank_then_the_first_gets_it() -> None:
    bench = held()
    bench.claim(3, 1)
    bench.claim(4, 1)
    bench.now += ASK_S
    assert errors(bench.handle(Ticked())) == [(4, RankTaken)]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.integers(1, 4), st.integers(0, 2)),
        st.tuples(st.just("end"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("time"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("answer"), st.integers(1, 6), st.integers(0, 1)),
    ),
    max_size=40,
)


@given(steps)
def test_any_history_then_epochs_grow_and_every_claim_is_answered_once(
    history: list[tuple[str, int, int]],
) -> None:
    bench = Bench()
    epochs: list[int] = []
    done: set[tuple[int, int]] = set()
    for kind, one, two in history:
        if kind == "claim":
            actions = bench.claim(one, two, 3)
        elif kind == "end":
            actions = bench.handle(SessionEnded(one))
        elif kind == "time":
            bench.now += one
            actions = bench.handle(Ticked())
        else:
            actions = bench.handle(answered(two, one, bool(two % 2)))
        for reply in replies_of(actions):
            key = reply.session, reply.message.request
            assert key not in done
            done.add(key)
        new = {outcome.epoch for _, outcome in admitted_of(actions)}
        assert len(new) <= 1
        epochs += new
    assert epochs == sorted(set(epochs))


# Growing.


def test_newcomer_is_reported_to_the_members_until_it_is_gone() -> None:
    bench = held()
    notes = bench.claim(3, 2, size=3)
    assert {note.session for note in notes} == {1, 2}
    assert {note.message for note in notes} == {NewcomerWaits("w", 1, 2, 3, False)}
    gone = bench.handle(withdrawn(3, bench.requests))
    assert {note.session for note in gone} == {1, 2}
    assert all(note.message.is_gone for note in gone)


def test_members_that_grow_hold_what_they_have_until_it_is_complete() -> None:
    bench = held()
    bench.claim(3, 2, size=3)
    assert errors(bench.claim(1, 0, size=3)) == []
    bench.handle(withdrawn(1, bench.requests))
    (ask,) = bench.claim(4, 0, size=3)  # still held
    assert isinstance(ask.message, AskHolds)
    bench.handle(answered(ask.session, ask.message.ask, True))
    bench.claim(1, 0, size=3)
    assert bench.admitted(bench.claim(2, 1, size=3)) == (2, {1, 2, 3})


# Reforming without the lost members.


def reform(
    bench: Bench,
    session: int,
    rank: int,
    lost: set[int],
    *,
    size: int = 3,
    epoch: int = 1,
) -> list[Any]:
    bench.requests += 1
    return bench.handle(
        ReformClaim(
            session=session,
            request=bench.requests,
            world="w",
            epoch=epoch,
            rank=rank,
            size=size,
            lost=frozenset(lost),
            terms="t",
            uid=f"u{session}",
            deadline=bench.now + 30,
            member=sealed_of(rank, f"u{session}"),
            deadline_s=30,
            fresh_nonce=bench.requests,
            place=(0, 1),
        )
    )


def three() -> Bench:
    """Return a bench where sessions 1, 2, 3 held ranks 0, 1, 2, and broke."""
    bench = Bench()
    for rank in range(3):
        bench.claim(rank + 1, rank, 3)
    for rank in range(3):
        bench.handle(left(rank + 1, "w", 1, rank))
    return bench


def test_survivors_continue_with_compacted_ranks() -> None:
    bench = three()
    assert reform(bench, 3, 2, {0}) == []
    actions = reform(bench, 2, 1, {0})
    assert bench.admitted(actions) == (2, {2, 3})
    for _, outcome in admitted_of(actions):
        assert outcome.members == (sealed_of(0, "u2"), sealed_of(1, "u3"))


def test_two_that_accuse_each_other_do_not_both_continue() -> None:
    """The first to reach the store continues; each epoch has one incarnation."""
    bench = Bench()
    bench.claim(1, 0)
    bench.claim(2, 1)
    assert bench.admitted(reform(bench, 1, 0, {1}, size=2)) == (2, {1})
    assert errors(reform(bench, 2, 1, {0}, size=2)) == [(2, Stale)]


def test_accused_survivor_is_refused_and_its_accusation_counts_for_nothing() -> None:
    """A claims first and accuses B, C believes both, and A and C continue."""
    bench = three()
    assert reform(bench, 1, 0, {1}) == []
    assert errors(reform(bench, 2, 1, {0})) == [(2, Stale)]
    assert bench.admitted(reform(bench, 3, 2, {0, 1})) == (2, {1, 3})


def test_more_lost_in_a_later_claim_of_the_same_survivor_counts() -> None:
    """A second member is lost while the survivor waits."""
    bench = three()
    assert reform(bench, 1, 0, {1}) == []
    assert bench.admitted(reform(bench, 1, 0, {1, 2})) == (2, {1})


def test_survivors_of_an_older_incarnation_are_refused() -> None:
    bench = three()
    reform(bench, 1, 0, {1, 2})
    assert errors(reform(bench, 3, 2, {0, 1})) == [(3, Stale)]
    assert bench.admitted(reform(bench, 1, 0, set(), size=1, epoch=2)) == (3, {1})


def test_survivors_that_wait_too_long_learn_who_is_missing() -> None:
    bench = three()
    reform(bench, 1, 0, {1})
    assert waiting_count(bench.registry) == 1
    bench.now += 31
    (reply,) = bench.handle(Ticked())
    assert reply.message.outcome == JoinTimedOut(present=(0,), missing=(2,))
    assert bench.registry.next_deadline() is None


# Several stores, and restarted stores.


@given(st.integers(0, 1000), st.integers(1, 8))
def test_no_two_stores_give_out_the_same_epoch(highest: int, count: int) -> None:
    epochs = {next_epoch(highest, (number, count)) for number in range(count)}
    assert epochs == set(range(highest + 1, highest + 1 + count))


def test_what_was_announced_is_held_and_its_number_not_given_again() -> None:
    """A store that lost its state learns it from the members."""
    bench = Bench()
    bench.handle(announced(1, 5, 0))
    (ask,) = bench.claim(3, 0)
    assert isinstance(ask.message, AskHolds)
    assert errors(bench.handle(answered(ask.session, ask.message.ask, True))) == [
        (3, RankTaken)
    ]
    bench.handle(left(1, "w", 5, 0))
    bench.claim(3, 0)
    assert bench.admitted(bench.claim(4, 1))[0] == 6


def test_remembered_epochs_continue() -> None:
    """The store may have read them from a file."""
    bench = Bench()
    bench.registry = Registry({"w": 9})
    bench.claim(1, 0)
    assert bench.admitted(bench.claim(2, 1))[0] == 10


def test_fresh_store_gives_no_number_of_survivors_again() -> None:
    bench = Bench()
    assert reform(bench, 1, 0, set(), size=2, epoch=4) == []
    assert errors(reform(bench, 9, 1, {0}, size=2, epoch=3)) == [(9, Stale)]
    assert bench.admitted(reform(bench, 2, 1, set(), size=2, epoch=4)) == (5, {1, 2})


def test_survivors_of_an_older_gathering_are_answered() -> None:
    """The event that makes their reform impossible also answers them."""
    bench = Bench()
    reform(bench, 1, 0, set(), epoch=3)
    assert errors(reform(bench, 2, 0, set(), epoch=4)) == [(1, Stale)]
    bench = three()
    reform(bench, 1, 0, {1})
    bench.claim(4, 0)
    assert (1, Stale) in errors(bench.claim(5, 1))


def test_accusations_go_with_their_accuser() -> None:
    """The accused may then claim; a survivor that withdrew can be accused itself."""
    bench = three()
    reform(bench, 1, 0, {1})
    bench.handle(withdrawn(1, bench.requests))
    assert reform(bench, 2, 1, {0}) == []
    assert bench.admitted(reform(bench, 3, 2, {0})) == (2, {2, 3})
    bench = three()
    reform(bench, 1, 0, set())
    reform(bench, 2, 1, {0})
    assert replies_of(bench.handle(SessionEnded(1))) == []
    assert bench.admitted(reform(bench, 3, 2, set())) == (2, {2, 3})


def test_one_that_gives_up_in_the_instant_of_admission_is_reported_to_the_others() -> (
    None
):
    """Its withdrawal and the admission cross on the wire."""
    bench = Bench()
    bench.claim(1, 0)
    first = bench.requests
    bench.claim(2, 1)
    actions = bench.handle(withdrawn(1, first))
    (told,) = [action for action in actions if kind_of(action) is MemberGaveUp]
    assert told == Send(2, MemberGaveUp("w", 1, 0))


def test_survivor_that_gave_up_in_the_instant_of_admission_may_reform_again() -> None:
    """Nobody was ever in that incarnation; its epoch is not given out again."""
    bench = three()
    assert bench.admitted(reform(bench, 1, 0, {1, 2})) == (2, {1})
    bench.handle(withdrawn(1, bench.requests))
    assert bench.admitted(reform(bench, 1, 0, {1, 2})) == (3, {1})
    assert errors(reform(bench, 1, 0, {1, 2})) == [(1, Stale)]


def test_half_that_was_accused_may_continue_if_the_other_gave_up() -> None:
    """Exactly one half continues: the one that gave up cannot."""
    bench = three()
    bench.admitted(reform(bench, 1, 0, {1, 2}))
    bench.handle(withdrawn(1, bench.requests))
    assert reform(bench, 2, 1, {0}) == []
    assert bench.admitted(reform(bench, 3, 2, {0})) == (3, {2, 3})
    assert errors(reform(bench, 1, 0, {1, 2})) == [(1, Stale)]


def test_survivor_that_gave_up_is_stale_if_another_may_have_continued() -> None:
    """The other one counts even if it is gone by now."""
    bench = three()
    reform(bench, 1, 0, {2})
    first = bench.requests
    assert bench.admitted(reform(bench, 2, 1, {2})) == (2, {1, 2})
    bench.handle(left(2, "w", 2, 1))
    bench.handle(withdrawn(1, first))
    assert errors(reform(bench, 1, 0, {1, 2})) == [(1, Stale)]


def test_members_must_list_the_stores_in_one_order() -> None:
    """Otherwise two stores could give out the same epoch."""
    bench = Bench()
    bench.place = (0, 2)
    bench.claim(1, 0)
    bench.place = (1, 2)
    assert errors(bench.claim(2, 1)) == [(1, TermsDiffer), (2, TermsDiffer)]


def test_withdrawn_claims_leave_nothing_behind() -> None:
    bench = Bench()
    for _ in range(100):
        bench.claim(1, 0)
        bench.handle(withdrawn(1, bench.requests))
    assert world_count(bench.registry) == 0


def claim_of(session: int, request: int, world: str, rank: int) -> Claimed:
    return Claimed(
        session=session,
        request=request,
        world=world,
        rank=rank,
        size=2,
        terms="t",
        uid=f"u{session}",
        seen=0,
        deadline=30.0 + request,
        member=sealed_of(rank, f"u{session}"),
        deadline_s=30,
        fresh_nonce=request,
        place=(0, 1),
    )


def work_beside(waiting: int) -> dict[str, int]:
    """Return the lines of code that each message runs, beside ``waiting`` claims."""
    registry = Registry()
    for number in range(waiting):
        registry.handle(claim_of(1, number + 1, f"x{number}", 0), 0.0)
    messages: dict[str, tuple[Any, float]] = {
        "claim": (claim_of(2, 1, "w", 0), 0.0),
        "completed": (claim_of(3, 1, "w", 1), 0.0),
        "left": (left(2, "w", 1, 0), 0.0),
        "withdrawn": (withdrawn(1, waiting // 2), 0.0),
        "session ended": (SessionEnded(3), 0.0),
        "ticked": (Ticked(), 31.0),
    }

    def handle(happening: Any, now: float) -> None:
        registry.handle(happening, now)
        registry.next_deadline()

    return {
        name: lines_of(functools.partial(handle, *given))
        for name, given in messages.items()
    }


def test_work_for_a_message_does_not_grow_with_the_claims_that_wait() -> None:
    few, many = work_beside(10), work_beside(1000)
    assert many == few


def test_session_has_a_limit_of_claims_that_wait() -> None:
    registry = Registry()
    for number in range(MAX_CLAIMS):
        registry.handle(claim_of(1, number + 1, f"x{number}", 0), 0.0)
    one_more = claim_of(1, MAX_CLAIMS + 1, "w", 0)
    assert registry.handle(one_more, 0.0) == [
        Send(1, Reply(MAX_CLAIMS + 1, Crowded(MAX_CLAIMS)))
    ]
    assert registry.handle(claim_of(2, 1, "x0", 1), 0.0)
    assert registry.handle(one_more, 0.0) == []
    assert waiting_count(registry) == MAX_CLAIMS


@pytest.mark.parametrize("epoch", [MAX_EPOCH - 1, MAX_EPOCH - RESERVE])
def test_epoch_that_leaves_no_room_is_not_believed(epoch: int) -> None:
    bench = Bench()
    assert bench.handle(announced(9, epoch, 0)) == []
    (reply,) = bench.claim(1, 0, seen=epoch)
    assert isinstance(reply.message.outcome, TermsDiffer)
    bench.claim(1, 0)
    assert admitted_epochs(bench.claim(2, 1)) == [1, 1]


def admitted_epochs(actions: list[Any]) -> list[int]:
    return [outcome.epoch for _, outcome in admitted_of(actions)]


def test_highest_epoch_that_is_believed_leaves_room_for_many_joins() -> None:
    bench = Bench()
    lie = MAX_EPOCH - RESERVE - 1
    bench.handle(announced(9, lie, 0))
    bench.handle(SessionEnded(9))
    for _ in range(100):
        bench.claim(1, 0)
        one, other = admitted_epochs(bench.claim(2, 1))
        assert one == other < MAX_EPOCH - RESERVE // 2
        for session in (1, 2):
            bench.handle(SessionEnded(session))
