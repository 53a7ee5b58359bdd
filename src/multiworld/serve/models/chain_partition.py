"""Partition of a chain of layers into stages. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def chain_partition(
    costs: Sequence[float],
    parts: int,
    within: tuple[Sequence[float], float] | None = None,
) -> list[tuple[int, int]]:
    """Cut a chain so that its largest part costs least; return (first, end) of each.

    Min-max chain partition by dynamic programming over (items, parts), in O(L² K) for L
    items and K parts. ``within`` has another cost of each item and its (satisfiable)
    maximum per part.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(f"{count} layers cannot be cut into {parts} stages")
    total = [0.0, *itertools.accumulate(costs)]
    others, most = within or ([0.0] * count, 0.0)
    other = [0.0, *itertools.accumulate(others)]
    # best[i]: the minimal largest cost of the first i items, with the parts so far
    best = [0.0] + [float("inf")] * count
    cuts: list[list[int]] = []
    for _ in range(parts):
        fresh, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for begin in range(end):
                if other[end] - other[begin] > most:
                    continue
                worst = max(best[begin], total[end] - total[begin])
                if worst < fresh[end]:
                    fresh[end], cut[end] = worst, begin
        best = fresh
        cuts.append(cut)
    found, end = [], count
    for cut in reversed(cuts):
        found.append((cut[end], end))
        end = cut[end]
    return found[::-1]
