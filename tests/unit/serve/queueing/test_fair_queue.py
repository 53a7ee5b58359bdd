"""Fair queueing by itself, and in every queue that uses it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.errors import OverloadedError
from multiworld.serve.gateway.requests.actions import Dispatch, Reject
from multiworld.serve.gateway.requests.events import (
    Connected,
    Received,
    Submitted,
    TableChanged,
    Withdrawn,
)
from multiworld.serve.gateway.requests.router import Router
from multiworld.serve.queueing.fair_queue import FairQueue, Share
from multiworld.serve.replica.batches.batch_queue import BatchQueue, Work
from multiworld.serve.replica.batches.forwarder import Forwarder
from multiworld.serve.wire.inference_messages import BatchBegun
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)
from tests.memory import objects_in
from tests.unit.inner_state import check_router

FLOOD, SELDOM = Share("flood"), Share("seldom")


def drained(queue: FairQueue[int]) -> list[int]:
    served = []
    while (key := queue.next()) is not None:
        queue.take(key)
        served.append(key)
    return served


@pytest.mark.parametrize("priority", [0, 1])
def test_tenant_before_all_others_leaves_their_shares_equal(priority: int) -> None:
    """Its requests come between any two of theirs."""
    queue = FairQueue[int]()
    first = Share("first", priority=priority)
    for number in range(50):
        queue.put(number, FLOOD, 1.0, number)
    for number in range(50, 60):
        queue.put(number, SELDOM, 1.0, number)
    served = []
    for number in range(1000, 1030):
        queue.put(number, first, 1.0, number)
        for _ in range(2):
            key = queue.next()
            assert key is not None
            queue.take(key)
            served.append(key)
    others = [key for key in served if key < 1000][:18]
    assert sum(key >= 50 for key in others) == 9


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.floats(0.5, 8.0), min_size=2, max_size=3
    ),
    st.lists(st.integers(1, 5), min_size=60, max_size=60),
)
def test_backlogged_tenants_get_their_weights(
    weights: dict[str, float], costs: list[int]
) -> None:
    """At any time, no tenant is more than a few pieces from its share."""
    queue: FairQueue[int] = FairQueue()
    pieces: dict[int, tuple[str, int]] = {}
    for number, cost in enumerate(costs * len(weights)):
        name = sorted(weights)[number % len(weights)]
        pieces[number] = name, cost
        queue.put(number, Share(name, weights[name]), cost, number)
    foreseen = list(queue.order())
    served = drained(queue)
    assert served == foreseen
    got: Counter[str] = Counter()
    left = Counter(name for name, _ in pieces.values())
    for number in served:
        if min(left.values()) <= 1:
            break
        name, cost = pieces[number]
        got[name] += cost
        left[name] -= 1
        used = [got[n] / weights[n] for n in weights]
        assert max(used) - min(used) <= 2 * 5 / min(weights.values())


def test_one_tenant_alone_is_served_in_order() -> None:
    """Order is by number, so that replays keep their place."""
    queue: FairQueue[int] = FairQueue()
    for number in (3, 4, 1, 2):
        queue.put(number, FLOOD, 1, number)
    queue.put(9, Share("x", 1.0, priority=1), 1, 9)
    assert list(queue.order()) == [9, 1, 2, 3, 4]
    assert drained(queue) == [9, 1, 2, 3, 4]
    assert len(queue) == 0


def test_idle_tenant_is_next_but_saves_up_nothing() -> None:
    """A tenant has no claim on time in which it sent nothing."""
    queue: FairQueue[int] = FairQueue()
    for number in range(100):
        queue.put(number, FLOOD, 1, number)
    for number in range(50):
        queue.take(number)
    for number in range(100, 103):
        queue.put(number, SELDOM, 1, number)
    order = drained(queue)
    places = [order.index(number) for number in range(100, 103)]
    assert places[0] <= 1
    assert places[2] <= 5  # one by one with the flood, not all before it


def test_withdrawn_work_costs_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(900):
        queue.put(number, FLOOD, 1, number)
    queue.put(900, FLOOD, 1, 900)
    for number in range(900):
        queue.drop(number)
    queue.put(901, SELDOM, 1, 901)
    queue.put(902, FLOOD, 1, 902)
    assert set(drained(queue)[:2]) == {900, 901}
    queue.drop(12345)


def test_work_of_no_rows_is_not_free() -> None:
    """Otherwise a tenant that sends it would always be next."""
    queue: FairQueue[int] = FairQueue()
    for number in range(20):
        queue.put(number, FLOOD, 0, number)
        queue.put(100 + number, SELDOM, 1, 100 + number)
    assert 8 <= sum(number >= 100 for number in drained(queue)[:20]) <= 12


class Scanned:
    """The order of service by its definition: a scan of all tenants for each piece."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[Share, float, int]] = {}
        self.tenants: dict[str, None] = {}
        self._now = defaultdict[int, float](float)  # by priority
        self._ends = dict[tuple[int, str], float]()

    def put(self, key: int, share: Share, cost: float, number: int) -> None:
        self.drop(key)
        self.waiting[key] = share, max(cost, 1.0), number
        self.tenants.setdefault(share.tenant)

    def drop(self, key: int) -> None:
        share, *_ = self.waiting.pop(key, (None,))
        if share and not any(s.tenant == share.tenant for s, *_ in self._pieces()):
            del self.tenants[share.tenant]

    def _pieces(self) -> list[tuple[Share, float, int]]:
        return list(self.waiting.values())

    def next(self) -> int | None:
        """Return the next piece; ties go to the tenant that began to wait first."""
        firsts = []
        for tenant in self.tenants:
            its = {k: p for k, p in self.waiting.items() if p[0].tenant == tenant}
            key = min(its, key=lambda k: its[k][2])
            priority = its[key][0].priority
            end = self._ends.get((priority, tenant), 0.0)
            start = max(self._now[priority], end)
            firsts.append((-priority, start, its[key][2], key))
        return min(firsts, key=lambda first: first[:3])[3] if firsts else None

    def take(self, key: int) -> None:
        share, cost, _ = self.waiting[key]
        whose = share.priority, share.tenant
        now = max(self._now[share.priority], self._ends.get(whose, 0.0))
        self._now[share.priority] = now
        self._ends[whose] = now + cost / share.weight
        self.drop(key)


