"""Waits of the demos, which last as long as anything changes."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable

import pytest

from multiworld.demo.chats import story


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "POLL_S", 0.001)
    monkeypatch.setattr(story, "STILL_S", 0.2)
    monkeypatch.setattr(story, "TELL_S", 0.05)


def after(polls: int) -> Callable[[], Awaitable[str | None]]:
    """Return a probe that finds something after this many polls."""
    numbers = itertools.count()

    async def probe() -> str | None:
        return "found" if next(numbers) >= polls else None

    return probe


async def test_wait_lasts_as_long_as_something_changes() -> None:
    """400 polls take longer than ``STILL_S``."""
    changes, told = itertools.count(), []
    probe = after(400)
    found = await story.until(probe, lambda: next(changes), lambda: told.append(1))
    assert found == "found"
    assert len(told) >= 3


async def test_wait_fails_when_nothing_changes() -> None:
    with pytest.raises(TimeoutError):
        await story.until(after(10**6), lambda: 0, lambda: None)
