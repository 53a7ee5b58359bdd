"""The router: replicas that answer, die, fall silent, or report too late."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.errors import (
    DeadlineExceededError,
    ModelFailedError,
    NoReplicaError,
    OverloadedError,
    QuarantinedError,
    RequestPoisonedError,
    ServeError,
    UnknownModelError,
)
from multiworld.serve.gateway.requests.actions import (
    Action,
    Cancel,
    Deliver,
    Dispatch,
    Reject,
    Replayed,
)
from multiworld.serve.gateway.requests.events import (
    Answered,
    Connected,
    Event,
    Lost,
    Received,
    Silent,
    Submitted,
    TableChanged,
    TenantQuarantined,
    Ticked,
    Withdrawn,
)
from multiworld.serve.gateway.requests.router import Router
from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.routing.refusals import OutdatedError
from multiworld.serve.wire.inference_messages import (
    Attempt,
    BatchBegun,
    WorkDropped,
    WorkFailed,
    WorkReturned,
    WorkStuck,
)
from multiworld.serve.wire.protocol import RemoteError
from multiworld.serve.wire.routing_table import (
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
)
from tests.lines import lines_of
from tests.unit.inner_state import check_router

READY = ReplicaState.READY

Attempts = tuple[Attempt, ...]


def begun(replica: str, attempts: Attempts, is_isolated: bool) -> Received:
    return Received(replica, BatchBegun(attempts, is_isolated))


def dropped(attempts: Attempts, stage: int, *, is_returned: bool = False) -> Received:
    kind = WorkReturned if is_returned else WorkDropped
    return Received("a", kind(attempts, stage))


def stuck(attempts: Attempts) -> Received:
    return Received("a", WorkStuck(attempts, 1))


def failed(attempt: Attempt, error: ServeError) -> Received:
    return Received("a", WorkFailed(attempt, RemoteError.of(error)))


def table(
    *stages: Sequence[str],
    starting: Sequence[str] = (),
    queue: int = 100,
    ongoing: int = 100,
    version: str = "1",
) -> RoutingTable:
    replicas = {
        name: Replica(
            name,
            "m",
            version,
            stage,
            ReplicaState.STARTING if name in starting else READY,
        )
        for stage, names in enumerate(stages)
        for name in names
    }
    route = Route(version, {version: len(stages)}, queue, ongoing)
    return RoutingTable(1, ("g",), {"m": route}, replicas)


class Run:
    def __init__(self, given: RoutingTable) -> None:
        self.router = Router(random.Random(3).random)
        self.now = 0.0
        self.handle(TableChanged(given))
        for name in given.replicas:
            self.handle(Connected(name))

    def handle(self, event: Event) -> list[Action]:
        actions = self.router.handle(event, self.now)
        check_router(self.router)
        return actions

    def submit(
        self, number: int, deadline_at: float = 100.0, tenant: str = ""
    ) -> list[Action]:
        job = Submitted(
            number=number, model="m", deadline_at=deadline_at, share=Share(tenant)
        )
        return self.handle(job)


def dispatched(actions: list[Action]) -> list[tuple[str, int, int, bool]]:
    return [
        (a.replica, *a.attempt, a.is_isolated)
        for a in actions
        if isinstance(a, Dispatch)
    ]


def rejected(actions: list[Action]) -> dict[int, type[Exception]]:
    return {a.number: type(a.error) for a in actions if isinstance(a, Reject)}


def test_request_goes_through_and_is_delivered_once() -> None:
    run = Run(table(["a"], ["b"]))
    assert dispatched(run.submit(1)) == [("a", 1, 1, False)]
    run.handle(begun("a", ((1, 1),), False))
    run.handle(begun("b", ((1, 1),), False))
    assert run.router.locations(1) == ["b"]
    assert run.handle(Answered((1, 1))) == [Deliver(1)]
    assert run.handle(Answered((1, 1))) == []
    assert len(run.router) == 0
    assert run.router.load() == {"a": 0, "b": 0}


def test_the_only_replica_with_room_is_found() -> None:
    """The two random candidates may both be full."""
    names = [f"r{number}" for number in range(50)]
    run = Run(table(names, ongoing=1))
    assert {dispatched(run.submit(n))[0][0] for n in range(50)} == set(names)
    assert not dispatched(run.submit(50))


@pytest.mark.parametrize("session", [None, "a"])
def test_work_for_a_request_does_not_grow_with_the_replicas(
    session: str | None,
) -> None:
    """This holds while the random candidates have room."""

    def lines(count: int) -> int:
        run = Run(table([f"r{number}" for number in range(count)]))
        first, other = (
            Submitted(number=n, model="m", deadline_at=9.0, session=session)
            for n in (1, 2)
        )
        run.handle(first)
        return lines_of(lambda: run.router.handle(other, 0.0))

    assert lines(1000) < lines(10) + 10


def test_requests_of_a_later_stage_that_was_disconnected_are_hedged() -> None:
    """Its process lives, so the stage before reports nothing as dropped."""
    run = Run(table(["a"], ["b", "c"]))
    assert dispatched(run.submit(1)) == [("a", 1, 1, False)]
    run.handle(begun("a", ((1, 1),), False))  # b is quick, and does not report
    run.handle(Lost("b"))
    # Meanwhile, b refuses work of this gateway, so that it is returned.
    assert dispatched(run.submit(2)) == [("a", 2, 1, False)]
    assert dispatched(run.handle(Connected("b"))) == [("a", 1, 2, False)]
    assert dispatched(run.handle(Connected("b"))) == []
    assert Deliver(1) in run.handle(Answered((1, 2)))


def test_request_that_has_passed_the_disconnected_replica_is_not_hedged() -> None:
    run = Run(table(["a"], ["b"], ["c"]))
    run.submit(1)
    run.handle(begun("a", ((1, 1),), False))
    run.handle(Lost("b"))
    run.handle(begun("c", ((1, 1),), False))
    assert dispatched(run.handle(Connected("b"))) == []


def test_finished_attempt_is_not_suspected_when_its_replica_dies_later() -> None:
    """Another request's poison does not count against one that was done before."""
    run = Run(table(["a", "b"], ["c"]))
    run.submit(1)
    for _ in range(2):  # now a suspect: two replicas died with it queued
        at = run.router.locations(1)[0]
        run.handle(Lost(at))
        run.handle(Connected(at))
    attempt = 3
    for poison in (50, 51, 52):
        at = run.router.locations(1)[0]
        run.handle(begun(at, ((1, attempt),), True))
        # It is done there and waits for the next stage; then the poison is begun.
        run.handle(begun(at, ((poison, 1),), True))
        actions = run.handle(Lost(at))
        assert 1 not in rejected(actions)
        run.handle(Connected(at))
        attempt += 1
    assert run.router.locations(1)