SHARES = st.builds(
    Share, st.sampled_from("abcde"), st.sampled_from((0.5, 1.0, 3.0)), st.integers(0, 2)
)
"""Shares of tenants whose work has several priorities and weights."""


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), SHARES, st.integers(0, 4), st.integers(0, 9)),
            st.tuples(st.just("drop"), st.integers(0, 60)),
            st.tuples(st.just("take"), st.integers(0, 60)),
            st.just(("next",)),
        ),
        max_size=60,
    )
)
def test_order_is_that_of_a_look_at_all_tenants(steps: list[tuple[Any, ...]]) -> None:
    """Pieces of several tenants may have the same number; any piece may be served."""
    queue, scanned = FairQueue[int](), Scanned()
    for key, step in enumerate(steps):
        match step:
            case "put", share, cost, number:
                number += 10 * key if share.tenant in scanned.tenants else 0
                for each in (queue, scanned):
                    each.put(key, share, cost, number)
            case "drop", gone:
                queue.drop(gone)
                scanned.drop(gone)
            case "take", served if served in scanned.waiting:
                queue.take(served)
                scanned.take(served)
            case _:
                assert queue.next() == scanned.next()
                if (found := queue.next()) is not None:
                    queue.take(found)
                    scanned.take(found)
        assert queue.next() == scanned.next()
    rest = list(queue.order())
    assert drained(queue) == rest
    for key in rest:
        assert scanned.next() == key
        scanned.take(key)


def test_finish_tags_of_idle_tenants_are_dropped() -> None:
    """Memory is bounded, but pruning does not run for every piece."""
    queue: FairQueue[int] = FairQueue()
    for number in range(5000):
        queue.put(number, Share(f"t{number}"), 1, number)
        queue.take(number)
        queue.put(-1, FLOOD, 1, -1)
        queue.take(-1)
    # Two objects for each tenant whose tag it keeps.
    assert objects_in(queue) < 2 * 3000 + 100


# The queue of a router.


