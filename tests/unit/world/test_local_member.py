"""One member of one incarnation: its messages, its findings, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from multiworld import (
    MemberLeftError,
    MemberLostError,
    StaleEpochError,
    World,
    WorldBrokenError,
    WorldClosedError,
)
from multiworld.events import (
    Event,
    MemberLeft,
    MemberLost,
    MemberResumed,
    MemberStalled,
    MemberWaiting,
)
from multiworld.incarnation.lifecycle import Phase
from multiworld.liveness.failure_detector import Resumed, Stalled, Verdict
from multiworld.liveness.manager_messages import Broken, EndCollectives, Left, OpenLane
from multiworld.testing import Arena, no_leaks
from multiworld.world import joining, local_member, manager
from multiworld.world.local_member import LocalMember, ManagerServices
from tests.recorded import recorded
from tests.unit.waiting import turns


class Bench:
    """A world of three in this process, seen by its rank 0."""

    def __init__(self, worlds: list[World], members: list[LocalMember]) -> None:
        self.worlds = worlds
        self.members = sorted(members, key=lambda member: member.rank)
        self.local = self.members[0]
        self.events: list[Event] = []

    def kinds(self) -> list[type]:
        return [type(event) for event in self.events]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with no_leaks(), Arena("memory") as arena:
        with (
            recorded(joining, LocalMember) as members,
            recorded(manager, ManagerServices) as services,
        ):
            made = Bench(await arena.world(3), members)
        services[0].publish = made.events.append
        yield made


def broken(rank: int | None, reason: str = "it died") -> Broken:
    return Broken(1, rank, reason, "the kernel", 0.5)


def lost_by(reason: str, evidence: str) -> Verdict:
    return Verdict(peer="p", world=1, reason=reason, evidence=evidence, silent_s=0.1)


async def test_member_notified_of_a_loss_names_the_same_rank(bench: Bench) -> None:
    bench.local.on_message(1, broken(2, "rank 2 was lost: it died"))
    error = bench.local.broken_error()
    assert isinstance(error, MemberLostError)
    assert error.rank == 2
    assert str(error).count("rank 2 was lost") == 1
    assert "reported by rank 1" in str(error)
    assert bench.local.lost == {2}
    with pytest.raises(MemberLostError):
        await bench.worlds[0].barrier()


async def test_member_notified_of_a_fault_without_a_culprit_is_broken_too(
    bench: Bench,
) -> None:
    """A corrupt frame has no rank to blame."""
    bench.local.on_message(1, broken(None, "garbage"))
    assert bench.local.is_broken
    assert bench.local.lost == frozenset()
    with pytest.raises(WorldBrokenError, match="garbage"):
        bench.local.check()


async def test_accused_member_that_lives_is_fenced(bench: Bench) -> None:
    """The others continue without it, so it must not continue at all."""
    bench.local.on_message(1, broken(0, "rank 0 was lost: it was silent"))
    assert bench.local.is_stale
    with pytest.raises(StaleEpochError, match="it was silent"):
        bench.local.check()


async def test_everybody_learns_the_reason_from_the_first(bench: Bench) -> None:
    receiving = [asyncio.create_task(world.recv(src=2)) for world in bench.worlds[:2]]
    await turns(3)
    bench.local.on_finding(2, lost_by("it died", "the kernel"))
    for task in receiving:
        with pytest.raises(MemberLostError) as lost:
            await task
        assert lost.value.rank == 2
    assert MemberLost in bench.kinds()
    await bench.worlds[2].wait_over()
    with pytest.raises(StaleEpochError):
        await bench.worlds[2].barrier()


async def test_stall_is_an_event_and_no_fault(bench: Bench) -> None:
    bench.local.on_finding(
        1, Stalled(peer="p", world=1, stalled_s=3.0, is_computing=True)
    )
    bench.local.on_finding(1, Resumed(peer="p", world=1))
    assert bench.kinds() == [MemberStalled, MemberResumed]
    await bench.worlds[1].send(torch.ones(1), dst=0)
    assert (await bench.worlds[0].recv(src=1)).item() == 1.0


async def test_stall_of_a_member_that_left_is_no_event(bench: Bench) -> None:
    bench.local.on_message(2, Left(1, is_broken=False))
    bench.local.on_finding(
        2, Stalled(peer="p", world=1, stalled_s=3.0, is_computing=True)
    )
    assert bench.kinds() == [MemberLeft]


async def test_broken_world_still_learns_of_more_lost_members(bench: Bench) -> None:
    """``reform`` needs the union of what its members know."""
    waiting = asyncio.create_task(bench.local.wait_more_lost(frozenset({2})))
    bench.local.on_message(1, broken(2))
    await turns(3)
    assert not waiting.done()
    bench.local.on_finding(1, lost_by("it died too", ""))
    await waiting
    assert bench.local.lost == {1, 2}


async def test_message_for_the_backend_of_a_world_that_is_over_is_dropped(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[tuple[int, object]] = []
    monkeypatch.setattr(
        bench.local.backend, "on_message", lambda *what: got.append(what)
    )
    end, lane = EndCollectives(1, 7, 2), OpenLane(1)
    bench.local.on_message(1, end)
    bench.local.on_message(2, lane)
    assert got == [(1, end), (2, lane)]
    bench.local.on_message(1, broken(2))
    bench.local.on_message(1, end)
    assert len(got) == 2


async def test_failed_connection_breaks_the_world_if_nobody_explains_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every member is alive, but data no longer flows."""
    monkeypatch.setattr(local_member, "LINK_GRACE_S", 0.01)
    bench.local.trouble(1, "reset by peer")
    bench.local.trouble(1, "again")
    assert not bench.local.is_broken
    await bench.local.wait_over()
    with pytest.raises(WorldBrokenError, match="every member is alive") as failed:
        bench.local.check()
    assert "reset by peer" in str(failed.value)
    assert bench.local.lost == frozenset()


