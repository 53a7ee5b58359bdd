"""Cuts of a chain of layers, or of measured parts, into stages. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

# Maximum slowdown of the slowest stage, as a factor, if a cut leaves memory for more
# sequences.
SLACK = 1.05


@dataclass(frozen=True, slots=True)
class Span:
    """Layers ``begin`` to ``end`` (exclusive) of a model with ``count`` layers."""

    begin: int
    end: int
    count: int

    @property
    def is_first(self) -> bool:
        """True if the span includes the embeddings."""
        return self.begin == 0

    @property
    def is_last(self) -> bool:
        """True if the span includes the modules after the last layer."""
        return self.end == self.count


def chain_partition(
    costs: Sequence[float],
    parts: int,
    within: tuple[Sequence[float], float] | None = None,
) -> list[tuple[int, int]]:
    """Cut a chain so that the maximum cost of a part is minimal.

    Returns (first, end) of each part. Min-max chain partition by dynamic programming
    over (items, parts), in O(L² K) for L items and K parts. ``within``: another cost of
    each item, and its maximum per part, which must be satisfiable.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise ValueError(f"{count} layers cannot be cut into {parts} stages")
    total = [0.0, *itertools.accumulate(costs)]
    others, limit = within or ([0.0] * count, 0.0)
    other = [0.0, *itertools.accumulate(others)]
    # ``best[i]`` is the largest cost of a part, in the best division of the first i
    # items into the parts so far.
    best = [0.0] + [float("inf")] * count
    cuts: list[list[int]] = []
    for _ in range(parts):
        fresh, cut = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for begin in range(end):
                if other[end] - other[begin] > limit:
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


@dataclass(frozen=True, slots=True)
class Part:
    """Costs of one part: seconds per batch, and KV bytes per token."""

    seconds: float
    kv_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """A chain of parts, cut into stages that start with the parts ``begins``."""

    begins: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def bottleneck(self) -> int:
        """Number of the slowest stage."""
        return max(range(len(self.seconds)), key=self.seconds.__getitem__)


def cut(parts: Sequence[Part], stages: int) -> Cut:
    """Cut a chain of parts so that the slowest stage is as fast as possible."""
    seconds = [part.seconds for part in parts]
    spans = chain_partition(seconds, stages)
    # All stages have the same memory for KV blocks, so the stage with the most bytes
    # per token limits the number of sequences. Among cuts of about equal speed,
    # minimise these bytes.
    if any(part.kv_bytes for part in parts):
        limit = SLACK * max(sum(seconds[begin:end]) for begin, end in spans)
        memory = [part.kv_bytes for part in parts]
        spans = chain_partition(memory, stages, within=(seconds, limit))
    return Cut(
        tuple(begin for begin, _ in spans),
        tuple(sum(seconds[begin:end]) for begin, end in spans),
    )
