"""Time breakdowns that a service reports, also damaged ones."""

from __future__ import annotations

import pytest

from multiworld.serve.gateway.admission.timing import Phases
from multiworld.serve.load.breakdown import (
    OUTSIDE,
    cpu_between,
    cpu_in,
    phases_in,
    phases_of,
)
from multiworld.serve.load.summary import Sample


def test_header_of_the_gateway_is_read_again() -> None:
    phases = Phases(0.001, 0.0, 0.0123456, 1.5, 0.000002)
    found = phases_of(phases.header)
    assert found is not None
    assert list(found) == list(Phases._fields)
    assert list(found.values()) == pytest.approx(list(phases), abs=1e-6)


@pytest.mark.parametrize("header", [None, "", "db", "db;dur=x", "a;dur=1, b"])
def test_header_that_cannot_be_read_is_no_breakdown(header: str | None) -> None:
    """Proxies add such headers of their own."""
    assert phases_of(header) is None


def test_phases_of_answers_are_summarised_with_what_is_outside() -> None:
    """Failed requests and answers without phases are left out."""
    samples = [
        Sample(0, 0.5, 200, phases={"parse": 0.1, "hop": 0.2}),
        Sample(0, 0.9, 200, phases={"parse": 0.3, "hop": 0.2}),
        Sample(0, 0.2, 200, phases={"parse": 0.2, "hop": 0.2}),
        Sample(0, 9.0, 200),
        Sample(0, 9.0, 503, phases={"parse": 9.0}),
    ]
    parse, hop, outside = phases_in(samples)
    assert (parse.phase, hop.phase, outside.phase) == ("parse", "hop", OUTSIDE)
    assert parse.mean_s == pytest.approx(0.2)
    assert (parse.p50_s, parse.p99_s) == (0.2, 0.3)
    assert outside.p99_s == pytest.approx(0.4)
    assert outside.mean_s == pytest.approx(0.2)
    assert phases_in([]) == []


def test_cpu_time_of_one_request_is_that_of_all_processes() -> None:
    """A process that started meanwhile counts from zero, one that exited not at all."""
    text = (
        "# TYPE multiworld_process_cpu_seconds counter\n"
        'multiworld_process_cpu_seconds_total{process="g"} 1.5\n'
        'multiworld_process_cpu_seconds_total{process="m/0/1"} 3\n'
    )
    after = cpu_in(text)
    assert after == {"g": 1.5, "m/0/1": 3.0}
    before = {"g": 1.0, "ended": 7.0}
    assert cpu_between(before, after, 10) == {"g": 0.05, "m/0/1": 0.3}
    assert cpu_between(before, after, 0) == {}
