"""Phases of a request, which add up to its total time."""

from __future__ import annotations

import pytest

from multiworld.serve.gateway.admission.timing import Phases, Timing


def test_phases_add_up_to_the_whole_time() -> None:
    """``hop``, the time between the processes, is the remainder."""
    timing = Timing()
    timing.asked(11.0)
    timing.answered(19.0, queued_s=2.0, computed_s=3.0)
    phases = timing.phases(10.0, 21.0)
    assert phases == Phases(parse=1.0, queue=2.0, hop=3.0, compute=3.0, render=2.0)
    assert sum(phases) == 11.0


def test_parts_of_a_request_count_as_their_average() -> None:
    """Parts wait and are computed side by side, so their times overlap."""
    timing = Timing()
    for begin, end, queued_s, computed_s in (
        (1.0, 5.0, 1.0, 2.0),
        (2.0, 7.0, 3.0, 1.0),
    ):
        timing.asked(begin)
        timing.answered(end, queued_s, computed_s)
    phases = timing.phases(0.0, 8.0)
    assert phases == Phases(parse=1.0, queue=2.0, hop=2.5, compute=1.5, render=1.0)


def test_request_that_no_replica_answered_has_no_phases() -> None:
    timing = Timing()
    assert timing.phases(0.0, 1.0) is None
    timing.asked(0.5)
    assert timing.phases(0.0, 1.0) is None


def test_no_phase_is_below_zero() -> None:
    """The processes do not read their clocks at the same moment."""
    timing = Timing()
    timing.asked(1.0)
    timing.answered(2.0, queued_s=0.7, computed_s=0.7)
    phases = timing.phases(1.0, 2.0)
    assert phases is not None
    assert phases.hop == 0.0
    assert phases.header.startswith("parse;dur=0.000, queue;dur=700.000, hop;dur=0.000")
    assert min(phases) == pytest.approx(0.0)