def router(limit: int, window: int) -> Router:
    found = Router(lambda: 0.0)
    route = Route("1", {"1": 1}, max_queued_requests=limit, max_ongoing_requests=window)
    replica = Replica("r", "m", "1", 0, ReplicaState.READY)
    found.handle(
        TableChanged(RoutingTable(1, ("g",), {"m": route}, {"r": replica})), 0.0
    )
    found.handle(Connected("r"), 0.0)
    return found


def submit(found: Router, number: int, share: Share) -> list[object]:
    job = Submitted(number=number, model="m", deadline_at=1e9, share=share)
    return list(found.handle(job, 0.0))


def test_flood_waits_behind_a_request_of_another_tenant() -> None:
    """Work at the replica stays there; only queued work is reordered."""
    found = router(limit=100, window=4)
    for number in range(50):
        submit(found, number, FLOOD)
    assert submit(found, 50, SELDOM) == []
    actions = found.handle(Withdrawn(0), 0.0)
    (sent,) = [a for a in actions if isinstance(a, Dispatch)]
    assert sent.attempt[0] in (4, 50)
    actions = found.handle(Withdrawn(1), 0.0)
    sent_too = [a for a in actions if isinstance(a, Dispatch)]
    assert 50 in (sent.attempt[0], sent_too[0].attempt[0])
    check_router(found)


def test_full_queue_has_room_for_others_up_to_their_share() -> None:
    found = router(limit=10, window=2)
    refused = [
        a for n in range(20) for a in submit(found, n, FLOOD) if isinstance(a, Reject)
    ]
    assert len(refused) == 8
    assert isinstance(refused[0].error, OverloadedError)
    others = [submit(found, 100 + n, SELDOM) for n in range(20)]
    accepted = [not a for a in others]
    assert accepted == [True] * 5 + [False] * 15
    # A different weight does not make it a different tenant: its share is used up.
    assert submit(found, 150, Share("seldom", 0.99))
    for number in range(200, 300):  # many tenants, one after the other
        for again in range(3):
            submit(found, 3 * number + again, Share(f"t{number}"))
    assert found.waiting("m") <= 2 * 10 + 100
    check_router(found)


# The queue of a replica.


def work(number: int, share: Share, rows: int = 1) -> Work:
    return Work(("r", number, 1), "g", rows, 1e9, float(number), share=share)


def test_batch_takes_work_of_all_tenants() -> None:
    batcher = BatchQueue(4, 0.0)
    for number in range(30):
        batcher.add(work(number, FLOOD))
    first = batcher.take(100.0)
    assert [w.key[1] for w in first] == [0, 1, 2, 3]
    batcher.add(work(99, SELDOM))
    assert 99 in [w.key[1] for w in batcher.take(100.0)]
    assert [w.key[1] for w in batcher.cancel_of("r")][:1]
    assert len(batcher) == 0


def test_forwarder_sends_in_fair_order() -> None:
    forwarding = Forwarder(1, 2, lambda: 0.0)
    forwarding.table_changed([Replica("n", "m", "1", 1, ReplicaState.READY)])
    forwarding.connected("n")
    pieces = [Work(("r", n, 1), None, 1, 1e9, 0.0, share=FLOOD) for n in range(20)]
    assert len(forwarding.hand(pieces, 0.0)["n"]) == 2
    late = Work(("r", 99, 1), None, 1, 1e9, 0.0, share=SELDOM)
    assert forwarding.hand([late], 0.0) == {}
    forwarding.begun("n", [("r", 0, 1), ("r", 1, 1)])
    sent = forwarding.hand([], 0.0)["n"]
    assert 99 in [piece.key[1] for piece in sent]
    assert len(forwarding) == 17
    forwarding.cancel_of("r")
    assert len(forwarding) == 0


@pytest.mark.parametrize("seed", range(3))
def test_priority_comes_first_in_a_router(seed: int) -> None:
    found = router(limit=100, window=1)
    submit(found, 0, FLOOD)
    for number in range(1, 5):
        submit(found, number + 10 * seed, FLOOD)
    submit(found, 77, Share("vip", 1.0, priority=2))
    actions = found.handle(Received("r", BatchBegun(((0, 1),), False)), 0.0)
    assert not [a for a in actions if isinstance(a, Dispatch)]
    (sent,) = [a for a in found.handle(Withdrawn(0), 0.0) if isinstance(a, Dispatch)]
    assert sent.attempt[0] == 77
