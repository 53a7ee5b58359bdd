"""The log of what a stage has sent: bounded, and what it returns is what was sent."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.serve.generation.replica.activation_log import ActivationLog

WIDTH = 4


def rows(begin: int, count: int, salt: int = 0) -> torch.Tensor:
    """Return rows that tell their positions."""
    places = torch.arange(begin, begin + count, dtype=torch.float32) + 1000 * salt
    return places[:, None].expand(count, WIDTH).contiguous()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans())),
    st.integers(0, 2000),
)
def test_rows_come_back_unless_they_were_dropped(
    steps: list[tuple[int, int, bool]], limit: int
) -> None:
    """Those of the sequence that came first are dropped first; memory is bounded."""
    log = ActivationLog(limit)
    kept: dict[int, tuple[int, int]] = {}
    ends = dict.fromkeys(range(3), 0)
    for number, count, goes_back in steps:
        begin = ends[number]
        if goes_back and number in kept:
            begin = max(kept[number][0], begin - 2)
        dropped = log.append(("g", number), begin, rows(begin, count, number))
        first = kept[number][0] if number in kept else begin
        ends[number] = begin + count
        kept[number] = first, begin + count
        for name in dropped:
            del kept[name[1]]
        assert log.nbytes <= limit
        for other, (low, high) in kept.items():
            found = log.rows(("g", other), low, high)
            assert torch.equal(found, rows(low, high - low, other))
    for number in range(3):
        log.drop(("g", number))
    assert log.nbytes == 0
