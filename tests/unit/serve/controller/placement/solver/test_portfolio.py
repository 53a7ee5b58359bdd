"""The solver portfolio: feasible placements that are never worse than greedy."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from multiworld.serve.controller.placement.solver import (
    Device,
    ModelNeed,
    Node,
    Placement,
    Problem,
    Replica,
    StageNeed,
    place,
)
from multiworld.serve.controller.placement.solver.greedy import place_greedily
from multiworld.serve.controller.placement.solver.linear import Formulation
from multiworld.serve.controller.placement.solver.model import (
    answer,
    objective,
    within_reach,
)
from multiworld.serve.controller.placement.solver.problem import GIB
from multiworld.serve.controller.placement.solver.verify import faults


def node(name: str, *kinds: str, memory: int = 8, **more: Any) -> Node:
    devices = tuple(
        Device(f"{name}-{number}", kind, memory * GIB)
        for number, kind in enumerate(kinds)
    )
    return Node(name, devices, **more)


def stage(seconds: float = 0.1, memory: int = 1, **more: Any) -> StageNeed:
    return StageNeed(memory * GIB, {"cpu": seconds}, **more)


def devices_of(placement: Placement, model: str, k: int) -> list[str]:
    found = [r.device for r in placement.replicas if (r.model, r.stage) == (model, k)]
    return sorted(found)


def test_bottleneck_gets_more_replicas() -> None:
    nodes = tuple(node(f"n{i}", "cpu") for i in range(6))
    model = ModelNeed("m", (stage(0.1), stage(0.4), stage(0.1)), demand=4.0)
    found = place(Problem(nodes, (model,)), 5)
    assert faults(Problem(nodes, (model,)), found) == []
    assert found.served["m"] == pytest.approx(4.0)
    assert len(devices_of(found, "m", 1)) == 2
    assert found.gap < 1e-4


def test_stages_grow_together_if_the_demand_cannot_be_met() -> None:
    nodes = tuple(node(f"n{n}", "cpu", "cpu") for n in range(4))
    problem = Problem(nodes, (ModelNeed("m", (stage(), stage()), demand=1e6),))
    counts = Counter[int]()
    for (_, k, _), count in place_greedily(problem).items():
        counts[k] += count
    assert counts == {0: 4, 1: 4}
    found = place(problem, 5.0)
    assert faults(problem, found) == []
    assert found.served["m"] == pytest.approx(4 * 0.8 / 0.1)
    assert "32 of 1e+06 items/s" in found.unplaced["m"]


def test_cheapest_devices_that_suffice_are_used() -> None:
    cheap = Node("cheap", tuple(Device(f"c{i}", "cpu", 8 * GIB, 1.0) for i in range(3)))
    dear = Node("dear", (Device("d", "cpu", 8 * GIB, 10.0),))
    model = ModelNeed("m", (stage(0.1), stage(0.1)), demand=3.0)
    found = place(Problem((dear, cheap), (model,)), 5)
    assert {r.device for r in found.replicas} < {"c0", "c1", "c2"}
    assert len({r.device for r in found.replicas}) == 1
    assert found.served["m"] == pytest.approx(3.0)


def test_replicas_are_spread_over_nodes() -> None:
    nodes = (node("a", "cpu", "cpu", "cpu"), node("b", "cpu"))
    model = ModelNeed("m", (stage(min_replicas=2), stage()), demand=1.0)
    problem = Problem(nodes, (model,))
    found = place(problem, 5)
    assert faults(problem, found) == []
    assert {name[0] for name in devices_of(found, "m", 0)} == {"a", "b"}
    pinned = replace(
        problem,
        models=(replace(model, stages=(stage(min_replicas=2, nodes=frozenset("a")),)),),
    )
    found = place(pinned, 5)
    assert faults(pinned, found) == []
    assert len(devices_of(found, "m", 0)) == 2


def test_what_is_worth_more_is_served_first() -> None:
    nodes = (node("a", "cpu"),)
    models = tuple(
        ModelNeed(name, (stage(0.5),), demand=1.6, weight=weight)
        for name, weight in (("cheap", 1.0), ("dear", 3.0))
    )
    found = place(Problem(nodes, models), 5)
    assert found.served == {"dear": pytest.approx(1.6), "cheap": pytest.approx(0.0)}
    assert "no more time or memory" in found.unplaced["cheap"]
    assert "dear" not in found.unplaced


def test_what_cannot_be_placed_says_what_is_short() -> None:
    nodes = (node("a", "cpu", memory=2),)
    needs = {
        "large": (stage(memory=3),),
        "gpu": (StageNeed(GIB, {"h100": 0.1}),),
        "elsewhere": (stage(nodes=frozenset({"b"})),),
    }
    models = tuple(ModelNeed(name, stages, 1.0) for name, stages in needs.items())
    late = ModelNeed("late", (stage(0.2), stage(0.2)), 1.0, latency_s=0.3)
    found = place(Problem(nodes, (*models, late)), 2)
    assert "3,072 MiB" in found.unplaced["large"]
    assert "h100" in found.unplaced["gpu"]
    assert "only be on b" in found.unplaced["elsewhere"]
    assert "0.3 s" in found.unplaced["late"]
    assert found.replicas == ()


def test_latency_keeps_replicas_off_slow_devices() -> None:
    """The latency bound holds for every combination of replicas."""
    slow = Node("slow", (Device("s", "old", 8 * GIB, 0.1),))
    fast = Node("fast", (Device("f", "new", GIB, 5.0),))
    need = StageNeed(GIB, {"old": 0.3, "new": 0.1})
    model = ModelNeed("m", (need, need), demand=0.5)
    assert {r.device for r in place(Problem((slow, fast), (model,)), 5).replicas} == {
        "s"
    }
    hurried = Problem((slow, fast), (replace(model, latency_s=0.45),))
    found = place(hurried, 5)
    assert faults(hurried, found) == []
    assert {r.device for r in found.replicas} == {"s", "f"}
    fast = Node("fast", (Device("f", "new", 8 * GIB, 5.0),))
    in_haste = Problem((slow, fast), (replace(model, latency_s=0.25),))
    assert {r.device for r in place(in_haste, 5).replicas} == {"f"}


def test_lost_node_moves_little() -> None:
    nodes = tuple(node(f"n{i}", "cpu") for i in range(5))
    models = tuple(
        ModelNeed(f"m{i}", (stage(0.2), stage(0.2)), demand=2.0) for i in range(2)
    )
    before = place(Problem(nodes, models), 5)
    assert not before.unplaced
    running = frozenset((r.model, r.stage, r.device) for r in before.replicas)
    lost = next(
        n for n in nodes if any(r.device == f"{n.name}-0" for r in before.replicas)
    )
    left = tuple(n for n in nodes if n is not lost)
    gone = {d.name for d in lost.devices}
    staying = frozenset(r for r in running if r[2] not in gone)
    after = place(Problem(left, models, running=staying), 5)
    assert not after.unplaced
    placed = {(r.model, r.stage, r.device) for r in after.replicas}
    assert staying <= placed
    assert len(placed - staying) <= len(running - staying)


def test_links_limit_what_a_node_sends() -> None:
    """All output counts as sent to another node."""
    nodes = (node("a", "cpu", bandwidth=500.0), node("b", "cpu", bandwidth=500.0))
    model = ModelNeed("m", (stage(0.01, out_bytes=100), stage(0.01)), demand=20.0)
    problem = Problem(nodes, (model,))
    found = place(problem, 5)
    assert faults(problem, found) == []
    assert found.served["m"] == pytest.approx(10.0, rel=1e-3)


# The verifier finds what is wrong.


def broken() -> dict[str, tuple[Problem, Placement]]:
    """Return placements with one fault each, keyed by a part of the verifier's text."""
    nodes = (node("a", "cpu", "gpu", memory=2), node("b", "cpu", bandwidth=1.0))
    need = stage(0.5, out_bytes=10)
    model = ModelNeed("m", (need, need), demand=1.0)
    problem = Problem(nodes, (model,))

    def on(*places: tuple[int, str, float], served: float = 1.0) -> Placement:
        replicas = tuple(Replica("m", k, device, rate) for k, device, rate in places)
        return Placement(replicas, {"m": served}, 0.0, 0.0, "test")

    whole = ModelNeed("m", (stage(memory=2), stage(memory=2)), 1.0)
    pinned = ModelNeed("m", (stage(nodes=frozenset("b")), stage()), 1.0)
    two = ModelNeed("m", (stage(min_replicas=2), stage()), 1.0)
    one = ModelNeed("m", (stage(max_replicas=1), stage()), 1.0)
    late = ModelNeed("m", (stage(), stage()), 1.0, latency_s=0.1)
    both = on((0, "a-0", 1.0), (1, "a-0", 1.0))

    def of(need_: ModelNeed) -> Problem:
        return replace(problem, models=(need_,))

    return {
        "does not run on gpu": (problem, on((0, "a-1", 1.0), (1, "b-0", 1.0))),
        "more than it has": (of(whole), both),
        "of its time": (problem, both),
        "may not be on": (of(pinned), on((0, "a-0", 1.0), (1, "b-0", 1.0))),
        "least 2": (of(two), on((0, "a-0", 1.0), (1, "b-0", 1.0))),
        "at most 1 allowed": (
            of(one),
            on((0, "a-0", 0.5), (0, "b-0", 0.5), (1, "b-0", 1.0)),
        ),
        "sends": (problem, on((0, "b-0", 1.0), (1, "a-0", 1.0))),
        "serves": (problem, on((0, "a-0", 0.4), (1, "b-0", 1.0))),
        "above its demand": (problem, on((0, "a-0", 2.0), (1, "b-0", 2.0), served=2.0)),
        "2 replicas on one": (problem, on((0, "a-0", 0.5), (0, "a-0", 0.5))),
        "its rate": (problem, on((0, "a-0", -1.0), (1, "b-0", 1.0))),
        "takes": (of(late), on((0, "a-0", 1.0), (1, "b-0", 1.0))),
    }