def _all_suspected(run: Run, deadly: Sequence[int], others: Sequence[int]) -> None:
    """Kill the only replica, "a", while all of these are in its batch."""
    for number in deadly:
        run.submit(number, tenant="deadly")
    for number in others:
        run.submit(number, tenant="other")
    run.handle(begun("a", tuple((n, 1) for n in (*deadly, *others)), False))
    run.handle(Lost("a"))


def _solos(run: Run, actions: list[Action]) -> list[int]:
    """Compute isolated requests until none is sent; those below 4 kill the replica."""
    order = []
    while solos := [sent for sent in dispatched(actions) if sent[-1]]:
        ((_, number, attempt, _),) = solos
        order.append(number)
        run.handle(begun("a", ((number, attempt),), True))
        if number < 4:
            run.handle(Lost("a"))
            actions = run.handle(Connected("a"))
        else:
            actions = run.handle(Answered((number, attempt)))
    return order


def test_tenant_of_a_poison_request_is_isolated_behind_other_suspects() -> None:
    """Suspects of other tenants go first; isolation ends after ``ISOLATION_S``."""
    run = Run(table(["a"]))
    _all_suspected(run, [1], [10])
    assert sorted(_solos(run, run.handle(Connected("a")))) == [1, 1, 10]
    assert [sent[-1] for sent in dispatched(run.submit(2, tenant="deadly"))] == [True]
    assert [sent[-1] for sent in dispatched(run.submit(11, tenant="other"))] == [False]
    assert not dispatched(run.submit(3, tenant="deadly"))
    run.handle(begun("a", ((11, 1), (2, 1)), False))
    run.handle(Lost("a"))
    order = _solos(run, run.handle(Connected("a")))
    assert order.index(11) < order.index(3)
    assert order.count(2) == order.count(3) == 2
    run.now += 61.0
    (sent,) = dispatched(run.submit(12, tenant="deadly"))
    assert not sent[-1], "isolation has ended"


