"""How long stages compute, from what they have computed lately. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from multiworld.serve.scaling.demand import sample_at
from multiworld.serve.scaling.snapshot import Snapshot

SIMILAR_ROWS = 0.8
"""Batches of such a share of the size of others are about as large."""

MIN_REQUESTS = 20
"""Requests that a stage must have computed lately for its times to be believed."""

Times = tuple[float, float, float]
"""Seconds of a request, seconds of a batch, requests in a batch."""


def times_of(
    snapshot: Snapshot, look_back_s: float, old: Sequence[Times | None]
) -> tuple[Times | None, ...]:
    """Return how long each stage computes; None where it is not known.

    What was found before stays while too few requests come to tell.
    """
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
    """Return times that follow what is measured slowly: a busy machine scatters.

    A request in a small batch takes longer than it would in a large one. That more
    replicas have smaller batches does not make them slower: so a longer time counts
    only from batches about as large as those of the shorter one.
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
