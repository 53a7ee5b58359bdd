"""Errors that repeat: logged once a minute for each cause."""

from __future__ import annotations

import logging

import pytest

from multiworld.net.rare_log import AGAIN_S, MAX_CAUSES, RareLog
from tests.memory import objects_in

FULL = OSError(28, "No space left on device")


def test_each_cause_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    """The text has the number of times that it was not logged."""
    now = 100.0
    log = RareLog(logging.getLogger("x"), lambda: now)
    for _ in range(1000):
        log.error("cannot write the record", FULL)
        log.error("cannot write the log", FULL)
    log.error("cannot write the record", OSError(30, "Read-only file system"))
    assert len(caplog.messages) == 3
    now += AGAIN_S - 0.1
    log.error("cannot write the record", FULL)
    assert len(caplog.messages) == 3
    now += 0.2
    log.error("cannot write the record", FULL)
    assert caplog.messages[-1].endswith("(1000 more times since)")


def test_causes_are_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    """A cause with a number in it must not fill the memory."""
    log = RareLog(logging.getLogger("x"), lambda: 1.0)
    sizes = []
    for part in range(3):
        for number in range(MAX_CAUSES):
            for _ in range(2):
                what = f"cannot write {part} {number}"
                log.error(what, FULL)
        sizes.append(objects_in(log))
    assert sizes == sizes[:1] * 3
    log.error("cannot write 0 0", FULL)
    assert caplog.messages[-1] == f"cannot write 0 0: {FULL}"