def test_quarantine_rejects_the_waiting_requests_of_a_tenant() -> None:
    run = Run(table(["a"]))
    _all_suspected(run, [1, 2], [3, 4])
    run.handle(Connected("a"))
    run.handle(Lost("a"))
    run.submit(7, tenant="deadly")
    assert rejected(run.handle(TenantQuarantined("deadly", "other model"))) == {}
    waiting = {n for n in (1, 2, 7) if run.router.locations(n) == ["waiting"]}
    assert waiting
    found = rejected(run.handle(TenantQuarantined("deadly", "m")))
    assert found == dict.fromkeys(waiting, QuarantinedError)
    assert waiting == {1, 2, 7}
    assert run.router.locations(3)
    assert run.router.locations(4)
    assert rejected(run.handle(TenantQuarantined("deadly", "m"))) == {}


def test_request_queued_at_a_lost_replica_is_replayed_at_once() -> None:
    """It did not cause the loss; after a second loss it is a suspect."""
    run = Run(table(["a", "b"], ["c"]))
    first = dispatched(run.submit(1))[0][0]
    other = "b" if first == "a" else "a"
    actions = run.handle(Lost(first))
    assert dispatched(actions) == [(other, 1, 2, False)]
    assert any(isinstance(a, Replayed) for a in actions)
    run.handle(Connected(first))
    assert dispatched(run.handle(Lost(other))) == [(first, 1, 3, True)]


def test_requests_of_a_lost_batch_are_replayed_in_isolation_one_at_a_time() -> None:
    run = Run(table(["a", "b"]))
    for number in (1, 2, 3):
        run.submit(number)
    held = {n: run.router.locations(n)[0] for n in (1, 2, 3)}
    victim = max("ab", key=lambda name: sum(at == name for at in held.values()))
    computed = [n for n, at in held.items() if at == victim]
    assert len(computed) == 2
    run.handle(begun(victim, tuple((n, 1) for n in computed), False))
    other = "b" if victim == "a" else "a"
    assert dispatched(run.handle(Lost(victim))) == [(other, computed[0], 2, True)]
    assert dispatched(run.submit(9)) == [(other, 9, 1, False)]
    run.handle(begun(other, ((computed[0], 2),), True))
    after = run.handle(Answered((computed[0], 2)))
    assert dispatched(after) == [(other, computed[1], 2, True)]


@pytest.mark.parametrize("done", [0, 1])
def test_first_loss_of_many_computed_together_makes_no_suspects(done: int) -> None:
    """They are replayed together; the second loss makes suspects."""
    run = Run(table(["a"]))
    numbers = range(8 + done)
    for number in numbers:
        run.submit(number)
    run.handle(begun("a", tuple((n, 1) for n in numbers), False))
    for number in range(done):
        run.handle(Answered((number, 1)))
    run.handle(Lost("a"))
    sent = dispatched(run.handle(Connected("a")))
    assert sorted(sent) == [("a", n, 2, False) for n in numbers[done:]]
    run.handle(begun("a", tuple((n, 2) for n in numbers[done:]), False))
    run.handle(Lost("a"))
    assert dispatched(run.handle(Connected("a"))) == [("a", done, 3, True)]


def test_first_loss_of_few_beside_queued_ones_makes_suspects() -> None:
    run = Run(table(["a"]))
    for number in range(20):
        run.submit(number)
    run.handle(begun("a", tuple((n, 1) for n in range(7)), False))
    run.handle(Lost("a"))
    sent = dispatched(run.handle(Connected("a")))
    assert sorted(sent) == [("a", n, 2, n == 0) for n in (0, *range(7, 20))]


def test_request_in_isolation_at_two_losses_is_poison() -> None:
    run = Run(table(["a", "b", "c", "d"]))
    run.submit(1)
    for strike in range(3):
        (at,) = run.router.locations(1)
        run.handle(begun(at, ((1, strike + 1),), strike > 0))
        actions = run.handle(Lost(at))
        if strike < 2:
            assert rejected(actions) == {}
    assert rejected(actions) == {1: RequestPoisonedError}
    assert len(run.router) == 0


