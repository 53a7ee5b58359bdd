"""Which layers a stage owns. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def chain_partition(costs: Sequence[float], parts: int) -> list[tuple[int, int]]:
    """Cut a chain into contiguous parts so that the most expensive one is cheapest.

    Min-max chain partition by dynamic programming over (items, parts), O(L² K).

    Args:
        costs: Of each item, in order.
        parts: How many; no more than there are items.

    Returns:
        Begin and end of each part.

    Raises:
        ValueError: There are fewer items than parts.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(f"{count} layers cannot be cut into {parts} stages")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[i]: the least maximum for the first i items in so many parts
    best = [0.0] + [float("inf")] * count
    cuts: list[list[int]] = []
    for _ in range(parts):
        fresh, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for begin in range(end):
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
