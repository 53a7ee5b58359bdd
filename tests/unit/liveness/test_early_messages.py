"""Messages that arrive before their world is known."""

from __future__ import annotations

from multiworld.liveness.early_messages import (
    KEPT_S,
    LIMIT_BYTES,
    MESSAGE_BYTES,
    EarlyMessages,
)


def test_early_messages_wait_for_their_incarnation_and_place() -> None:
    """They are delivered in order and once, and kept for a limited time and number."""
    early = EarlyMessages[str, int]()
    for number in range(3):
        early.keep(1, "a", number, 0.0)
    early.keep(1, "b", 9, 0.0)
    early.keep(2, "a", 8, 0.0)
    assert early.take(1, "a") == [0, 1, 2]
    assert early.take(1, "a") == []
    early.drop(1)
    assert early.take(1, "b") == []
    early.purge(KEPT_S + 1)
    assert early.take(2, "a") == []


def test_origin_that_sends_too_many_takes_nothing_from_others() -> None:
    """Each may have as much; long texts count."""
    early = EarlyMessages[str, int]()
    most = LIMIT_BYTES // MESSAGE_BYTES
    for number in range(most + 10):
        early.keep(number % 2, "a", number, 0.0)
    early.keep(3, "b", 1, 0.0, texts=LIMIT_BYTES // 2)
    early.keep(3, "b", 2, 0.0, texts=LIMIT_BYTES // 2)
    early.keep(3, "b", 3, 0.0)
    assert early.take(3, "b") == [1, 3]
    assert len(early.take(0, "a")) + len(early.take(1, "a")) == most
    early.keep(4, "a", 7, 0.0)
    assert early.take(4, "a") == [7], "what was taken makes room"