@pytest.mark.parametrize("what", broken())
def test_verifier_finds(what: str) -> None:
    problem, placement = broken()[what]
    assert any(what in fault for fault in faults(problem, placement))


def test_verifier_finds_replicas_on_one_node() -> None:
    """This is a fault only if another node would do."""
    nodes = (node("a", "cpu", "cpu"), node("b", "cpu"))
    problem = Problem(nodes, (ModelNeed("m", (stage(min_replicas=2),), 1.0),))
    replicas = (Replica("m", 0, "a-0", 0.5), Replica("m", 0, "a-1", 0.5))
    placement = Placement(replicas, {"m": 1.0}, 0.0, 0.0, "test")
    assert faults(problem, placement) == ["m/0: all of its replicas on one node"]


# Several replicas on one device.


def cpu_node(name: str, cores: float, price: float = 1.0) -> Node:
    return Node(name, (Device(f"{name}/cpu", "cpu", 8 * GIB, price, cores),))


def test_replicas_share_a_machine_by_its_cores() -> None:
    """A replica computes one item at a time, so four cores carry four replicas."""
    need = StageNeed(GIB, {"cpu": 0.1}, per_device=8)
    problem = Problem((cpu_node("a", 4.0),), (ModelNeed("m", (need,), 100.0),))
    found = place(problem, 5.0)
    assert faults(problem, found) == []
    assert len(found.replicas) == 4
    assert found.served["m"] == pytest.approx(4 * 0.8 / 0.1)
    wide = replace(need, width=2.0)
    half = replace(problem, models=(ModelNeed("m", (wide,), 100.0),))
    assert place(half, 5.0).served["m"] == pytest.approx(2 * 0.8 / 0.1)


