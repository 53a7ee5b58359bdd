"""Batching of work at a replica."""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.replica.batches.batch_queue import APART_S, BatchQueue, Work


def work(
    number: int,
    *,
    group: Hashable = "g",
    rows: int = 1,
    at: float = 0.0,
    deadline: float = 100.0,
    is_isolated: bool = False,
    gateway: str = "r",
    via: dict[str, str] | None = None,
) -> Work:
    key = gateway, number, 1
    return Work(key, group, rows, deadline, at, is_isolated, via=via)


def numbers(batch: list[Work]) -> list[int]:
    return [w.key[1] for w in batch]


def test_batch_without_wait_takes_all_waiting_work() -> None:
    batcher = BatchQueue(4, 0.0)
    for number in range(3):
        batcher.add(work(number))
    assert numbers(batcher.take(0.0)) == [0, 1, 2]
    assert batcher.take(0.0) == []
    assert batcher.due_at() is None


def test_probe_is_taken_before_all_that_waits() -> None:
    batcher = BatchQueue(4, 0.0)
    for number in range(4):
        batcher.add(work(number, via={"1": "x"} if number in (1, 2) else None))
    assert numbers(batcher.take_probe()) == [1]
    assert numbers(batcher.take_probe()) == [2]
    assert batcher.take_probe() == []
    assert numbers(batcher.take(0.0)) == [0, 3]


def test_batch_when_full_then_the_rest_waits() -> None:
    """The limit counts rows, not requests."""
    batcher = BatchQueue(4, 0.0)
    for number, rows in enumerate((2, 1, 2, 1)):
        batcher.add(work(number, rows=rows))
    assert numbers(batcher.take(0.0)) == [0, 1]
    assert numbers(batcher.take(0.0)) == [2, 3]


def test_batch_with_wait_is_due_later_or_when_full() -> None:
    """The oldest work in the queue decides when a batch is due."""
    batcher = BatchQueue(2, 0.5)
    batcher.add(work(0, at=1.0))
    assert batcher.take(1.4) == []
    assert batcher.due_at() == 1.5
    batcher.add(work(1, at=1.4))
    assert numbers(batcher.take(1.4)) == [0, 1]
    batcher.add(work(2, at=2.0))
    assert numbers(batcher.take(2.5)) == [2]


def test_batch_when_groups_differ_then_one_at_a_time() -> None:
    batcher = BatchQueue(8, 0.0)
    for number, group in enumerate("abab"):
        batcher.add(work(number, group=group))
    assert numbers(batcher.take(0.0)) == [0, 2]
    assert numbers(batcher.take(0.0)) == [1, 3]


def test_suspect_runs_in_isolation_without_waiting() -> None:
    batcher = BatchQueue(8, 10.0)
    batcher.add(work(0, is_isolated=True))
    batcher.add(work(1))
    batcher.add(work(2, is_isolated=True))
    assert numbers(batcher.take(0.0)) == [0]
    assert batcher.take(0.0) == []
    assert numbers(batcher.take(10.0)) == [1]
    assert numbers(batcher.take(10.0)) == [2]


def test_cancelled_and_expired_work_is_removed() -> None:
    batcher = BatchQueue(8, 0.0)
    batcher.add(work(0))
    batcher.add(work(1, gateway="other"))
    batcher.add(work(2, deadline=5.0))
    batcher.add(work(3))
    first = batcher.cancel(("r", 0, 1))
    assert first is not None
    assert batcher.cancel(("r", 0, 1)) is None
    assert numbers(batcher.cancel_of("other")) == [1]
    assert numbers(batcher.expired(5.0)) == [2]
    assert numbers(batcher.take(5.0)) == [3]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.booleans()), max_size=30
    ),
    st.integers(4, 8),
)
def test_everything_runs_once_within_the_limits(
    wishes: list[tuple[str, int, bool]], limit: int
) -> None:
    batcher = BatchQueue(limit, 0.0)
    for number, (group, rows, is_isolated) in enumerate(wishes):
        batcher.add(work(number, group=group, rows=rows, is_isolated=is_isolated))
    seen: list[int] = []
    while batch := batcher.take(0.0):
        assert sum(w.rows for w in batch) <= limit
        assert len({w.group for w in batch}) == 1
        assert len(batch) == 1 or not any(w.is_isolated for w in batch)
        seen += numbers(batch)
    assert sorted(seen) == list(range(len(wishes)))


def test_batch_begins_with_the_probes_that_wait() -> None:
    """Queued work may need the replica that a probe makes ready."""
    batcher = BatchQueue(2, 0.0)
    for number in range(3):
        batcher.add(work(number))
    batcher.add(work(7, via={"1": "x"}))
    assert batcher.probes == 1
    assert numbers(batcher.take(0.0)) == [7, 0]
    assert batcher.probes == 0
    assert numbers(batcher.take(0.0)) == [1, 2]


def test_full_batch_does_not_wait_for_another_group() -> None:
    batcher = BatchQueue(2, 1.0)
    batcher.add(work(0, group="odd"))
    batcher.add(work(1))
    assert batcher.take(0.5) == []
    batcher.add(work(2))
    assert numbers(batcher.take(0.5)) == [1, 2]
    assert batcher.take(0.5) == []
    assert numbers(batcher.take(1.0)) == [0]


def test_tenant_whose_request_failed_is_batched_apart() -> None:
    """This lasts for a while, and the tenant pays for the batches its failure cost."""
    bad, good = Share("bad"), Share("good")

    def fill(batcher: BatchQueue) -> None:
        for number in range(8):
            share = bad if number % 2 else good
            batcher.add(structs.replace(work(number), share=share))

    batcher = BatchQueue(4, 0.0)
    fill(batcher)
    assert numbers(batcher.take(0.0)) == [0, 1, 2, 3]
    assert numbers(batcher.take(0.0)) == [4, 5, 6, 7]
    batcher.failed({bad}, 0.0, 5)
    fill(batcher)
    for number in range(8, 20):
        batcher.add(structs.replace(work(number), share=good))
    taken = [numbers(batcher.take(1.0)) for _ in range(5)]
    assert taken == [
        [0, 2, 4, 6],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
        [16, 17, 18, 19],
        [1, 3, 5, 7],
    ]
    fill(batcher)
    assert len({n % 2 for n in numbers(batcher.take(APART_S + 1.0))}) == 2