def test_queue_is_bounded_and_replays_are_not_refused() -> None:
    """Only requests that were never sent count."""
    run = Run(table(["a"], queue=1, ongoing=1))
    run.submit(1)
    run.submit(2)
    assert run.router.waiting("m") == 1
    actions = run.submit(3)
    assert rejected(actions) == {3: OverloadedError}
    run.handle(Lost("a"))  # 1 waits again, but it is not a new request
    assert rejected(run.submit(4)) == {4: OverloadedError}
    resumed = Submitted(number=5, model="m", deadline_at=100.0, is_resumed=True)
    assert not rejected(run.handle(resumed))  # another gateway has admitted it
    assert dispatched(run.handle(Connected("a"))) == [("a", 1, 2, False)]


def test_nothing_is_sent_while_a_later_stage_has_no_replica() -> None:
    """At their deadline, requests that wait for a replica get 503, not 504."""
    run = Run(table(["a"], ["b"]))
    run.handle(Lost("b"))
    assert dispatched(run.submit(1, deadline_at=5.0)) == []
    assert dispatched(run.submit(2)) == []
    run.now = 5.0
    assert rejected(run.handle(Ticked())) == {1: NoReplicaError}
    assert dispatched(run.handle(Connected("b"))) == [("a", 2, 1, False)]


@pytest.mark.parametrize("how", ["deadline", "withdrawn"])
@pytest.mark.parametrize("ongoing", [1, 100])
def test_replica_that_computes_abandoned_requests_gets_work_last(
    how: str, ongoing: int
) -> None:
    """It is last until it begins another batch, or reports the end of this one."""
    run = Run(table(["a", "b"], ongoing=ongoing))
    run.submit(1, deadline_at=5.0)
    (busy,) = run.router.locations(1)
    free = "b" if busy == "a" else "a"
    run.handle(begun(busy, ((1, 1),), False))
    run.now = 5.0
    run.handle(Ticked() if how == "deadline" else Withdrawn(1))
    for number in range(2, 12):
        assert dispatched(run.submit(number)) == [(free, number, 1, False)]
        run.handle(Answered((number, 1)))
    run.submit(20)
    assert dispatched(run.submit(21)) == [(busy, 21, 1, False)] or ongoing > 1
    for number in (20, 21):
        run.handle(Withdrawn(number))
    run.handle(begun(busy, (), False))
    at = set()
    for number in range(30, 60):
        at |= {replica for replica, *_ in dispatched(run.submit(number))}
        run.handle(Answered((number, 1)))
    assert at == {"a", "b"}


def test_request_of_a_removed_model_is_not_replayed() -> None:
    """It was in flight when the model was removed; no other replica can take it."""
    run = Run(table(["a"]))
    run.submit(1)
    run.handle(TableChanged(RoutingTable(2, ("g",), {}, {})))
    assert rejected(run.handle(Lost("a"))) == {1: UnknownModelError}
    assert len(run.router) == 0


@pytest.mark.parametrize("is_silent_first", [False, True])
def test_hedged_request_of_a_removed_model_is_not_replayed(
    is_silent_first: bool,
) -> None:
    run = Run(table(["a"]))
    run.submit(1)
    steps: list[Event] = [
        Silent("a", True),
        TableChanged(RoutingTable(2, ("g",), {}, {})),
    ]
    for step in steps if is_silent_first else steps[::-1]:
        run.handle(step)
    assert rejected(run.handle(Lost("a"))) == {1: UnknownModelError}
    assert len(run.router) == 0


@pytest.mark.parametrize("is_known", [False, True])
def test_replica_lost_while_draining_makes_no_request_a_suspect(
    is_known: bool,
) -> None:
    """The service ends one that drains for too long; the table may lack it by then."""
    given = table(["a", "b", "c", "d"])
    run, replicas = Run(given), dict(given.replicas)
    run.submit(1)
    for attempt in range(1, 4):
        (at,) = run.router.locations(1)
        run.handle(begun(at, ((1, attempt),), False))
        replicas[at] = replace(replicas[at], state=ReplicaState.DRAINING)
        run.handle(TableChanged(replace(given, replicas={**replicas})))
        if not is_known:
            del replicas[at]
            run.handle(TableChanged(replace(given, replicas={**replicas})))
        ((_, _, _, is_isolated),) = dispatched(run.handle(Lost(at)))
        assert not is_isolated
    run.handle(Answered((1, 4)))
    # The replica is back under its name, and its loss counts again.
    run.handle(TableChanged(table(["a"])))
    run.handle(Connected("a"))
    run.submit(2)
    run.handle(begun("a", ((2, 1),), False))
    run.handle(Lost("a"))
    assert dispatched(run.handle(Connected("a"))) == [("a", 2, 2, True)]


