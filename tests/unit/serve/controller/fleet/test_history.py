"""The history of a service: numbered, bounded, and in the log."""

from __future__ import annotations

import logging

import pytest

from multiworld.serve.controller.fleet.entries import HistoryEntry
from multiworld.serve.controller.fleet.history import BAD, EVENTS, History


def test_entries_are_numbered_and_read_on_from_a_number() -> None:
    history = History()
    assert history.since(0) == []
    for kind in ("ready", "lost", "ready"):
        history.say(kind, f"text of {kind}", "m/0/1")
    assert [entry.number for entry in history.since(0)] == [1, 2, 3]
    assert [entry.kind for entry in history.since(1)] == ["lost", "ready"]
    assert history.since(3) == []
    assert history.since(2)[0].name == "m/0/1"


def test_oldest_entries_are_dropped_and_still_counted() -> None:
    """Numbers continue, so a reader notices the gap."""
    history = History()
    for number in range(EVENTS + 5):
        history.say("ready", str(number))
    kept = history.since(0)
    assert len(kept) == EVENTS
    assert (kept[0].number, kept[-1].number) == (6, EVENTS + 5)
    assert history.counts == {("ready", "", ""): EVENTS + 5}


@pytest.mark.parametrize("kind", ["ready", *BAD])
def test_what_is_bad_is_logged_as_a_warning(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    History().say(kind, "100 % of it")
    (record,) = caplog.records
    assert record.getMessage() == f"{kind}: 100 % of it"
    assert (record.levelno == logging.WARNING) == (kind in BAD)


def test_losses_are_counted_by_model_and_stage_and_are_among_the_last_events() -> None:
    """The counts have a model and a stage so that an alert can name them."""
    history, seen = History(), list[HistoryEntry]()
    history.on_event = seen.append
    history.say("lost", "m/0/7: it was killed", "m/0/7")
    history.say("lost", "gateway/1: it was killed", "gateway/1")
    history.say("scale", "m/0: from 1 to 2 replicas")
    history.say("ready", "m/0/8", "m/0/8")
    assert history.counts == {
        ("lost", "m", "0"): 1,
        ("lost", "", ""): 1,
        ("scale", "", ""): 1,
        ("ready", "m", "0"): 1,
    }
    assert [entry.kind for entry in history.operations(9)] == ["lost", "lost", "scale"]
    assert len(seen) == 4
