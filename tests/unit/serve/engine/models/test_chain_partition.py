"""Partition of a chain of layers into parts of about equal cost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.engine.models.partition import chain_partition


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=9), st.integers(1, 4))
def test_chain_partition_is_as_good_as_exhaustive_search(
    costs: list[float], parts: int
) -> None:
    if parts > len(costs):
        with pytest.raises(ValueError, match="cannot be cut"):
            chain_partition(costs, parts)
        return
    found = chain_partition(costs, parts)
    assert found[0][0] == 0
    assert found[-1][1] == len(costs)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
    assert all(begin < end for begin, end in found)
    worst = max(sum(costs[b:e]) for b, e in found)
    best = min(
        max(sum(costs[b:e]) for b, e in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    assert worst == pytest.approx(best)
