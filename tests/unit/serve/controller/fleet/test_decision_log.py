"""The decision log in memory and on disk, including disks that fail."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from multiworld.serve.controller.fleet import decision_log as module
from multiworld.serve.controller.fleet.decision_log import (
    KEPT,
    KEPT_SNAPSHOTS,
    DecisionLog,
)

HANG_S = 20.0


def decide(log: DecisionLog, what: str, **facts: Any) -> None:
    log.record("scaling", "m", what, facts, lambda: {"now": 5})
    log.settle(HANG_S)


def test_decisions_are_kept_and_reasons_replace_each_other() -> None:
    log = DecisionLog()
    log.set_reason("scaling", "m", "enough")
    log.set_reason("scaling", "m", "still enough")
    log.set_reason("placement", "", "no better place")
    assert log.last(10) == []
    assert {r.about: r.what for r in log.reasons()} == {
        "m": "still enough",
        "": "no better place",
    }
    decide(log, "more")
    assert log.reasons()[0].what == "more"
    (one,) = log.last(10, with_snapshots=True)
    assert (one.number, one.what, one.snapshot) == (1, "more", {"now": 5})


def test_last_decisions_come_oldest_first() -> None:
    log = DecisionLog()
    for number in range(KEPT + 3):
        decide(log, str(number))
    assert [d.number for d in log.last(2)] == [KEPT + 2, KEPT + 3]
    assert len(log.last(10**6)) == KEPT
    assert log.last(0) == []


def test_snapshots_are_kept_of_the_last_decisions_only() -> None:
    """Snapshots may be large; the file keeps all of them."""
    log = DecisionLog()
    for number in range(KEPT_SNAPSHOTS + 2):
        decide(log, str(number))
    kept = [bool(d.snapshot) for d in log.last(KEPT, with_snapshots=True)]
    assert kept == [False] * 2 + [True] * KEPT_SNAPSHOTS


def test_each_decision_is_a_line_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    decide(DecisionLog(path), "one\nline", where=path, many={1, 2})
    decide(DecisionLog(path), "two", nested={(1, 2): 3, "kept": None})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["what"] for line in lines] == ["one\nline", "two"]
    assert lines[0]["facts"]["where"] == str(path)
    assert lines[1]["facts"] == {"nested": {"kept": None}}


def test_large_file_is_put_aside_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FILE_BYTES", 300)
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path)
    for number in range(12):
        decide(log, f"decision {number}")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "decisions.jsonl",
        "decisions.old.jsonl",
    ]
    kept = (path.with_suffix(".old.jsonl").read_text() + path.read_text()).splitlines()
    numbers = [json.loads(line)["number"] for line in kept]
    assert numbers == list(range(numbers[0], 13))
    assert path.stat().st_size < 2 * 300


@pytest.mark.parametrize("what", ["a folder", "no folder", "a circle"])
def test_service_does_not_depend_on_the_file(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    facts: dict[str, Any] = {}
    path = tmp_path / "decisions.jsonl"
    if what == "a folder":
        path.mkdir()
    elif what == "no folder":
        path = tmp_path / "none" / "decisions.jsonl"
    else:
        facts["circle"] = facts
    log = DecisionLog(path)
    log.record("scaling", "m", "more", facts, dict)
    log.settle(HANG_S)
    assert len(log.last(1)) == 1
    assert "cannot write the decision log" in caplog.text


def test_disk_that_hangs_blocks_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "decisions.jsonl"
    os.mkfifo(path)  # opening it hangs until somebody reads
    log = DecisionLog(path)
    for number in range(KEPT + 3):
        log.record("scaling", "m", str(number), {}, dict)
    assert log.last(1)[0].what == str(KEPT + 2)
    assert "takes too long" in caplog.text
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        log.settle(HANG_S)
        assert json.loads(reader.readline())["what"] == "0"


def test_fact_that_cannot_be_shown_does_not_fail_the_decision(tmp_path: Path) -> None:
    """Facts come from policies that users write."""

    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("as asked")

        __repr__ = __str__

    decide(DecisionLog(tmp_path / "decisions.jsonl"), "more", odd=Odd())
