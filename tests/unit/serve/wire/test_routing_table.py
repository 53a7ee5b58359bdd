"""The routing table, its edges and its encoding."""

from __future__ import annotations

from dataclasses import replace

from multiworld.serve.wire.control_messages import ORDERS, TableChanged
from multiworld.serve.wire.routing_table import (
    Edge,
    Replica,
    ReplicaState,
    Route,
    RoutingTable,
    edges_of,
)

READY = ReplicaState.READY


def a_table() -> RoutingTable:
    replicas = [
        Replica(f"m/{stage}/{n}", "m", "1", stage, READY)
        for n, stage in enumerate((0, 1, 1, 2))
    ]
    return RoutingTable(
        3, ("g/1", "g/2"), {"m": Route("1", {"1": 3})}, {r.name: r for r in replicas}
    )


def test_edges_have_two_ends_that_agree() -> None:
    table = a_table()
    processes = [*table.gateways, *table.replicas]
    ends = {
        (process, edge.peer): edge
        for process in processes
        for edge in edges_of(table, process).values()
    }
    for (process, peer), edge in ends.items():
        other = ends[peer, process]
        assert other.world == edge.world
        assert {other.rank, edge.rank} == {0, 1}
        assert edge.is_upstream == (edge.rank == 1)
    # every gateway to every replica, and neighbours of the chain
    assert len(ends) == 2 * (2 * 4 + 2 + 2)
    assert edges_of(table, "unknown") == {}


def test_edges_when_versions_differ_then_none() -> None:
    table = a_table()
    newer = Replica("m/1/9", "m", "2", 1, READY)
    both = RoutingTable(4, (), table.routes, {**table.replicas, newer.name: newer})
    assert edges_of(both, newer.name) == {}


def test_last_stage_reaches_stage_0_while_its_model_is_removed() -> None:
    """The route is gone then, but streams are still answered."""
    replicas = {n: replace(r, stages=3) for n, r in a_table().replicas.items()}
    table = RoutingTable(4, ("g/1",), {}, replicas)
    name = "edge:m/0/0>m/2/3"
    last, first = edges_of(table, "m/2/3"), edges_of(table, "m/0/0")
    assert last["m/0/0"] == Edge(name, "m/0/0", 1, is_upstream=True)
    assert first["m/2/3"] == Edge(name, "m/2/3", 0, is_upstream=False)
    assert "m/0/0" not in edges_of(RoutingTable(4, (), {}, a_table().replicas), "m/2/3")


def test_table_survives_the_wire() -> None:
    table = a_table()
    assert ORDERS.decode(ORDERS.encode(TableChanged(table))) == TableChanged(table)
