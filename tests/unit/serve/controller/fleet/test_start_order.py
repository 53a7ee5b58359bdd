"""The order of starts, and how many run at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.controller.fleet.start_order import (
    Shortage,
    next_starts,
    starts_at_once,
    urgent_starts,
)
from multiworld.serve.machines.amounts import Node

GATEWAY = "", "", 0


def stage(number: int, model: str = "m") -> tuple[str, str, int]:
    return model, "1", number


def test_stage_that_nothing_serves_goes_first() -> None:
    """Its requests cannot be answered at all; elsewhere they only wait longer."""
    found = next_starts(
        [Shortage(stage(0), 4, 2, 2), Shortage(stage(1), 1, 1, 1)], free=1
    )
    assert found == [stage(1)]


def test_replacements_precede_growth() -> None:
    """This holds even if the growing stage has a smaller fraction of its replicas."""
    grows, lost = Shortage(stage(0), 8, 6, 0), Shortage(stage(1), 4, 1, 1)
    assert next_starts([grows, lost], free=3) == [stage(1), stage(0), stage(0)]


def test_every_stage_of_a_cold_start_gets_one_before_any_gets_two() -> None:
    """The model answers once every stage has one."""
    short = [Shortage(stage(k), 3, 3, 0) for k in range(3)]
    assert next_starts(short, free=4)[:3] == [stage(0), stage(1), stage(2)]


def test_gateways_wait_for_nothing() -> None:
    """Gateways load no model, and nothing is answered without one."""
    found = next_starts(
        [Shortage(stage(0), 1, 1, 0), Shortage(GATEWAY, 2, 2, 0)], free=0
    )
    assert found == [GATEWAY, GATEWAY]


shortages = st.lists(
    st.builds(
        lambda number, there, missing, lost: Shortage(
            stage(number), there + missing, missing, lost
        ),
        st.integers(0, 5),
        st.integers(0, 3),
        st.integers(1, 4),
        st.integers(0, 4),
    ),
    unique_by=lambda s: s.key,
)


@given(shortages, st.integers(-2, 12))
def test_all_room_is_used_and_no_more(short: list[Shortage], free: int) -> None:
    found = next_starts(short, free)
    assert len(found) == max(0, min(free, sum(s.missing for s in short)))
    for one in short:
        assert found.count(one.key) <= one.missing


def test_nodes_of_one_machine_share_its_cores() -> None:
    """A machine with less than one core still starts one replica at a time."""
    nodes = [
        Node("a", 4.0, 1, address="10.0.0.1"),
        Node("b", 4.0, 1, address="10.0.0.1"),
        Node("c", 0.3, 1, address="10.0.0.2"),
    ]
    assert starts_at_once(nodes) == 9
    assert starts_at_once([]) == 0


def test_lost_replicas_take_the_place_of_slow_starts() -> None:
    short = [
        Shortage(stage(0), 4, 2, 1),
        Shortage(stage(1), 2, 2, 2),
        Shortage(stage(2), 5, 3, 0),
    ]
    assert urgent_starts(short, [], 9) == [stage(1), stage(0), stage(1)]
    assert urgent_starts(short, [stage(1)], 9) == [stage(0), stage(1)]
    assert urgent_starts(short, [], 1) == [stage(1)]


def test_first_replica_of_a_stage_waits_for_no_slow_start() -> None:
    short = [Shortage(stage(0), 2, 2, 0), Shortage(stage(1), 2, 1, 0)]
    assert urgent_starts(short, [], 9) == [stage(0)]
    assert urgent_starts(short, [stage(0)], 9) == []
