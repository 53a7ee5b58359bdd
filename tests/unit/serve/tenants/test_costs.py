"""The cost of a piece of work in fair order, whatever the number of waiting tenants."""

from __future__ import annotations

from functools import partial

import pytest

from multiworld.serve.queueing.fair_queue import FairQueue, Share
from multiworld.serve.replica.batches.batch_queue import BatchQueue, Work
from tests.lines import lines_of


def queue_of(tenants: int) -> FairQueue[int]:
    queue: FairQueue[int] = FairQueue()
    for number in range(2 * tenants):
        share = Share(f"t{number % tenants}", 1.0 + number % 3, number % 2)
        queue.put(number, share, 1 + number % 5, number)
    return queue


def serve(queue: FairQueue[int]) -> None:
    while (key := queue.next()) is not None:
        queue.take(key)
        queue.put(-1, Share("late"), 1, -1)
        queue.drop(-1)


def lines_per_piece(tenants: int) -> tuple[float, float]:
    """Return the lines of code to serve a piece, and to foresee its place."""
    queue = queue_of(tenants)
    foreseen = lines_of(lambda: list(queue.order())) / len(queue)
    return lines_of(partial(serve, queue)) / (2 * tenants), foreseen


def test_work_for_a_piece_does_not_grow_with_the_tenants_that_wait() -> None:
    few, many = lines_per_piece(20), lines_per_piece(1000)
    assert many == pytest.approx(few, rel=0.2)


def lines_of_batch(tenants: int) -> int:
    """Return the lines of code for a batch of four, while others wait."""
    queue = BatchQueue(4, 0.0)
    for number in range(tenants):
        share = Share(f"t{number}")
        queue.add(Work(("g", number, 0), "group", 1, 1e9, 0.0, share=share))
    queue.take(1.0)  # the first batch also records whose turn has come
    lines = lines_of(partial(queue.take, 1.0))
    assert len(queue) == tenants - 8
    return lines


def test_work_for_a_batch_does_not_grow_with_the_tenants_that_wait() -> None:
    assert lines_of_batch(1000) < lines_of_batch(20) + 20