def test_deadline_ends_a_request_in_flight() -> None:
    run = Run(table(["a"]))
    run.submit(1, deadline_at=5.0)
    run.now = 5.0
    actions = run.handle(Ticked())
    assert rejected(actions) == {1: DeadlineExceededError}
    assert Cancel("a", (1, 1)) in actions


def test_withdrawn_request_is_cancelled_where_it_is() -> None:
    run = Run(table(["a"], ongoing=1))
    run.submit(1)
    run.submit(2)
    assert run.handle(Withdrawn(2)) == []
    assert run.handle(Withdrawn(1)) == [Cancel("a", (1, 1))]
    assert len(run.router) == run.router.waiting("m") == 0


def test_silent_replica_gets_nothing_and_its_work_is_hedged() -> None:
    run = Run(table(["a", "b"]))
    run.submit(1)
    (at,) = run.router.locations(1)
    other = "b" if at == "a" else "a"
    assert dispatched(run.handle(Silent(at, True))) == [(other, 1, 2, False)]
    assert dispatched(run.handle(Silent(at, True))) == []  # it is hedged already
    assert dispatched(run.submit(2)) == [(other, 2, 1, False)]
    actions = run.handle(Answered((1, 1)))
    assert actions == [Deliver(1), Cancel(other, (1, 2))]


def test_replica_that_is_heard_again_gets_nothing_twice() -> None:
    """Its requests were to be hedged, and there was no other replica."""
    run = Run(table(["a"]))
    for number in range(8):
        run.submit(number)
    run.handle(Silent("a", True))
    assert dispatched(run.handle(Silent("a", False))) == []
    run.handle(begun("a", tuple((n, 1) for n in range(8)), False))
    run.handle(Lost("a"))
    sent = dispatched(run.handle(Connected("a")))
    assert sorted(sent) == [("a", n, 2, False) for n in range(8)], "no suspects"


def test_hedged_request_outlives_either_replica() -> None:
    run = Run(table(["a", "b"]))
    run.submit(1)
    (at,) = run.router.locations(1)
    other = "b" if at == "a" else "a"
    run.handle(Silent(at, True))
    assert dispatched(run.handle(Lost(at))) == []
    assert dispatched(run.handle(Lost(other))) == []  # no replica is left
    assert dispatched(run.handle(Connected(at))) != []


def test_request_stuck_at_a_later_stage_is_hedged_through_the_same_first_stage() -> (
    None
):
    run = Run(table(["a"], ["b", "c"]))
    run.submit(1)
    run.handle(begun("a", ((1, 1),), False))
    assert dispatched(run.handle(stuck(((1, 1),)))) == [("a", 1, 2, False)]
    assert dispatched(run.handle(stuck(((1, 1), (1, 2))))) == []


def test_dropped_work_is_sent_again_without_suspicion() -> None:
    run = Run(table(["a", "b"]))
    run.submit(1)
    run.handle(begun(run.router.locations(1)[0], ((1, 1),), False))
    assert run.handle(dropped(((1, 1),), 0)) == []  # it had arrived
    (sent,) = dispatched(run.handle(dropped(((1, 1),), 1)))
    assert sent[1:] == (1, 2, False)
    run.handle(begun(sent[0], ((1, 2),), False))
    (again,) = dispatched(run.handle(Lost(sent[0], is_polite=True)))
    assert again[1:] == (1, 3, False)


def test_returned_work_is_never_suspected() -> None:
    run = Run(table(["a"], ["b"]))
    run.submit(1)
    for attempt in range(1, 6):
        run.handle(begun("a", ((1, attempt),), False))
        returned = dropped(((1, attempt),), 1, is_returned=True)
        assert dispatched(run.handle(returned)) == [("a", 1, attempt + 1, False)]


def test_note_of_a_lost_replica_counts_as_its_loss() -> None:
    """A note may arrive after the loss of the replica that it is about."""
    run = Run(table(["a"], ["b", "c"]))
    run.submit(1)
    run.handle(Lost("b"))
    actions = run.handle(begun("b", ((1, 1),), False))
    assert dispatched(actions) == [("a", 1, 2, True)]


