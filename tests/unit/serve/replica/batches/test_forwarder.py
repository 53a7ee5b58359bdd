"""Forwarding of work to the next stage."""

from __future__ import annotations

from multiworld.serve.replica.batches.batch_queue import Work
from multiworld.serve.replica.batches.forwarder import Forwarder
from multiworld.serve.wire.protocol import Key
from multiworld.serve.wire.routing_table import Replica, ReplicaState


def piece(
    number: int,
    *,
    via: dict[str, str] | None = None,
    deadline_at: float = 100.0,
    session: str | None = None,
) -> Work:
    return Work(key(number), None, 1, deadline_at, 0.0, via=via, session=session)


def key(number: int) -> Key:
    return ("r", number, 1)


def forwarding(credit: int = 2, **states: ReplicaState) -> Forwarder:
    made = Forwarder(1, credit, lambda: 0.0)
    made.table_changed([Replica(n, "m", "1", 1, s) for n, s in states.items()])
    for name in states:
        made.connected(name)
    return made


def sent(found: dict[str, list[Work]]) -> dict[str, list[int]]:
    return {name: [p.key[1] for p in pieces] for name, pieces in found.items()}


READY, STARTING = ReplicaState.READY, ReplicaState.STARTING
DRAINING = ReplicaState.DRAINING


def test_hand_when_credit_is_used_up_then_the_rest_waits_in_order() -> None:
    f = forwarding(2, a=READY)
    assert sent(f.hand([piece(n) for n in range(4)], 0.0)) == {"a": [0, 1]}
    assert (len(f), f.handed_count) == (2, 2)
    f.begun("a", [key(0)])
    assert sent(f.hand([], 0.0)) == {"a": [2]}
    f.begun("a", [key(7)])  # unknown work is ignored
    assert sent(f.hand([], 0.0)) == {}


def test_hand_when_a_probe_then_beyond_the_credit() -> None:
    """A probe may make the replica ready that all others wait for."""
    f = forwarding(1, a=READY)
    assert sent(f.hand([piece(n) for n in range(3)], 0.0)) == {"a": [0]}
    assert sent(f.hand([piece(9, via={"2": "x"})], 0.0)) == {"a": [9]}
    assert len(f) == 2


def test_hand_when_two_then_to_the_emptier_one() -> None:
    f = forwarding(4, a=READY, b=READY)
    found = sent(f.hand([piece(n) for n in range(6)], 0.0))
    assert {name: len(n) for name, n in found.items()} == {"a": 3, "b": 3}


def test_session_has_a_home_while_that_has_room() -> None:
    f = forwarding(16, a=READY, b=READY, c=READY)
    found = sent(f.hand([piece(n, session="s") for n in range(4)], 0.0))
    ((home, numbers),) = found.items()
    assert numbers == [0, 1, 2, 3]
    more = sent(f.hand([piece(n, session="s") for n in range(4, 6)], 0.0))
    assert home not in more
    f.begun(home, [key(0)])
    assert sent(f.hand([piece(6, session="s")], 0.0)) == {home: [6]}
    many = sent(f.hand([piece(n, session="s") for n in range(7, 40)], 0.0))
    assert many.keys() == {"a", "b", "c"}
    assert len(f) == 0, "nothing waits while others have room"


def test_hand_when_not_ready_or_silent_then_nothing() -> None:
    """A draining replica gets work only if no other is ready."""
    f = forwarding(4, a=STARTING)
    assert f.hand([piece(0)], 0.0) == {}
    f = forwarding(4, a=DRAINING, b=READY)
    assert sent(f.hand([piece(0), piece(1)], 0.0)) == {"b": [0, 1]}
    f = forwarding(4, a=DRAINING)
    assert sent(f.hand([piece(0)], 0.0)) == {"a": [0]}
    f = forwarding(4, a=READY)
    assert f.silent("a", is_silent=True) == []
    assert f.hand([piece(0)], 0.0) == {}
    f.silent("a", is_silent=False)
    assert sent(f.hand([], 0.0)) == {"a": [0]}


def test_silence_and_loss_return_unbegun_work_once() -> None:
    """Silence returns it once; a loss also returns recently begun work."""
    f = forwarding(4, a=READY)
    f.hand([piece(0), piece(1)], 0.0)
    f.begun("a", [key(0)])
    assert f.silent("a", is_silent=True) == [key(1)]
    assert f.silent("a", is_silent=True) == []
    assert f.lost("a") == [key(0), key(1)]
    assert f.lost("a") == []
    assert f.handed_count == 0


def test_replica_that_leaves_has_finished_what_it_began() -> None:
    f = forwarding(4, a=READY)
    f.hand([piece(0), piece(1)], 0.0)
    f.begun("a", [key(0)])
    assert f.left("a") == [key(1)]
    assert f.lost("a") == []


def test_probe_goes_to_its_replica_or_to_starting_ones() -> None:
    f = forwarding(4, a=READY, b=STARTING)
    assert sent(f.hand([piece(0, via={"1": "b"})], 0.0)) == {"b": [0]}
    assert sent(f.hand([piece(1, via={"0": "x"})], 0.0)) == {"a": [1]}
    f = forwarding(4, b=STARTING)
    assert sent(f.hand([piece(2, via={"2": "x"})], 0.0)) == {"b": [2]}
    assert f.hand([piece(3)], 0.0) == {}


def test_waiting_work_goes_back_when_the_next_stage_has_no_replicas() -> None:
    """Lost replicas of a version that is being replaced are not replaced."""
    f = forwarding(1, a=READY)
    f.hand([piece(0), piece(1), piece(2)], 0.0)
    assert f.return_waiting() == []
    f.table_changed([])
    assert f.return_waiting() == [key(1), key(2)]
    assert (len(f), f.handed_count) == (0, 1)


def test_replica_that_refused_work_gets_none_for_a_while() -> None:
    """It may have no edge to the gateway yet."""
    f = forwarding(4, a=READY, b=READY)
    (name,) = f.hand([piece(0)], 0.0)
    f.refused(name, [key(0)], 0.0)
    assert name not in f.hand([piece(n) for n in range(1, 4)], 0.1)
    assert f.handed_count == 3
    f.begun("b" if name == "a" else "a", [key(n) for n in range(1, 4)])
    assert name in f.hand([piece(n) for n in range(4, 8)], 1.0)


def test_refusal_of_work_that_was_never_sent_is_ignored() -> None:
    f = forwarding(4, a=READY)
    f.refused("a", [key(9)], 0.0)
    f.refused("unknown", [key(0)], 0.0)
    assert sent(f.hand([piece(0)], 0.1)) == {"a": [0]}


def test_late_and_cancelled_work_is_dropped() -> None:
    f = forwarding(1, a=READY)
    f.hand([piece(0)], 0.0)
    f.hand([piece(1, deadline_at=5.0), piece(2), piece(3)], 0.0)
    f.cancel(key(2))
    f.begun("a", [key(0)])
    assert sent(f.hand([], 6.0)) == {"a": [3]}
    f.hand([piece(4)], 6.0)
    f.cancel_of("r")
    assert len(f) == 0


def test_hand_when_as_full_then_to_the_one_that_began_longer_ago() -> None:
    """Receivers report when work begins, not when it is finished."""
    f = forwarding(4, a=READY, b=READY)
    for number in range(6):
        found = sent(f.hand([piece(number)], 0.0))
        assert found == {"ab"[number % 2]: [number]}
        f.begun("ab"[number % 2], [key(number)])
