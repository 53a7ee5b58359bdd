"""The state machine of an incarnation: single transitions and random histories."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiworld.errors import MemberLostError, StaleEpochError
from multiworld.incarnation.events import (
    MemberLeft,
    MemberLost,
    WorldBroken,
    WorldClosed,
)
from multiworld.incarnation.lifecycle import (
    Action,
    CloseAsked,
    EndMember,
    Failed,
    FailMember,
    FailOperations,
    Finished,
    Happening,
    Life,
    Opened,
    Phase,
    Publish,
    SaidLeft,
    TellBroken,
    TellLeft,
    WasAccused,
    WasLost,
    handle,
)

NEW = Life(world="w", epoch=3, rank=0, size=4)


def play(*happenings: Happening) -> tuple[Life, list[Action]]:
    """Return the state after all happenings, and the actions of the last one."""
    life, actions = NEW, tuple[Action, ...]()
    for happening in happenings:
        life, actions = handle(life, happening)
    return life, list(actions)


def published(actions: list[Action]) -> list[type]:
    return [type(action.event) for action in actions if isinstance(action, Publish)]


def test_opened_when_joining_then_ready() -> None:
    """Only a joining world becomes ready."""
    assert play(Opened())[0].phase is Phase.READY
    assert play(Opened(), Opened())[1] == []
    assert play(WasLost(1, "x"), Opened())[0].phase is Phase.BROKEN


def test_loss_when_ready_then_others_are_notified_before_anything_closes() -> None:
    """A member that sees a connection end without a reason would accuse this one."""
    life, actions = play(Opened(), WasLost(2, "died", "eof", 0.5))
    assert life.phase is Phase.BROKEN
    kinds = [type(action) for action in actions]
    assert kinds.index(TellBroken) < kinds.index(FailOperations)
    assert published(actions) == [MemberLost, WorldBroken]
    assert life.breakage is not None
    error = life.error(life.breakage)
    assert isinstance(error, MemberLostError)
    assert (error.rank, error.lost, error.epoch) == (2, frozenset({2}), 3)


def test_second_loss_adds_to_the_lost_and_keeps_the_reason() -> None:
    life, actions = play(Opened(), WasLost(2, "died"), WasLost(1, "too"))
    assert published(actions) == [MemberLost]
    assert isinstance(actions[0], TellBroken)  # only this member may know of it
    assert actions[0].breakage.rank == 1
    assert play(Opened(), WasLost(2, "died"), WasLost(2, "again"))[1] == []
    told = WasLost(1, "too", reported_by=3)
    assert [type(a) for a in play(Opened(), WasLost(2, "died"), told)[1]] == [Publish]
    assert life.breakage is not None
    assert life.breakage.rank == 2
    assert life.breakage.lost == {1, 2}


def test_accused_that_lives_is_fenced_and_accuses_nobody() -> None:
    """The others continue without it; a verdict of its own would contradict theirs."""
    life, actions = play(Opened(), WasAccused(2, "it has been silent"))
    assert life.phase is Phase.BROKEN
    assert not any(isinstance(action, TellBroken) for action in actions)
    assert any(isinstance(action, FailOperations) for action in actions)
    assert life.breakage is not None
    error = life.error(life.breakage)
    assert isinstance(error, StaleEpochError)
    assert (error.seen, error.expected, error.lost) == (3, 4, frozenset({0}))
    assert "rank 2" in error.reason


def test_mutual_accusation_keeps_the_first() -> None:
    life, _ = play(Opened(), WasLost(1, "silent"), WasAccused(1, "silent"))
    assert life.breakage is not None
    assert isinstance(life.error(life.breakage), MemberLostError)


def test_member_that_left_can_not_break_the_world() -> None:
    """The end of its connections is no fault."""
    life, actions = play(Opened(), SaidLeft(1), WasLost(1, "eof", has_ended=True))
    assert life.phase is Phase.READY
    assert actions == []
    assert life.left == {1}


def test_member_that_left_and_fell_silent_sends_nothing_more() -> None:
    """It may have been stopped before everything that it had sent left it."""
    life, actions = play(Opened(), SaidLeft(1), WasLost(1, "it was silent"))
    assert life.phase is Phase.READY
    assert actions == [EndMember(1)]
    assert play(Opened(), SaidLeft(1), CloseAsked(), WasLost(1, "x"))[1] == []


def test_last_message_of_a_member_names_it_and_decides_nothing() -> None:
    """Its notice of leaving, or a verdict, is still to come."""
    life, actions = play(Opened(), Finished(1))
    assert life.phase is Phase.READY
    assert life.gone == {1}
    assert life.left == frozenset()
    assert actions == []
    assert published(play(Opened(), Finished(1), SaidLeft(1))[1]) == [MemberLeft]
    life, _ = play(Opened(), Finished(1), Finished(2), WasLost(1, "killed"))
    assert life.phase is Phase.BROKEN
    assert life.gone == {2}, "one that was lost has not left"


def test_leave_when_ready_then_member_fails_and_is_reported() -> None:
    _, actions = play(Opened(), SaidLeft(3))
    assert actions[0] == FailMember(3)
    assert published(actions) == [MemberLeft]


def test_close_when_ready_then_others_are_notified() -> None:
    life, actions = play(Opened(), CloseAsked())
    assert life.phase is Phase.CLOSED
    assert isinstance(actions[0], TellLeft)
    assert published(actions) == [WorldClosed]
    assert play(Opened(), CloseAsked(), CloseAsked())[1] == []


def test_close_when_broken_then_the_others_need_not_wait_for_it() -> None:
    """A ``reform`` must not wait for a member that has closed the world."""
    _, actions = play(Opened(), WasLost(1, "x"), CloseAsked())
    assert published(actions) == [WorldClosed]
    assert isinstance(actions[0], TellLeft)
    assert actions[0].is_broken
    life, actions = play(Opened(), WasLost(1, "x"), SaidLeft(2, is_broken=True))
    assert life.left == {2}
    assert actions == []


def test_one_that_closes_as_broken_has_not_left_politely() -> None:
    """Its notice may arrive before the verdict of the member that broke the world."""
    gone = SaidLeft(2, is_broken=True)
    life, actions = play(Opened(), gone)
    assert (life.phase, actions) == (Phase.READY, [])
    assert life.left == frozenset()
    life, _ = play(Opened(), gone, WasLost(1, "x"))
    assert life.left == {2}
    assert life.breakage is not None
    assert life.breakage.rank == 1


def test_close_when_joining_then_the_others_learn_that_it_gave_up() -> None:
    """They wait for this member, so to them this is a failure, not a leave."""
    _, actions = play(CloseAsked())
    assert isinstance(actions[0], TellBroken)
    assert "gave up" in actions[0].breakage.reason


def test_own_rank_and_unknown_ranks_are_ignored() -> None:
    """No message makes a member declare itself lost."""
    for rank in (0, 4, -1):
        assert play(Opened(), WasLost(rank, "x"))[0].phase is Phase.READY
        assert play(Opened(), SaidLeft(rank))[0].left == frozenset()


ranks = st.integers(-1, 4)
histories = st.lists(
    st.one_of(
        st.just(Opened()),
        st.just(CloseAsked()),
        st.builds(SaidLeft, ranks),
        st.builds(Finished, ranks),
        st.builds(WasLost, ranks, st.just("x")),
        st.builds(Failed, st.just("y")),
        st.builds(WasAccused, ranks, st.just("z")),
    ),
    max_size=12,
)


@given(histories)
def test_any_history_then_invariants_hold(history: list[Happening]) -> None:
    """An ended world stays so; operations fail once; a member that left is not lost."""
    life, failures = NEW, 0
    for happening in history:
        before = life
        life, actions = handle(life, happening)
        failures += sum(isinstance(a, FailOperations) for a in actions)
        if before.is_over:
            assert life.is_over
        if before.phase is Phase.CLOSED:
            assert life == before
            assert actions == ()
        if life.breakage is not None and before.breakage is None:
            assert not life.breakage.lost & life.left
        assert life.rank not in life.left
    assert failures <= 1