def test_failure_of_the_model_is_the_answer() -> None:
    run = Run(table(["a"]))
    run.submit(1)
    actions = run.handle(failed((1, 1), ModelFailedError("no")))
    assert rejected(actions) == {1: ModelFailedError}
    assert len(run.router) == 0


def test_probe_skips_the_queue_and_may_use_a_starting_replica() -> None:
    """Queued requests may wait for the replica that the probe makes ready."""
    run = Run(table(["a"], ["b"], starting=["a"]))
    assert dispatched(run.submit(1)) == []
    probe = Submitted(number=2, model="m", deadline_at=9.0, via={0: "a"})
    assert dispatched(run.handle(probe)) == [("a", 2, 1, False)]


def test_new_version_gets_unsent_requests() -> None:
    run = Run(table(["a"], ongoing=1))
    run.submit(1)
    run.submit(2)
    both = table(["z"], version="2")
    old = table(["a"])
    route = Route("2", {"1": 1, "2": 1}, 100, 1)
    merged = RoutingTable(2, ("g",), {"m": route}, {**old.replicas, **both.replicas})
    run.handle(TableChanged(merged))
    assert dispatched(run.handle(Connected("z"))) == [("z", 2, 1, False)]
    assert run.handle(Answered((1, 1)))[0] == Deliver(1)


def test_request_for_another_version_is_checked_again() -> None:
    run = Run(table(["a"], ongoing=1))
    for number in (1, 2, 3, 4):
        job = Submitted(number=number, model="m", deadline_at=100.0, version="1")
        run.handle(job)
    run.handle(Connected("z"))  # the new version is ready before the table says so
    both, old = table(["z"], version="2"), table(["a"])
    route = Route("2", {"1": 1, "2": 1}, 100, 1)
    merged = RoutingTable(2, ("g",), {"m": route}, {**old.replicas, **both.replicas})
    actions = run.handle(TableChanged(merged))
    assert rejected(actions) == dict.fromkeys((2, 3, 4), OutdatedError)
    assert dispatched(actions) == []
    late = Submitted(number=5, model="m", deadline_at=100.0, version="1")
    assert rejected(run.handle(late)) == {5: OutdatedError}
    assert rejected(run.handle(Lost("a"))) == {1: OutdatedError}


def test_request_is_not_hedged_by_another_version() -> None:
    """The first answer could be the new version's, under the old version's name."""
    run = Run(table(["a", "b"], ongoing=1))
    for number in (1, 2):
        job = Submitted(number=number, model="m", deadline_at=100.0, version="1")
        run.handle(job)
    run.handle(Silent("a", True))  # the other replica is full
    new, old = table(["z"], version="2"), table(["a", "b"])
    route = Route("2", {"1": 1, "2": 1}, 100, 1)
    merged = RoutingTable(2, ("g",), {"m": route}, {**old.replicas, **new.replicas})
    run.handle(TableChanged(merged))
    assert run.handle(Connected("z")) == []
    run.handle(Silent("a", False))
    run.handle(Silent("a", True))
    assert run.handle(Silent("b", True)) == []
    assert run.handle(Answered((1, 1)))[0] == Deliver(1)
    assert run.handle(Answered((2, 1)))[0] == Deliver(2)


def test_sessions_that_wait_are_not_looked_at_while_all_replicas_are_full() -> None:
    """Otherwise each answer would cost a scan of the whole queue."""
    counts = []
    for waiting in (10, 90):
        run = Run(table(["a", "b"], ongoing=1))
        for number in range(waiting):
            job = Submitted(
                number=number, model="m", deadline_at=100.0, session=f"s{number}"
            )
            run.handle(job)
        busy = dict(run.router.load())
        assert busy == {"a": 1, "b": 1}
        late = Submitted(number=1000, model="m", deadline_at=100.0, session="late")
        counts.append(lines_of(partial(run.router.handle, late, 0.0)))
    assert counts[1] < counts[0] + 150  # the queue itself is a list


# A simulation: whatever the order of events, each request gets one answer.


