"""The activation log: bounded, and it returns what was sent."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.serve.replica.sequences.activation_log import ActivationLog

WIDTH = 4


def rows(begin: int, count: int, salt: int = 0) -> torch.Tensor:
    """Return rows that contain their positions."""
    places = torch.arange(begin, begin + count, dtype=torch.float32) + 1000 * salt
    return places[:, None].expand(count, WIDTH).contiguous()


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans())),
    st.integers(0, 2000),
)
def test_rows_can_be_read_unless_they_were_dropped(
    steps: list[tuple[int, int, bool]], limit: int
) -> None:
    """The oldest sequence is dropped first."""
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


@given(
    st.lists(st.integers(1, 5), min_size=1),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=4),
)
def test_shared_rows_can_be_read_and_never_change(
    sizes: list[int], writes: list[tuple[int, int]]
) -> None:
    log, stream, end = ActivationLog(10_000), ("g", 0), sum(sizes)
    pieces = list(torch.split(rows(0, end), sizes))
    assert not log.share(stream, pieces)
    assert log.nbytes == rows(0, end).nbytes
    expected = rows(0, end)
    for back, count in writes:
        begin = max(0, end - back)
        log.append(stream, begin, rows(begin, count, 7))
        expected = torch.cat([expected[:begin], rows(begin, count, 7)])
        end = begin + count
        assert torch.equal(log.rows(stream, 0, end), expected)
        assert torch.equal(log.rows(stream, end // 2, end), expected[end // 2 :])
    assert torch.equal(torch.cat(pieces), rows(0, sum(sizes)))
    log.drop(stream)
    assert log.nbytes == 0


def test_shared_rows_beyond_the_limit_are_dropped() -> None:
    """Shared rows count towards the limit like others."""
    log = ActivationLog(rows(0, 10).nbytes)
    log.append(("g", 0), 0, rows(0, 6))
    assert log.share(("g", 1), [rows(0, 8)]) == [("g", 0)]
    assert log.share(("g", 2), [rows(0, 11)]) == [("g", 1), ("g", 2)]
    assert log.nbytes == 0
