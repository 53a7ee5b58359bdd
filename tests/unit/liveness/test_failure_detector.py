"""Verdicts of the failure detector, with a clock that the tests control."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.liveness.failure_detector import (
    Blinded,
    DetectionLimits,
    FailureDetector,
    Finding,
    HeartbeatsBegan,
    Observation,
    PeerClosed,
    PeerHeard,
    PeerJoined,
    ProcessState,
    Resumed,
    Stalled,
    Ticked,
    Unwatched,
    Verdict,
    Watched,
)
from multiworld.testing import FakeClock

TICK_S = 0.2


class Bench:
    def __init__(self, silence_s: float = 2.0, worlds: int = 1) -> None:
        self.clock = FakeClock()
        self.live = FailureDetector(TICK_S)
        self.handle(PeerJoined("p"))
        for world in range(worlds):
            self.handle(Watched("p", world, DetectionLimits(silence_s)))

    def find(self, observation: Observation) -> list[Finding]:
        return self.live.handle(observation, self.clock.now)

    def handle(self, observation: Observation) -> list[Verdict]:
        findings = self.find(observation)
        return [finding for finding in findings if isinstance(finding, Verdict)]

    def run(
        self, seconds: float, state: ProcessState | None = ProcessState.RUNNING
    ) -> list[Verdict]:
        """Advance time tick by tick, with heartbeats unless ``state`` is None."""
        verdicts: list[Verdict] = []
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            if state is not None:
                self.handle(PeerHeard(peer="p", state=state))
            verdicts += self.handle(Ticked())
        return verdicts


def test_peer_that_sends_heartbeats_is_never_judged() -> None:
    assert Bench().run(60) == []


def test_silent_peer_is_lost_after_the_limit_and_once() -> None:
    bench = Bench()
    bench.run(5)
    assert bench.run(1.8, None) == []
    verdicts = bench.run(3, None)
    assert len(verdicts) == 1
    assert 2.0 + 2 * TICK_S < verdicts[0].silent_s <= 2.0 + 3 * TICK_S
    assert "silent" in verdicts[0].reason


def silences(*, near: Sequence[bool], beating: Collection[int] = ()) -> list[float]:
    """Return how long peers were silent when they were lost, in order."""
    clock, live = FakeClock(), FailureDetector(TICK_S)
    names = [f"p{number}" for number in range(len(near))]
    for name, is_near in zip(names, near, strict=True):
        live.handle(PeerJoined(name, is_near=is_near), clock.now)
        live.handle(Watched(name, 0, DetectionLimits(2.0)), clock.now)
    found: list[Finding] = []
    for _ in range(round(10 / TICK_S)):
        clock.advance(TICK_S)
        for number in beating:
            live.handle(PeerHeard(peer=names[number]), clock.now)
        found += live.handle(Ticked(), clock.now)
    return [each.silent_s for each in found if isinstance(each, Verdict)]


def test_processes_of_this_host_that_fall_silent_together_get_twice_the_time() -> None:
    """The host lacks something, as this process still runs."""
    assert all(4.0 < seconds < 5.2 for seconds in silences(near=[True, True, True]))
    assert len(silences(near=[True, True, True])) == 3


def test_recovery_of_one_peer_does_not_shorten_the_limit_of_others() -> None:
    """A peer that ends meanwhile, or a new one, takes nothing from them either."""
    clock, live = FakeClock(), FailureDetector(TICK_S)
    for name in ("a", "b", "c"):
        live.handle(PeerJoined(name, is_near=True), clock.now)
        live.handle(Watched(name, 0, DetectionLimits(2.0)), clock.now)
    found: list[Finding] = []
    for tick in range(round(4.0 / TICK_S)):
        clock.advance(TICK_S)
        if tick * TICK_S >= 2.6:
            live.handle(PeerHeard(peer="a"), clock.now)
        if tick == round(3.0 / TICK_S):
            live.handle(PeerClosed("b", "ended", "eof"), clock.now)
            live.handle(PeerJoined("d", is_near=True), clock.now)
            live.handle(Watched("d", 0, DetectionLimits(2.0)), clock.now)
        found += live.handle(Ticked(), clock.now)
    assert found == []
    clock.advance(TICK_S)
    live.handle(PeerHeard(peer="c"), clock.now)
    for _ in range(round(1.0 / TICK_S)):
        clock.advance(TICK_S)
        for name in ("a", "c", "d"):
            live.handle(PeerHeard(peer=name), clock.now)
        assert live.handle(Ticked(), clock.now) == []


@pytest.mark.parametrize(
    ("near", "beating"),
    [
        ([True], ()),  # alone
        ([True, True, True], (2,)),  # one is heard
        ([False, False, False], ()),  # on another host
    ],
)
def test_other_silent_peers_get_no_extra_time(
    near: list[bool], beating: tuple[int, ...]
) -> None:
    found = silences(near=near, beating=beating)
    assert len(found) == len(near) - len(beating)
    assert all(seconds < 3.2 for seconds in found)


def test_peer_that_is_still_dialing_is_not_judged() -> None:
    """It begins to send heartbeats with the second of its connections."""
    clock, live = FakeClock(), FailureDetector(TICK_S)
    live.handle(PeerJoined("p", has_heartbeats=False), clock.now)
    live.handle(Watched("p", 0, DetectionLimits(2.0)), clock.now)

    def run(seconds: float) -> list[Finding]:
        found: list[Finding] = []
        for _ in range(round(seconds / TICK_S)):
            clock.advance(TICK_S)
            found += live.handle(Ticked(), clock.now)
        return found

    assert run(10.0) == []
    live.handle(HeartbeatsBegan("p"), clock.now)
    assert run(2.0) == []
    (lost,) = run(2.0)
    assert isinstance(lost, Verdict)
    assert not lost.has_ended


def test_stopped_peer_is_lost_though_its_helper_sends_heartbeats() -> None:
    bench = Bench()
    bench.run(5)
    verdicts = bench.run(4, ProcessState.STOPPED)
    assert len(verdicts) == 1
    assert "stopped" in verdicts[0].reason


def test_stopped_peer_that_resumes_in_time_lives() -> None:
    bench = Bench()
    bench.run(5)
    assert bench.run(1.6, ProcessState.STOPPED) == []
    assert bench.run(5) == []


def test_closed_connection_is_a_verdict_at_once_for_every_world() -> None:
    """The kernel closes the connections of a dead process."""
    bench = Bench(worlds=3)
    verdicts = bench.handle(PeerClosed("p", "ended", "eof"))
    assert {v.world for v in verdicts} == {0, 1, 2}
    assert bench.handle(PeerClosed("p", "ended", "eof")) == []


def test_late_observer_judges_nobody_before_it_has_read() -> None:
    """Its own delay is not silence of its peers."""
    bench = Bench()
    bench.run(5)
    bench.clock.advance(30)
    assert bench.handle(Ticked()) == []
    assert bench.run(1.4, None) == []
    assert len(bench.run(3, None)) == 1


def test_pause_of_an_observer_that_was_late_before_is_no_silence_of_others() -> None:
    """A machine under load delays the check before the pause as well."""
    bench = Bench()
    bench.run(1.0)
    bench.clock.advance(2.5 * TICK_S)
    assert bench.handle(Ticked()) == []
    bench.clock.advance(3.0)  # stopped; what arrived meanwhile is still unread
    assert bench.handle(Ticked()) == []
    bench.clock.advance(1.5 * TICK_S)
    assert bench.handle(Ticked()) == []


def test_pause_before_the_first_tick_is_no_silence_of_others() -> None:
    """A process may be stopped right after it has joined."""
    bench = Bench()
    bench.clock.advance(3.0)
    assert bench.handle(Ticked()) == []
    assert bench.run(0.4) == []
    assert len(bench.run(3.0, None)) == 1


def test_observer_that_is_always_late_judges_all_the_same() -> None:
    """A loop whose every step takes half a second still learns of a loss."""
    bench = Bench()
    bench.run(5)
    verdicts: list[Verdict] = []
    for _ in range(10):
        bench.clock.advance(0.65)
        verdicts += bench.handle(Ticked())
    assert len(verdicts) == 1


def test_observer_that_is_always_late_accuses_no_live_peer() -> None:
    """It reads heartbeats between its ticks."""
    bench = Bench()
    for _ in range(100):
        bench.clock.advance(0.65)
        assert bench.handle(Ticked()) == []
        bench.handle(PeerHeard(peer="p"))


def test_worlds_have_their_own_limits() -> None:
    bench = Bench(silence_s=1.0)
    bench.handle(Watched("p", 7, DetectionLimits(5.0)))
    bench.handle(Watched("p", 8, DetectionLimits(math.inf)))
    assert [v.world for v in bench.run(2, None)] == [0]
    assert [v.world for v in bench.run(4, None)] == [7]
    assert bench.run(60, None) == []


def test_unwatched_world_is_not_judged() -> None:
    bench = Bench()
    bench.handle(Unwatched("p", 0))
    assert bench.run(60, None) == []


def test_peer_that_was_not_watched_starts_afresh() -> None:
    """A link may be idle, without heartbeats, between two worlds."""
    bench = Bench()
    bench.handle(Unwatched("p", 0))
    bench.run(60, None)
    bench.handle(Watched("p", 1, DetectionLimits(2.0)))
    assert bench.run(1.6, None) == []
    assert len(bench.run(2, None)) == 1


def test_heartbeat_that_arrived_in_time_counts_though_it_is_read_late() -> None:
    """The helper stamps arrivals; a loop that was stuck reads them before it judges."""
    bench = Bench()
    bench.run(5)
    arrived = bench.clock.now + 29.5
    bench.clock.advance(30)
    bench.handle(PeerHeard(peer="p", at=arrived))
    assert bench.handle(Ticked()) == []
    assert bench.run(1.4, None) == []


def test_peer_that_does_not_receive_us_is_lost_though_it_sends() -> None:
    """This is how both sides detect a one-way network partition."""
    bench = Bench()
    bench.run(5)
    verdicts: list[Verdict] = []
    for step in range(30):
        bench.clock.advance(TICK_S)
        bench.handle(PeerHeard(peer="p", heard_us_s=step * TICK_S))
        verdicts += bench.handle(Ticked())
    assert len(verdicts) == 1
    assert "one direction" in verdicts[0].evidence


def test_unheard_time_in_a_delayed_heartbeat_does_not_grow() -> None:
    """A network partition that ends before the deadline is no fault."""
    bench = Bench()
    bench.run(5)
    assert bench.run(1.8, None) == []
    assert bench.handle(PeerHeard(peer="p", heard_us_s=1.8)) == []
    assert bench.run(0.8, None) == []
    assert bench.run(5) == []


def test_observer_that_was_suspended_ignores_earlier_reports() -> None:
    """Peers missed its heartbeats meanwhile, and report so for an interval or two."""
    bench = Bench()
    bench.run(5)
    bench.clock.advance(10)
    bench.handle(PeerHeard(peer="p", heard_us_s=9.0))
    assert bench.handle(Ticked()) == []
    bench.clock.advance(TICK_S)
    bench.handle(PeerHeard(peer="p", heard_us_s=9.2))
    assert bench.handle(Ticked()) == []
    assert bench.run(5) == []


def test_blind_observer_judges_nobody() -> None:
    """Its helper gave no report, so the received heartbeats are unknown."""
    bench = Bench()
    bench.run(5)
    for _ in range(40):
        bench.clock.advance(TICK_S)
        assert bench.handle(Blinded()) == []
    assert bench.run(1.4, None) == []
    assert len(bench.run(3, None)) == 1


def stall(bench: Bench, seconds: float, lag_s: float = 0.0) -> list[Finding]:
    """Simulate a peer whose loop is stuck while its helper sends heartbeats."""
    findings: list[Finding] = []
    for _ in range(round(seconds / TICK_S)):
        bench.clock.advance(TICK_S)
        lag_s += TICK_S
        heard = PeerHeard(peer="p", lag_s=lag_s, is_computing=True)
        findings += bench.find(heard) + bench.find(Ticked())
    return findings


def test_stuck_loop_is_reported_once_and_is_no_loss() -> None:
    bench = Bench()
    bench.handle(Watched("p", 0, DetectionLimits(2.0, stall_s=2.0)))
    bench.run(5)
    findings = stall(bench, 30)
    assert [type(finding) for finding in findings] == [Stalled]
    assert isinstance(findings[0], Stalled)
    assert findings[0].is_computing
    assert 2.0 < findings[0].stalled_s < 2.0 + 4 * TICK_S
    resumed = bench.find(PeerHeard(peer="p"))
    assert [type(finding) for finding in resumed] == [Resumed]
    assert bench.run(5) == []


def test_stuck_loop_is_a_loss_where_a_world_says_so() -> None:
    bench = Bench(worlds=2)
    limits = DetectionLimits(2.0, stall_s=1.0, stalled_limit_s=4.0)
    bench.handle(Watched("p", 7, limits))
    found = stall(bench, 10)
    assert [(type(f), f.world) for f in found] == [(Stalled, 7), (Verdict, 7)]


def test_stopped_process_is_not_called_stalled() -> None:
    """Its loop gives no sign either, but "stopped" is the better diagnosis."""
    bench = Bench()
    bench.handle(Watched("p", 0, DetectionLimits(60, stall_s=1.0)))
    for step in range(40):
        bench.clock.advance(TICK_S)
        state = ProcessState.STOPPED
        bench.find(PeerHeard(peer="p", state=state, lag_s=step * TICK_S))
        assert bench.find(Ticked()) == []


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), max_size=60))
def test_any_history_then_nobody_is_accused_within_the_limit(
    steps: list[tuple[float, bool]],
) -> None:
    """A verdict implies silence for longer than the limit, by the real clock."""
    bench = Bench()
    heard = bench.clock.now
    for seconds, beats in steps:
        bench.clock.advance(seconds)
        if beats:
            bench.handle(PeerHeard(peer="p"))
            heard = bench.clock.now
        if bench.handle(Ticked()):
            assert bench.clock.now - heard > 2.0
