"""The simulation of sequences in a pipeline that is scaled meanwhile."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest

from multiworld.serve.controller.scaling import reference_policies, token_policy
from multiworld.serve.controller.scaling.snapshot import Decision, Policy, Snapshot
from multiworld.serve.simulation import token_pipeline
from multiworld.serve.simulation.model_builder import pipeline_of, with_fleet
from multiworld.serve.simulation.pipeline import SimulationResult
from multiworld.serve.simulation.replay import simulate
from multiworld.serve.simulation.traces import generated
from multiworld.serve.spec.schema import ModelSpec

TRACE = "poisson:rate=6,seconds=60,prompt=300,answer=60"


def spec(**changes: Any) -> ModelSpec:
    scaled = {"min_replicas": 1, "max_replicas": 8, "upscale_delay_s": 2}
    asked = {
        "path": "x",
        "deadline_s": 300.0,
        "generation": {"ttft_ms": 2000, "tpot_ms": 60},
        "stages": [
            {"item_ms": cost, "autoscaling_config": scaled} for cost in (0.3, 0.6, 0.4)
        ],
        **changes,
    }
    return ModelSpec.model_validate(asked)


def run(
    policy: Policy, fleet: tuple[int, ...] = (1, 1, 1), **changes: Any
) -> SimulationResult:
    model = with_fleet(pipeline_of("m", spec(**changes), policy, None, 2.0), fleet)
    (found,) = simulate([model], [generated(TRACE)], random.Random(1).random)
    return found


@functools.cache
def fixed(count: int) -> SimulationResult:
    return run(reference_policies.fixed, (count, count, count))


def test_larger_fleet_attains_more() -> None:
    found = [fixed(count) for count in (1, 2, 3)]
    assert found[0].attained < found[1].attained < found[2].attained
    assert all(len(one.requests) == len(found[0].requests) for one in found)
    assert all(took >= 0 for _, took in found[2].requests)
    assert sum(found[0].replica_s) < sum(found[2].replica_s)


def test_no_sequence_is_lost_when_fleets_change_all_the_time() -> None:
    """Sequences move away from draining replicas, and to new ones."""
    chance = random.Random(2)

    def restless(snapshot: Snapshot) -> Decision:
        return Decision(replicas=tuple(chance.randint(1, 4) for _ in range(3)))

    found = run(restless)
    assert len(found.decided) > 20
    assert all(took >= 0 for _, took in found.requests)
    assert found.late == found.refused == 0


@pytest.mark.heavy
def test_scaling_by_tokens_attains_more_than_the_smallest_fleet() -> None:
    least = fixed(1)
    scaled = run(token_policy.decide)
    assert scaled.attained > 2 * least.attained


def test_deadlines_and_full_queues_count_as_lost() -> None:
    """The fleet is far too small for the load."""
    found = run(reference_policies.fixed, deadline_s=10.0, max_queued_requests=40)
    assert found.late > 0
    assert found.refused > 0
    assert found.attained < len(found.requests) - found.late - found.refused


def test_sequence_that_ends_after_its_deadline_is_not_attained() -> None:
    """Also if it has no objectives of its own."""
    found = run(reference_policies.fixed, deadline_s=10.0, generation={})
    assert found.late > 0
    assert found.attained + found.late + found.refused <= len(found.requests)


def test_sequences_of_one_scheduler_stay_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps that are split between replicas take longer."""
    together = fixed(3).attained
    monkeypatch.setattr(token_pipeline, "SPLIT", 0)
    assert run(reference_policies.fixed, (3, 3, 3)).attained < together


@pytest.mark.parametrize(("blocks", "max_model_len"), [(20, None), (1024, 300)])
def test_sequence_that_cannot_fit_is_refused(
    blocks: int, max_model_len: int | None
) -> None:
    """The service refuses such a sequence, too."""
    model = pipeline_of("m", spec(), reference_policies.fixed, None, 2.0)
    assert model.limits is not None
    limits = replace(model.limits, blocks=blocks)
    model = replace(model, limits=limits, max_model_len=max_model_len)
    trace = generated(TRACE.replace("seconds=60", "seconds=20"))
    longest = max_model_len or 19 * limits.block_size
    (found,) = simulate(
        [with_fleet(model, (3, 3, 3))], [trace], random.Random(1).random
    )
    assert found.refused == sum(a.prompt + a.answer > longest for a in trace)
    assert 0 < found.refused < len(trace)
