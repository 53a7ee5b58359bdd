"""Backoff between attempts to join again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiworld.world.rejoin import FIRST_S, LAST_S, pause_s


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_pauses_grow_and_end(failures: int, chance: float) -> None:
    """No pause exceeds the longest, or is under half the shortest."""
    assert FIRST_S / 2 <= pause_s(failures, chance) <= LAST_S
    assert pause_s(failures + 1, chance) >= pause_s(failures, chance)