async def test_link_explains_a_failed_connection(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that died or left is the reason; the connection is not."""
    monkeypatch.setattr(local_member, "LINK_GRACE_S", 0.01)
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
    call_later = loop.call_later

    def call(*args: Any, **more: Any) -> asyncio.TimerHandle:
        timers.append(call_later(*args, **more))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", call)
    bench.local.trouble(1, "reset by peer")
    bench.local.trouble(None, "some connection")
    await bench.worlds[1].close()
    await asyncio.sleep(0.03)
    bench.local.check()
    assert bench.local.left == {1}
    timers.clear()
    bench.local.trouble(1, "reset by peer")
    bench.local.trouble(None, "some connection")
    assert timers == []
    bench.local.trouble(2, "reset by peer")
    (timer,) = timers
    bench.local.on_finding(2, lost_by("it died", ""))
    assert bench.local.lost == {2}
    assert timer.cancelled()


async def test_step_ends_with_the_world(bench: Bench) -> None:
    is_cancelled = False

    async def step() -> None:
        nonlocal is_cancelled
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    waiting = asyncio.create_task(bench.local.until_over(step()))
    await turns(3)
    bench.local.on_message(1, broken(2))
    with pytest.raises(MemberLostError):
        await waiting
    assert is_cancelled


async def test_step_that_is_cancelled_is_not_left_running(bench: Bench) -> None:
    stuck = asyncio.Event()
    waiting = asyncio.create_task(bench.local.until_over(stuck.wait()))
    await turns(3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await bench.local.until_over(asyncio.sleep(0, "done")) == "done"


async def test_closing_is_safe_to_repeat_and_notifies_the_others_once(
    bench: Bench,
) -> None:
    await asyncio.gather(bench.local.close(), bench.local.close())
    bench.local.close_nowait()
    with pytest.raises(WorldClosedError):
        bench.local.check()
    await bench.worlds[1].wait_incomplete()
    assert bench.worlds[1].left == {0}
    other = bench.members[1]
    other.on_message(2, broken(2))
    await other.close()
    await other.close()


async def test_cancelled_close_closes_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(bench.local.backend, "close", never)
    closing = asyncio.create_task(bench.local.close())
    await turns(3)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await bench.local.wait_over()
    with pytest.raises(WorldClosedError):
        bench.local.check()


async def test_newcomers_are_remembered_until_they_give_up(bench: Bench) -> None:
    """A superseded incarnation publishes nothing more."""
    bench.local.member_waits(3, 4, is_gone=False)
    assert bench.worlds[0].waiting == {3: 4}
    bench.local.member_waits(3, 4, is_gone=True)
    bench.local.member_waits(7, 8, is_gone=True)
    assert bench.worlds[0].waiting == {}
    assert bench.kinds() == [MemberWaiting] * 3
    bench.local.supersede()
    bench.local.member_waits(3, 4, is_gone=False)
    assert len(bench.events) == 3


async def test_silence_of_this_member_is_none(bench: Bench) -> None:
    """A member of the same process is judged by its link."""
    assert bench.local.silent_s(0) == 0.0
    assert bench.local.silent_s(1) >= 0.0


def ended() -> Verdict:
    return Verdict(
        peer="p",
        world=1,
        reason="it died",
        evidence="the kernel",
        silent_s=0.1,
        has_ended=True,
    )


async def test_loss_waits_for_what_the_network_still_brings(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the control link may overtake the data."""
    arriving = True
    monkeypatch.setattr(bench.local.backend, "is_arriving", lambda rank: arriving)
    bench.local.on_finding(2, ended())
    bench.local.on_message(1, broken(2))  # silent: nothing comes from there
    assert bench.local.phase is Phase.READY
    bench.local.trouble(2, "eof of one lane")
    assert bench.local.phase is Phase.READY
    arriving = False
    bench.local.trouble(2, "eof of the other")
    assert bench.local.is_broken
    assert bench.local.lost == {2}


@pytest.mark.parametrize("rank", [2, 1, None])
async def test_end_of_a_lane_before_the_verdict_hides_no_loss(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    """The first lane to end may be that of a survivor, or of nobody that is known."""
    monkeypatch.setattr(local_member, "LINK_GRACE_S", 0.02)
    monkeypatch.setattr(bench.local.backend, "is_arriving", lambda rank: True)
    bench.local.trouble(rank, "eof")
    bench.local.on_finding(2, ended())
    async with asyncio.timeout(20):
        await bench.local.wait_over()
    assert bench.local.lost == {2}
    assert isinstance(bench.local.broken_error(), MemberLostError)


async def test_last_lane_to_end_is_not_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first lane ended before the verdict."""
    arriving = True
    monkeypatch.setattr(bench.local.backend, "is_arriving", lambda rank: arriving)
    bench.local.trouble(2, "eof of the first")
    bench.local.on_finding(2, ended())
    assert bench.local.phase is Phase.READY
    arriving = False
    bench.local.trouble(2, "eof of the last")
    assert bench.local.lost == {2}


async def test_world_that_breaks_meanwhile_learns_of_both_losses(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss that broke it comes first."""
    monkeypatch.setattr(bench.local.backend, "is_arriving", lambda rank: True)
    bench.local.on_finding(2, ended())
    bench.local.on_finding(1, lost_by("it was silent", "no heartbeats"))
    assert bench.local.lost == {1, 2}
    lost = [event.rank for event in bench.events if isinstance(event, MemberLost)]
    assert lost == [1, 2]


async def test_loss_waits_no_longer_than_a_moment(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of that member may be gone."""
    monkeypatch.setattr(local_member, "ENDING_S", 0.01)
    monkeypatch.setattr(bench.local.backend, "is_arriving", lambda rank: True)
    bench.local.on_finding(2, ended())
    assert bench.local.phase is Phase.READY
    async with asyncio.timeout(20):
        await bench.local.wait_over()
    assert bench.local.lost == {2}


async def test_silent_member_is_lost_at_once_though_data_might_come(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing says that it ended."""
    monkeypatch.setattr(bench.local.backend, "is_arriving", lambda rank: True)
    bench.local.on_finding(2, lost_by("it was silent", "no heartbeats"))
    assert bench.local.is_broken


async def test_receive_from_a_member_that_left_ends_when_it_falls_silent(
    bench: Bench,
) -> None:
    """Its last messages never come."""
    bench.local.on_message(2, Left(1, is_broken=False))
    receiving = asyncio.create_task(bench.worlds[0].recv(src=2))
    await turns(3)
    assert not receiving.done()
    bench.local.on_finding(2, lost_by("it was silent", "no heartbeats"))
    with pytest.raises(MemberLeftError):
        await asyncio.wait_for(receiving, 20)
    assert bench.local.phase is Phase.READY
