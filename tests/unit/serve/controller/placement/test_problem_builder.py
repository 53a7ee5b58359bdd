"""Placement problems built from machines and specs, and plans read back."""

from __future__ import annotations

from collections import Counter

import pytest

from multiworld.config import MIB
from multiworld.serve.controller.placement.problem_builder import (
    PlacedReplica,
    ReplicaRequest,
    asks_in,
    bottleneck,
    in_words,
    moves,
    outlook,
    plan_of,
    problem_of,
)
from multiworld.serve.controller.placement.solver import Placement, Replica, place
from multiworld.serve.controller.placement.solver.verify import faults
from multiworld.serve.machines.amounts import Gpu, Node
from multiworld.serve.spec.loader import parse_spec
from multiworld.serve.spec.schema import ModelSpec

NODES = [
    Node("a", 4.0, 1000 * MIB),
    Node("b", 4.0, 1000 * MIB),
    Node("g", 8.0, 4000 * MIB, (Gpu(0, "L4", 24 * MIB), Gpu(1, "L4", 24 * MIB))),
]

SPEC = """
models:
  m:
    factory: tests.serve.models:model
    demand: 100
    latency_ms: 200
    stages:
    - {name: in, replicas: 2, item_ms: 5, cpus: 1, memory_mb: 400, out_kb: 2}
    - {name: big, device: cuda, gpu_memory_mb: 20, item_ms: 4, replicas: 2}
    - {name: out, replicas: {min_replicas: 1, max_replicas: 3}, item_ms: 12, ranks: 2}
"""


def model(text: str = SPEC) -> ModelSpec:
    return parse_spec(text).models["m"]


def test_problem_says_what_the_spec_declares() -> None:
    """With a demand, the solver chooses the number of replicas within their range."""
    problem = problem_of(NODES, asks_in({"m": model()}))
    devices = {d.name: d for node in problem.nodes for d in node.devices}
    assert list(devices) == ["a/cpu", "b/cpu", "g/cpu", "g/gpu0", "g/gpu1"]
    assert (devices["g/cpu"].capacity, devices["g/gpu1"].kind) == (8.0, "L4")
    (need,) = problem.models
    assert (need.demand, need.latency_s) == (100.0, 0.2)
    first, second, third = need.stages
    assert (first.memory_bytes, first.cores, first.out_bytes) == (400 * MIB, 1.0, 2048)
    assert (first.min_replicas, first.max_replicas, first.per_device) == (2, 2, 2)
    assert dict(second.seconds) == {"L4": 0.004}
    assert second.memory_bytes == 20 * MIB
    assert (third.min_replicas, third.max_replicas, third.width) == (1, 3, 2.0)


def test_placement_has_every_stage_and_names_the_bottleneck() -> None:
    problem = problem_of(NODES, asks_in({"m": model()}))
    found = place(problem, 5.0)
    assert faults(problem, found) == []
    assert found.served["m"] == pytest.approx(100.0)
    stages = outlook(problem, found)
    assert sum(stages[0].where.values()) == 2
    assert set(stages[1].where) == {"g/gpu0", "g/gpu1"} or len(stages[1].where) == 1
    slowest = bottleneck(stages, "m")
    assert slowest is not None
    assert slowest.able == min(stage.able for stage in stages)
    plan = plan_of(found, {"m": "1"})
    posts = Counter(post for (post, _), n in plan.items() for _ in range(n))
    assert posts["m", "1", 0] == 2
    assert Counter(node for (_, node), n in plan.items() for _ in range(n))["g"] >= 2
    assert "replicas by machine: " in in_words(found)


def test_model_without_times_is_placed_by_what_it_books() -> None:
    text = SPEC.replace("item_ms: 5, ", "").replace("item_ms: 4, ", "")
    spec = model(text.replace("item_ms: 12, ", "").replace("demand: 100", "weight: 2"))
    problem = problem_of(NODES, asks_in({"m": spec}))
    assert problem.models[0].stages[2].max_replicas == 1, (
        "no demand: the least is started"
    )
    found = place(problem, 5.0)
    assert found.unplaced == {}
    assert bottleneck(outlook(problem, found), "m") is None


