"""Backoff between attempts to join again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.world.rejoin import FIRST_S, LAST_S, keep, pause_s


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_pauses_grow_and_end(failures: int, chance: float) -> None:
    assert FIRST_S / 2 <= pause_s(failures, chance) <= LAST_S
    assert pause_s(failures + 1, chance) >= pause_s(failures, chance)


@dataclass
class Closed:
    """A world that is closed, by the program or for its next incarnation."""

    is_closed: bool = True
    is_ready: bool = False

    async def wait_incomplete(self) -> None:
        pass


@pytest.mark.parametrize(("failures", "turns"), [(0, 1), (2, 3)])
async def test_world_is_kept_unless_the_program_has_left_it(
    failures: int, turns: int
) -> None:
    """A ``grow`` or ``reform`` that failed closes it too, and leaves no newer one."""
    made = [Closed() for _ in range(3)]
    joins, failed = iter(made), iter([True] * failures + [False])

    async def join() -> Any:
        return next(joins)

    kept = keep("w", join, lambda: None, lambda: next(failed))
    assert [world async for world in kept] == cast("Any", made[:turns])
