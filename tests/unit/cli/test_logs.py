"""Which lines of a log are about a request, or new enough."""

from __future__ import annotations

from datetime import datetime

import click
import pytest

from multiworld.cli.options import Age
from multiworld.serve.controller.log_files import Entry, entries_of, time_of

LINES = [
    "the end of a cut line",
    "2026-11-29 16:57:01,123 INFO a: first",
    "2026-11-29 16:57:02,000 WARNING a: raised: [request r-1]",
    "Traceback (most recent call last):",
    "ValueError: x",
    '{"time": "2026-11-29T16:57:03.500Z", "message": "m", "request": "r-2"}',
]


def test_lines_without_a_time_belong_to_the_one_before() -> None:
    found = entries_of(LINES)
    assert [len(each.lines) for each in found] == [1, 1, 3, 1]
    assert found[0].at is None
    assert found[1].at == datetime(2026, 11, 29, 16, 57, 1, 123000).timestamp()


def test_time_of_json_is_that_of_the_world() -> None:
    at = time_of(LINES[-1])
    assert at == datetime.fromisoformat("2026-11-29T16:57:03.500+00:00").timestamp()
    for line in ("{", "{}", '{"time": 3}', '{"time": "x"}', ""):
        assert time_of(line) is None


def test_id_is_found_whole_only() -> None:
    entry = entries_of(LINES)[2]
    assert entry.is_about("r-1")
    for other in ("r", "1", "r-", "r-11"):
        assert not entry.is_about(other)
    assert Entry(None, ['{"request": "r-1"}']).is_about("r-1")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400), ("1d", 86400)]
)
def test_age_is_a_length_of_time(text: str, seconds: float) -> None:
    assert Age().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "5 minutes"])
def test_other_ages_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Age().convert(text, None, None)
