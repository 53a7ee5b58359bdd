"""Service times of the stages, measured from recent samples. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from multiworld.serve.scaling.demand import sample_at
from multiworld.serve.scaling.snapshot import Snapshot

SIMILAR_ROWS = 0.8
"""Ratio of mean batch sizes above which two batches count as about equally large."""

MIN_REQUESTS = 20
"""Minimum number of recent requests for a stage's measured times to count."""

Times = tuple[float, float, float]
"""Seconds per request, seconds per batch, and requests per batch."""


def times_of(
    snapshot: Snapshot, look_back_s: float, old: Sequence[Times | None]
) -> tuple[Times | None, ...]:
    """Return the service times by stage; ``old`` ones stay until there are new ones."""
    first = sample_at(snapshot.samples, snapshot.now - look_back_s)
    last = snapshot.samples[-1]
    step = min(1.0, snapshot.interval_s / look_back_s)
    found: list[Times | None] = []
    for k, stage in enumerate(snapshot.stages):
        before = old[k] if k < len(old) else None
        if before is None and stage.item_s is not None:
            before = stage.item_s, stage.item_s, 0.0
        one, other = first.stages[k], last.stages[k]
        requests, batches = other.requests - one.requests, other.batches - one.batches
        busy_s = other.busy_s - one.busy_s
        if requests >= MIN_REQUESTS and batches > 0 and busy_s > 0:
            now = busy_s / requests, busy_s / batches, requests / batches
            before = now if before is None else _smoothed(before, now, step)
        found.append(before)
    return tuple(found)


def _smoothed(before: Times, now: Times, step: float) -> Times:
    """Return the times, moved towards the new measurement by the share ``step``.

    A request takes longer in a small batch than in a large one, so adding replicas,
    which shrinks batches, must not make them look slower: a longer time counts only if
    its batches are about as large as before.
    """
    item_s, batch_s, rows = before
    is_slower = now[0] > item_s
    if is_slower and now[2] < SIMILAR_ROWS * rows:
        return item_s, batch_s + step * (now[1] - batch_s), rows
    return (
        item_s + step * (now[0] - item_s),
        batch_s + step * (now[1] - batch_s),
        now[2] if not is_slower or not rows else max(rows, now[2]),
    )
