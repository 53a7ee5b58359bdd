"""Counts and log lines of refused connections."""

from __future__ import annotations

import logging

import pytest

from multiworld.net.refusals import Refusals


def test_refusals_are_all_counted_and_few_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A port scanner must not fill the log."""
    caplog.set_level(logging.WARNING)
    refusals = Refusals(logging.getLogger("multiworld.test"), "the listener")
    for number in range(500):
        refusals.add("malformed", ("10.0.0.1", number), "garbage")
    refusals.add("secret", ("10.0.0.1", 1), "wrong")
    assert refusals.counts == {"malformed": 500, "secret": 1}
    assert len(caplog.records) == 2
