"""Messages that arrive before their world is known."""

from __future__ import annotations

from multiworld.liveness.early_messages import KEPT_S, LIMIT, EarlyMessages


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
    for number in range(LIMIT + 10):
        early.keep(3, "a", number, 0.0)
    assert len(early.take(3, "a")) == LIMIT
