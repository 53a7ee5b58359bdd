"""Verdicts, with time under control."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from multiworld.liveness import (
    Liveness,
    PeerClosed,
    PeerHeard,
    PeerJoined,
    ProcessState,
    Ticked,
    Unwatched,
    Verdict,
    Watched,
)
from multiworld.testing import FakeClock

TICK_S = 0.2


class Bench:
    """A liveness, a clock, and a few words."""

    def __init__(self, silence_s: float = 2.0, worlds: int = 1) -> None:
        self.clock = FakeClock()
        self.live = Liveness(TICK_S)
        self.handle(PeerJoined("p"))
        for world in range(worlds):
            self.handle(Watched("p", world, silence_s))

    def handle(self, observation: object) -> list[Verdict]:
        return self.live.handle(observation, self.clock.now)  # type: ignore[arg-type]

    def run(
        self, seconds: float, state: ProcessState | None = ProcessState.RUNNING
    ) -> list[Verdict]:
        """Let time pass tick by tick, with beats unless ``state`` is None."""
        verdicts: list[Verdict] = []
        for _ in range(round(seconds / TICK_S)):
            self.clock.advance(TICK_S)
            if state is not None:
                self.handle(PeerHeard("p", state))
            verdicts += self.handle(Ticked())
        return verdicts


def test_beating_peer_is_never_judged() -> None:
    """However long it lives."""
    assert Bench().run(60) == []


def test_silent_peer_is_lost_after_the_limit_and_once() -> None:
    """One verdict a world, with the time it was silent."""
    bench = Bench()
    bench.run(5)
    assert bench.run(1.8, None) == []
    verdicts = bench.run(3, None)
    assert len(verdicts) == 1
    assert 2.0 < verdicts[0].silent_s <= 2.0 + 2 * TICK_S
    assert "silent" in verdicts[0].reason


def test_stopped_peer_is_lost_though_its_helper_beats() -> None:
    """And the verdict says so."""
    bench = Bench()
    bench.run(5)
    verdicts = bench.run(4, ProcessState.STOPPED)
    assert len(verdicts) == 1
    assert "stopped" in verdicts[0].reason


def test_stopped_peer_that_goes_on_in_time_lives() -> None:
    """A short stop is no loss."""
    bench = Bench()
    bench.run(5)
    assert bench.run(1.6, ProcessState.STOPPED) == []
    assert bench.run(5) == []


def test_closed_connection_is_a_verdict_at_once_for_every_world() -> None:
    """The kernel knows."""
    bench = Bench(worlds=3)
    verdicts = bench.handle(PeerClosed("p", "ended", "eof"))
    assert {v.world for v in verdicts} == {0, 1, 2}
    assert bench.handle(PeerClosed("p", "ended", "eof")) == []


def test_late_observer_judges_nobody_before_it_has_read() -> None:
    """Its own delay is no silence of others."""
    bench = Bench()
    bench.run(5)
    bench.clock.advance(30)
    assert bench.handle(Ticked()) == []
    assert bench.run(1.4, None) == []
    assert len(bench.run(3, None)) == 1


def test_observer_that_is_always_late_judges_all_the_same() -> None:
    """A loop that computes half a second a step still learns of a loss."""
    bench = Bench()
    bench.run(5)
    verdicts: list[Verdict] = []
    for _ in range(10):
        bench.clock.advance(0.65)
        verdicts += bench.handle(Ticked())
    assert len(verdicts) == 1


def test_observer_that_is_always_late_accuses_nobody_who_beats() -> None:
    """Beats are read between its ticks."""
    bench = Bench()
    for _ in range(100):
        bench.clock.advance(0.65)
        assert bench.handle(Ticked()) == []
        bench.handle(PeerHeard("p"))


def test_worlds_have_their_own_limits() -> None:
    """Each is judged by its own; leaving one leaves the others watched."""
    bench = Bench(silence_s=1.0)
    bench.handle(Watched("p", 7, 5.0))
    bench.handle(Watched("p", 8, math.inf))
    assert [v.world for v in bench.run(2, None)] == [0]
    assert [v.world for v in bench.run(4, None)] == [7]
    assert bench.run(60, None) == []


def test_unwatched_world_is_not_judged() -> None:
    """What nobody shares, nobody judges."""
    bench = Bench()
    bench.handle(Unwatched("p", 0))
    assert bench.run(60, None) == []


def test_peer_that_was_not_watched_starts_afresh() -> None:
    """A link may idle without beats between worlds."""
    bench = Bench()
    bench.handle(Unwatched("p", 0))
    bench.run(60, None)
    bench.handle(Watched("p", 1, 2.0))
    assert bench.run(1.6, None) == []
    assert len(bench.run(2, None)) == 1


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
            bench.handle(PeerHeard("p"))
            heard = bench.clock.now
        if bench.handle(Ticked()):
            assert bench.clock.now - heard > 2.0