def test_cores_that_are_booked_are_nobody_elses() -> None:
    need = StageNeed(
        1, {"cpu": 0.0}, min_replicas=3, max_replicas=3, cores=1.5, per_device=8
    )
    fits = Problem((cpu_node("a", 4.0), cpu_node("b", 2.0)), ())
    fits = replace(fits, models=(ModelNeed("m", (need,), 1.0),))
    found = place(fits, 5.0)
    assert faults(fits, found) == []
    assert Counter(r.device for r in found.replicas) == {"a/cpu": 2, "b/cpu": 1}
    tight = replace(fits, nodes=fits.nodes[:1])
    assert place(tight, 5.0).replicas == ()
    over = Placement(
        tuple(Replica("m", 0, "a/cpu", 0.3) for _ in range(3)), {"m": 0.9}, 0, 0, "test"
    )
    assert "a/cpu: 4.5 cores are booked, more than it has" in faults(tight, over)


def test_new_replicas_go_where_few_are_and_old_ones_stay() -> None:
    need = StageNeed(GIB, {"cpu": 0.0}, min_replicas=4, max_replicas=4, per_device=4)
    nodes = tuple(cpu_node(name, 4.0, price=0.0) for name in "abcd")
    problem = Problem(nodes, (ModelNeed("m", (need,), 1.0),), balance=0.01)
    spread = place(problem, 5.0)
    assert faults(problem, spread) == []
    assert len({r.device for r in spread.replicas}) == 4
    runs = [("m", 0, "a/cpu")] * 2 + [("m", 0, "b/cpu")] * 2
    again = place(replace(problem, running=runs), 5.0)
    assert Counter(r.device for r in again.replicas) == {"a/cpu": 2, "b/cpu": 2}


def test_few_are_moved_when_a_machine_is_lost() -> None:
    need = StageNeed(GIB, {"cpu": 0.01}, min_replicas=3, max_replicas=3, per_device=3)
    nodes = tuple(cpu_node(name, 4.0) for name in "abc")
    models = tuple(ModelNeed(f"m{n}", (need,), 1.0) for n in range(2))
    first = place(Problem(nodes, models), 5.0)
    runs = [(r.model, r.stage, r.device) for r in first.replicas]
    stays = [key for key in runs if key[2] != "c/cpu"]
    again = place(Problem(nodes[:2], models, stays), 5.0)
    there = Counter((r.model, r.stage, r.device) for r in again.replicas)
    assert (Counter(stays) - there).total() == 0
    assert len(again.replicas) == 6