class Fleet:
    """Replicas of two stages that compute when told, and may be lost at any time."""

    STAGES = (["a0", "a1"], ["b0", "b1"])

    def __init__(self, quick: frozenset[str] = frozenset()) -> None:
        self.quick = quick
        self.run = Run(table(*self.STAGES, queue=1000, ongoing=4))
        self.at: dict[str, list[tuple[int, int, bool]]] = {
            name: [] for names in self.STAGES for name in names
        }
        self.up = set(self.at)
        self.ended: dict[int, list[Action]] = {}

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Dispatch(replica, (number, attempt), is_isolated):
                    assert replica in self.up
                    self.at[replica].append((number, attempt, is_isolated))
                case Deliver(number) | Reject(number, _):
                    self.ended.setdefault(number, []).append(action)
                case Cancel(_, (number, attempt)):  # replicas pass it on
                    for name, works in self.at.items():
                        self.at[name] = [w for w in works if w[:2] != (number, attempt)]

    def handle(self, event: Event) -> None:
        self.carry_out(self.run.handle(event))

    def compute(self, name: str) -> None:
        if not self.at[name] or name not in self.up:
            return
        number, attempt, is_isolated = self.at[name].pop(0)
        if is_isolated or name not in self.quick:
            self.handle(begun(name, ((number, attempt),), is_isolated))
        if name in self.STAGES[1]:
            self.handle(Answered((number, attempt)))
            return
        following = [n for n in self.STAGES[1] if n in self.up]
        if following:
            self.at[following[number % len(following)]].append(
                (number, attempt, is_isolated)
            )
        else:
            self.handle(dropped(((number, attempt),), 1))

    def lose(self, name: str) -> None:
        """Lose a replica; it has begun its first work if the number is odd."""
        if name not in self.up:
            return
        first = [w for w in self.at[name][:1] if w[0] % 2]
        for number, attempt, is_isolated in first:
            if is_isolated or name not in self.quick:
                self.handle(begun(name, ((number, attempt),), is_isolated))
        held = [w[:2] for w in self.at[name]]
        self.at[name] = []
        self.up.discard(name)
        if name in self.STAGES[1]:  # the sender reports both begun and
            # unbegun work: it cannot tell them apart
            self.handle(dropped(tuple(held), 1))
        self.handle(Lost(name))

    def revive(self, name: str) -> None:
        if name not in self.up:
            self.up.add(name)
            self.handle(Connected(name))


NAMES = [name for names in Fleet.STAGES for name in names]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.just("")),
        st.tuples(
            st.sampled_from(["compute", "compute", "lose", "revive"]),
            st.sampled_from(NAMES),
        ),
        st.tuples(st.sampled_from(["silent", "heard"]), st.sampled_from(NAMES)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.frozensets(st.sampled_from(NAMES)))
def test_every_request_ends_exactly_once(
    steps: list[tuple[str, str]], quick: frozenset[str]
) -> None:
    """Quick replicas announce only what they compute in isolation."""
    fleet = Fleet(quick)
    submitted = 0
    for what, name in steps:
        match what:
            case "submit":
                submitted += 1
                fleet.handle(Submitted(number=submitted, model="m", deadline_at=1e9))
            case "silent" | "heard":
                if name in fleet.up:
                    fleet.handle(Silent(name, what == "silent"))
            case _:
                getattr(fleet, what)(name)
    for name in NAMES:
        fleet.revive(name)
        fleet.handle(Silent(name, False))
    for _ in range(20 * (submitted + 1)):
        for name in NAMES:
            fleet.compute(name)
    assert sorted(fleet.ended) == list(range(1, submitted + 1))
    for actions in fleet.ended.values():
        assert len(actions) == 1
        if isinstance(actions[0], Reject):
            assert isinstance(actions[0].error, RequestPoisonedError)
    assert len(fleet.run.router) == 0
    assert not any(fleet.run.router.load().values())


def test_events_of_unknown_requests_are_ignored() -> None:
    """Notes about finished requests often arrive late."""
    run = Run(table(["a"]))
    for event in (
        begun("a", ((7, 1),), False),
        dropped(((7, 1),), 1),
        stuck(((7, 1),)),
        Answered((7, 1)),
        failed((7, 1), ModelFailedError("no")),
        Withdrawn(7),
        Lost("unknown"),
    ):
        assert run.handle(event) == []
    with pytest.raises(KeyError):
        run.handle(Submitted(number=1, model="unknown", deadline_at=1.0))
