"""What is said to keep a model from answering more."""

from __future__ import annotations

import pytest

from multiworld.serve.controller.observe.bottlenecks import bottleneck_of
from multiworld.serve.controller.observe.facts import ReplicaFacts, StageFacts
from multiworld.serve.wire.control_messages import ModelLoad

STAGES = (
    StageFacts("front", 1, ("m/0/1",)),
    StageFacts("back", 2, ("m/1/2", "m/1/3")),
)


def replicas(**changes: dict[str, object]) -> dict[str, ReplicaFacts]:
    found = {}
    for name in ("m/0/1", "m/1/2", "m/1/3"):
        about: dict[str, object] = {
            "model": "m",
            "version": "1",
            "stage": int(name[2]),
            "phase": "ready",
            "since_s": 1.0,
            "pid": 1,
            "node": "",
            **changes.get(name[4:] and f"r{name[-1]}", {}),
        }
        found[name] = ReplicaFacts(**about)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("changes", "waiting", "words"),
    [
        ({}, 0, ""),
        ({"r1": {"busy": 0.5}}, 0, ""),
        ({"r1": {"phase": "loaded"}}, 3, "stage front has no ready replica"),
        ({"r1": {"kv_usage": 0.97}}, 0, ""),
        ({"r1": {"kv_usage": 0.97, "queued": 4}}, 1, "full (97%), with 5 waiting"),
        ({"r2": {"busy": 0.9}, "r3": {"busy": 1.0}}, 7, "stage back computes 95%"),
        ({"r2": {"busy": 0.9}, "r3": {"busy": 0.2}}, 0, ""),
        (
            {"r2": {"busy": 0.9}, "r3": {"busy": 1.0, "slow": "why"}},
            7,
            "slow: m/1/3",
        ),
        ({"r1": {"busy": 0.9}, "r2": {"busy": 0.1}}, 0, "nothing waiting yet"),
        ({"r1": {"queued": 3}}, 0, "3 waiting, and no stage is saturated"),
    ],
)
def test_bottleneck_is_named(
    changes: dict[str, dict[str, object]], waiting: int, words: str
) -> None:
    found = bottleneck_of(STAGES, replicas(**changes), waiting)
    assert words in found
    assert bool(words) == bool(found)


def test_stage_at_zero_lacks_nothing() -> None:
    stages = (StageFacts("front", 0, ()), StageFacts("back", 0, ()))
    assert bottleneck_of(stages, {}, 0) == ""


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (ModelLoad(18, 18, 0), "a limit holds them back (max_num_seqs"),
        (ModelLoad(12, 21_000, 0), "long prompts hold them back"),
        (ModelLoad(8, 8, 1), "a limit holds them back (max_num_seqs"),
        (ModelLoad(8, 8, 4), "the compilation of grammars holds them back"),
        (ModelLoad(8, 7_200, 4), "long prompts hold them back and the compilation"),
    ],
)
def test_cause_of_a_wait_without_a_busy_stage_is_named(
    held: ModelLoad, words: str
) -> None:
    found = bottleneck_of(STAGES, replicas(), 18, held)
    assert f"18 waiting, and no stage is saturated: {words}" in found


def test_requests_whose_grammars_are_compiled_wait_at_no_stage() -> None:
    found = bottleneck_of(STAGES, replicas(), 0, ModelLoad(3, 0, 3))
    assert "3 waiting, and no stage is saturated: the compilation" in found