# Random problems.


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kinds = ("cpu", "gpu")
    numbers = itertools.count()
    nodes = tuple(
        Node(
            f"n{n}",
            tuple(
                Device(
                    f"d{next(numbers)}",
                    draw(st.sampled_from(kinds)),
                    draw(st.integers(1, 6)) * GIB,
                    draw(st.sampled_from((0.5, 1.0, 3.0))),
                    draw(st.sampled_from((1.0, 4.0))),
                )
                for _ in range(draw(st.integers(1, 2)))
            ),
            draw(st.sampled_from((None, 1e3, 1e6))),
        )
        for n in range(draw(st.integers(1, 3)))
    )
    names = [n.name for n in nodes]

    def need() -> StageNeed:
        speeds = {kind: draw(st.floats(0.001, 1.0)) for kind in kinds}
        least = draw(st.integers(1, 2))
        return StageNeed(
            draw(st.integers(1, 4)) * GIB,
            {draw(st.sampled_from(kinds)): 0.05} if draw(st.booleans()) else speeds,
            draw(st.sampled_from((0, 100))),
            least,
            draw(st.sampled_from((None, least, least + 1))),
            frozenset(draw(st.sets(st.sampled_from(names), max_size=1))),
            draw(st.sampled_from((1.0, 2.0))),
            draw(st.sampled_from((0.0, 0.5, 2.0))),
            draw(st.sampled_from((1, 3))),
        )

    models = tuple(
        ModelNeed(
            f"m{m}",
            tuple(need() for _ in range(draw(st.integers(1, 3)))),
            draw(st.floats(0.1, 20.0)),
            draw(st.sampled_from((0.5, 1.0, 2.0))),
            draw(st.sampled_from((None, 0.2, 2.0))),
        )
        for m in range(draw(st.integers(1, 3)))
    )
    devices = [device.name for n in nodes for device in n.devices]
    running = draw(st.lists(st.sampled_from(devices), max_size=3))
    balance = draw(st.sampled_from((0.0, 0.01, 5.0)))
    where = [("m0", 0, device) for device in running]
    return Problem(nodes, models, where, balance=balance)


@settings(max_examples=60, deadline=None)
@given(problems())
def test_every_answer_is_feasible_and_no_worse_than_greedy(problem: Problem) -> None:
    greedy = place(problem, 0.0)
    assert faults(problem, greedy) == []
    assert greedy.solver in ("greedy", "as it is")
    if greedy.solver == "greedy":
        chosen = sum(place_greedily(problem).values())
        assert len(greedy.replicas) == chosen, "nothing of it was thrown away"
    found = place(problem, 0.5)
    assert faults(problem, found) == []
    assert found.value >= greedy.value - 1e-6 * abs(greedy.value)
    assert found.value <= found.bound + 1e-3 * abs(found.bound) + 1e-6
    assert found.value == pytest.approx(
        objective(within_reach(problem), found.served, found.replicas)
    )


THREE_SMALL_SHARES = Problem(
    (
        Node("n0", (Device("d0", "cpu", 2**30, 0.5), Device("d1", "cpu", 2**30, 0.5))),
        Node("n1", (Device("d2", "cpu", 2**30, 0.5),)),
    ),
    (ModelNeed("m0", (StageNeed(2**30, {"cpu": 1.0}),), demand=17.0, weight=0.5),),
    utilisation=0.8,
    hop_s=0.001,
)
"""One solver rounds each replica's share down; its bound must still hold."""


@settings(max_examples=25, deadline=None)
@example(THREE_SMALL_SHARES)
@given(problems())
def test_both_solvers_agree(problem: Problem) -> None:
    pytest.importorskip("ortools")
    from multiworld.serve.controller.placement.solver import cp_sat

    formulation = Formulation(problem)
    values, bound = formulation.solve(5.0)
    assert values is not None
    counts, rates = formulation.counts(values), formulation.rates(values)
    exact = answer(problem, counts, rates, bound, "milp")
    chosen, other = cp_sat.solve(formulation, 5.0, {}, {})
    assert chosen is not None
    again, _ = formulation.solve(5.0, chosen)
    assert again is not None
    value = answer(problem, chosen, formulation.rates(again), other, "cp-sat").value
    assert value == pytest.approx(exact.value, rel=2e-4, abs=1e-3)
    assert exact.value <= other + 2e-4 * abs(other) + 1e-3
