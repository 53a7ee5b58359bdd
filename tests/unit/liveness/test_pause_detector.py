"""Pauses of the process that checks, found by how late its checks are."""

from __future__ import annotations

import math

import pytest

from multiworld.liveness.failure_detector import (
    DetectionLimits,
    FailureDetector,
    PeerHeard,
    PeerJoined,
    Ticked,
    Watched,
)
from multiworld.liveness.pause_detector import LATE_S, PauseDetector


def test_late_look_is_a_pause_and_a_process_that_is_always_late_judges() -> None:
    """Of consecutive late checks, only the first one counts."""
    pauses = PauseDetector(0.1)
    assert not pauses.look(5.0)
    assert not pauses.look(5.1 + LATE_S)
    assert pauses.resumed_at == -math.inf
    assert pauses.look(7.0)
    assert pauses.resumed_at == 7.0
    assert not pauses.look(9.0)
    assert not pauses.look(11.0)
    assert pauses.resumed_at == 7.0
    assert not pauses.look(11.1)
    assert pauses.look(12.0)


def test_long_pause_after_a_late_look_is_one_too() -> None:
    """A machine under load delays checks before a process is stopped."""
    detector = PauseDetector(0.1)
    assert not detector.look(0.0)
    assert detector.look(0.5)
    assert not detector.look(1.0), "as late as before"
    assert detector.look(4.0)
    assert detector.resumed_at == 4.0


def test_look_after_a_rest_is_never_late() -> None:
    """Nobody checked, because there was nothing to check."""
    pauses = PauseDetector(0.1)
    pauses.look(1.0)
    pauses.rest()
    assert not pauses.look(60.0)


@pytest.mark.parametrize("pause_s", [0.7, 1.5])
def test_own_pause_is_no_silence_of_a_peer(pause_s: float) -> None:
    """It is none before the next tick either, when what arrived is still unread."""
    detector = FailureDetector(0.1)
    detector.handle(PeerJoined("p"), 0.0)
    detector.handle(Watched("p", 1, DetectionLimits(2.0)), 0.0)
    for turn in range(1, 11):
        detector.handle(PeerHeard(peer="p"), turn / 10)
        detector.handle(Ticked(), turn / 10)
    assert detector.silent_s("p", 1.1) == pytest.approx(0.1)
    resumed = 1.0 + pause_s
    assert detector.silent_s("p", resumed) <= 0.2
    detector.handle(Ticked(), resumed)
    assert detector.silent_s("p", resumed) <= 0.2
    for turn in range(1, 11):  # now it is silent, and that shows
        detector.handle(Ticked(), resumed + turn / 10)
    assert detector.silent_s("p", resumed + 1.0) == pytest.approx(1.1, abs=0.11)