def test_slow_stage_without_a_demand_has_a_place() -> None:
    text = SPEC.replace("demand: 100", "weight: 1").replace(
        "item_ms: 5,", "item_ms: 5000,"
    )
    spec = model(text.replace("latency_ms: 200", ""))
    assert place(problem_of(NODES, asks_in({"m": spec})), 2.0).unplaced == {}


def test_machine_without_cores_takes_nothing() -> None:
    head = Node("head", 0.0, 8000 * MIB)
    text = "models: {m: {factory: tests.serve.models:model, stages: [{}, {}, {}]}}"
    found = place(problem_of([head, *NODES], asks_in({"m": model(text)})), 2.0)
    assert found.unplaced == {}
    assert not any(r.device.startswith("head") for r in found.replicas)


def test_what_has_no_machine_is_named() -> None:
    pinned = model(SPEC.replace("replicas: 2, item_ms: 5", 'nodes: ["x-*"]'))
    found = place(problem_of(NODES, asks_in({"m": pinned})), 1.0)
    assert "stage 0 may only be on x-*" in found.unplaced["m"]
    found = place(problem_of(NODES[:2], asks_in({"m": model()})), 1.0)
    assert "stage 1" in found.unplaced["m"]
    assert found.replicas == ()


def test_pattern_of_names_is_the_machines_it_fits() -> None:
    pinned = model(SPEC.replace("replicas: 2, item_ms: 5", 'nodes: ["[ab]"]'))
    problem = problem_of(NODES, asks_in({"m": pinned}))
    assert problem.models[0].stages[0].nodes == {"a", "b"}


def test_running_replicas_stay_where_they_are() -> None:
    spec = model()
    ask = ReplicaRequest("m", spec, [(2, 2), (2, 2), (1, 1)])
    runs = [
        PlacedReplica("m", 0, "a"),
        PlacedReplica("m", 1, "g", (0,)),
        PlacedReplica("m", 1, "g", (1,)),
        PlacedReplica("m", 2, "g"),
    ]
    found = place(problem_of([NODES[0], NODES[2]], [ask], runs), 5.0)
    there = Counter((r.model, r.stage, r.device) for r in found.replicas)
    for run in runs[:3]:
        device = f"{run.node}/{f'gpu{run.gpus[0]}' if run.gpus else 'cpu'}"
        assert there["m", run.stage, device] >= 1
    assert there["m", 2, "g/cpu"] == 1


def test_only_what_the_plan_wants_elsewhere_is_moved() -> None:
    """Each missing replica causes one move; surplus replicas cause none."""
    plan = {("p", "a"): 1, ("p", "b"): 1, ("q", "a"): 1}
    here = {
        "p/1": ("p", "a"),
        "p/2": ("p", "a"),
        "p/3": ("p", "a"),
        "q/4": ("q", "a"),
        "r/5": ("r", "a"),
    }
    assert moves(plan, here) == ["p/2"]
    assert moves({}, here) == []
    assert moves({("p", "a"): 3}, here) == []


def test_words_say_what_is_short() -> None:
    replicas = (Replica("m", 0, "a/cpu", 1.0), Replica("m", 1, "a/gpu0", 1.0))
    found = Placement(replicas, {"m": 0.5}, 1.0, float("inf"), "greedy", {"m": "time"})
    assert in_words(found) == (
        "replicas by machine: a 2 (greedy, gap no bound); m is short: time"
    )


def test_more_than_a_hundred_replicas_fit_on_one_machine() -> None:
    """These replicas book neither memory nor cores."""
    text = "models: {m: {factory: x:y, stages: [{replicas: 130}]}}"
    problem = problem_of([Node("a", 4.0, 1000 * MIB)], asks_in({"m": model(text)}))
    found = place(problem)
    assert faults(problem, found) == []
    assert len(found.replicas) == 130
