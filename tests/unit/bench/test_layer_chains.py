"""Chains of layers on mixed nodes: Helix's public instances, and random ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.studies.layer_chains import (
    Chain,
    NodeKind,
    Range,
    flow_of,
    place_chain,
    work_bound,
)
from tests.unit.bench.maxflow import largest_flow


def test_one_chain_of_like_nodes() -> None:
    """Each node holds the same number of layers."""
    chain = Chain(6, (NodeKind(3, {1: 10.0, 2: 5.0, 3: 2.0}),))
    found = place_chain(chain, 5)
    assert found.flow == pytest.approx(5.0)
    assert sorted((r.start, r.layers) for r in found.ranges) == [(0, 2), (2, 2), (4, 2)]


def test_chains_side_by_side() -> None:
    """Several nodes hold all layers if each can."""
    chain = Chain(2, (NodeKind(3, {1: 2.0, 2: 2.0}),))
    assert place_chain(chain, 5).flow == pytest.approx(6.0)


def test_ranges_may_overlap() -> None:
    """An item enters a node in the middle of its range."""
    chain = Chain(3, (NodeKind(2, {2: 1.0}),))
    found = place_chain(chain, 5)
    assert found.flow == pytest.approx(1.0)
    assert sorted(r.start for r in found.ranges) == [0, 1]


def test_too_few_nodes_serve_nothing() -> None:
    found = place_chain(Chain(9, (NodeKind(2, {2: 1.0}),)), 2)
    assert found.flow == 0.0


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    kinds = tuple(
        NodeKind(
            draw(st.integers(1, 3)),
            {
                k: round(draw(st.floats(0.5, 9.0)), 2)
                for k in range(1, draw(st.integers(1, 4)) + 1)
            },
        )
        for _ in range(draw(st.integers(1, 2)))
    )
    return Chain(draw(st.integers(1, 6)), kinds)


EXACT = Chain(5, (NodeKind(2, {1: 2.0}), NodeKind(3, {1: 1.32})))
"""Five nodes for five layers: a flow of 1.32 uses them exactly, except for rounding."""


@settings(max_examples=40, deadline=None)
@example(EXACT)
@given(chains())
def test_every_flow_is_what_another_algorithm_finds(chain: Chain) -> None:
    found = place_chain(chain, 1)
    used: dict[int, int] = {}
    for held in found.ranges:
        used[held.kind] = used.get(held.kind, 0) + 1
        assert 0 <= held.start <= held.start + held.layers <= chain.layers
        assert held.layers in chain.kinds[held.kind].capacity
    assert all(n <= chain.kinds[kind].count for kind, n in used.items())
    assert found.flow == pytest.approx(largest_flow(chain, found.ranges), abs=1e-6)
    assert found.flow <= min(found.bound, work_bound(chain)) + 0.02


def test_flow_enters_only_inside_a_range() -> None:
    chain = Chain(3, (NodeKind(2, {1: 4.0, 2: 1.0}),))
    assert flow_of(chain, [Range(0, 1, 2)]) == 0.0
    assert flow_of(chain, [Range(0, 0, 2), Range(0, 2, 1)]) == pytest.approx(1.0)


INSTANCES = Path(__file__).parents[3] / "benchmarks" / "data" / "placement"
CAPACITY = "throughput_by_layers_held"


@pytest.mark.parametrize("path", sorted(INSTANCES.glob("*.json")), ids=lambda p: p.stem)
def test_public_instances_are_solved_as_well_as_is_known(path: Path) -> None:
    instance = json.loads(path.read_text())
    kinds = tuple(
        NodeKind(kind["count"], {int(n): c for n, c in kind[CAPACITY].items()})
        for kind in instance["types"]
    )
    chain = Chain(instance["layers"], kinds)
    found = place_chain(chain, 1)
    assert found.flow >= 0.999 * instance["best_known"]
    assert found.flow == pytest.approx(largest_flow(chain, found.ranges))
    assert found.flow <= found.bound * (1 + 1e-9)
