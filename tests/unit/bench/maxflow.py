"""Largest flow through ranges of layers, by augmenting paths: an independent check."""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from benchmarks.studies.layer_chains import Chain, Range


def largest_flow(chain: Chain, ranges: Sequence[Range]) -> float:
    """Return the largest flow; boundaries and nodes are the vertices of a network."""
    network = nx.DiGraph()
    network.add_nodes_from([("boundary", 0), ("boundary", chain.layers)])
    for number, held in enumerate(ranges):
        able = chain.kinds[held.kind].capacity[held.layers]
        into, out = ("in", number), ("out", number)
        network.add_edge(into, out, capacity=able)
        for layer in range(held.start, held.start + held.layers):
            network.add_edge(("boundary", layer), into)
        network.add_edge(out, ("boundary", held.start + held.layers))
    value = nx.maximum_flow_value(network, ("boundary", 0), ("boundary", chain.layers))
    return float(value)
