"""The simulator: traces, queues, replicas, and scores of policies."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multiworld.errors import ServeError, SpecError
from multiworld.serve.controller.scaling import default_policy, reference_policies
from multiworld.serve.controller.scaling.policies import BUILT_IN
from multiworld.serve.controller.scaling.snapshot import Decision, Snapshot, StageLimits
from multiworld.serve.machines.amounts import Need, Node
from multiworld.serve.machines.bookings import Bookings
from multiworld.serve.simulation import traces
from multiworld.serve.simulation.model_builder import (
    Machines,
    costs_of,
    pipeline_of,
    seconds_of,
)
from multiworld.serve.simulation.pipeline import (
    Arrival,
    PipelineModel,
    SimulationResult,
    StageModel,
)
from multiworld.serve.simulation.replay import simulate
from multiworld.serve.simulation.score import flaps, judge
from multiworld.serve.spec.profiles import ModelProfile, StageProfile
from multiworld.serve.spec.schema import ModelSpec

LIMITS = StageLimits(
    max_replicas=6, upscale_delay_s=2, downscale_delay_s=30, look_back_period_s=10
)


def pipeline(
    *item_s: float, policy: Any = reference_policies.fixed, **more: Any
) -> PipelineModel:
    stages = tuple(
        StageModel(
            name=str(k),
            seconds=seconds_of({1: s}),
            limits=LIMITS,
            item_s=s,
        )
        for k, s in enumerate(item_s)
    )
    return PipelineModel(name="m", stages=stages, policy=policy, **more)


def run(
    model: PipelineModel, arrivals: list[Arrival], seed: int = 0
) -> SimulationResult:
    (found,) = simulate([model], [arrivals], random.Random(seed).random)
    return found


# Traces.


def test_traces_of_azure_and_burstgpt_and_plain_ones_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,100,0\n2023-11-16 18:17:04.9799600,300,0\n"
    )
    found = traces.read_trace(azure, by_tokens=True)
    assert [a.at for a in found] == pytest.approx([0.0, 1.0], abs=1e-4)
    assert [a.work for a in found] == [0.5, 1.5]
    burst = tmp_path / "burst.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n"
    )
    assert [(a.at, a.model) for a in traces.read_trace(burst)] == [
        (0.0, "ChatGPT"),
        (40.0, "GPT-4"),
    ]
    plain = tmp_path / "plain.csv"
    plain.write_text("3\n1\n2.5\n")
    assert [a.at for a in traces.read_trace(plain)] == [0.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\nxx,3\n", "line 3"),
        ("at,ContextTokens\n", "no request"),
        ("1\nnan\n", "line 2"),
        ("at,ContextTokens\n1,many\n", "line 2"),
    ],
)
def test_wrong_traces_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ServeError, match=said):
        traces.read_trace(path, by_tokens=True)


def test_generated_traces_are_as_described() -> None:
    found = traces.generated("poisson:rate=50,seconds=20+gamma:rate=5,seconds=20,cv=3")
    early = [a for a in found if a.at < 20]
    assert 800 < len(early) < 1200
    assert 30 < len(found) - len(early) < 250
    assert found == traces.generated(
        "poisson:rate=50,seconds=20+gamma:rate=5,seconds=20,cv=3"
    )
    for wrong in (
        "normal:rate=1,seconds=5",
        "poisson:rate=x",
        "poisson:rate=0",
        "poisson:rate=3,seconds=nan",
        "gamma:rate=inf,seconds=5,cv=2",
        "gamma:rate=3,seconds=5,cv=1e-200",
    ):
        with pytest.raises(ServeError, match=r"write|without any"):
            traces.generated(wrong)


# Queues.


def test_queue_waits_as_long_as_theory_says() -> None:
    """M/D/1 at 70 % has a mean wait of rho / (2 (1 - rho)) services."""
    model = pipeline(0.1)
    alone = replace(model, stages=(replace(model.stages[0], max_batch_size=1),))
    found = run(alone, traces.gamma(7.0, 8000.0))
    took = [seconds for _, seconds in found.requests]
    mean = sum(took) / len(took)
    assert mean == pytest.approx(0.1 + 0.1 * 0.7 / (2 * 0.3), rel=0.05)


def test_batches_and_pipeline_are_those_of_the_model() -> None:
    """Of three requests at once, the first is computed alone, the others together."""
    model = pipeline(1.0, 2.0)
    found = run(model, [Arrival(0.0)] * 3)
    assert [round(took, 6) for _, took in found.requests] == [3.0, 7.0, 7.0]
    assert found.replica_s == (7.0, 7.0)


def test_batch_waits_for_company_and_no_longer() -> None:
    model = pipeline(0.1)
    stage = replace(model.stages[0], max_batch_size=2, max_wait_s=0.5)
    waiting = replace(model, stages=(stage,))
    alone = run(waiting, [Arrival(1.0)])
    assert [took for _, took in alone.requests] == pytest.approx([0.6])
    two = run(waiting, [Arrival(1.0), Arrival(1.2), Arrival(2.0)])
    assert [took for _, took in two.requests] == pytest.approx([0.4, 0.2, 0.6])
    # The time of a batch counts as waiting for requests that arrive during it.
    three = run(waiting, [Arrival(1.0), Arrival(1.0), Arrival(1.1)])
    assert [took for _, took in three.requests] == pytest.approx([0.2, 0.2, 0.6])


def test_full_queue_refuses_and_deadline_is_kept() -> None:
    model = pipeline(1.0, max_queued_requests=3, deadline_s=2.5)
    stage = replace(model.stages[0], max_batch_size=1, window=1)
    found = run(replace(model, stages=(stage,)), [Arrival(0.0)] * 6)
    answered = [took for _, took in found.requests if took >= 0]
    assert answered == [1.0, 2.0]
    assert found.refused + found.late == 4
    assert found.refused >= 1


def test_replicas_that_are_drained_end_their_work_first() -> None:
    def restless(snapshot: Snapshot) -> Decision:
        count = 1 + int(snapshot.now) % 3
        return Decision(replicas=(count, 4 - count))

    model = pipeline(0.05, 0.08, policy=restless, start_s=0.3)
    found = run(model, traces.gamma(10.0, 120.0))
    assert found.refused == found.late == 0
    assert all(took > 0 for _, took in found.requests)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_request_is_accounted_for(data: Any) -> None:
    counts = data.draw(
        st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=30)
    )

    def erratic(snapshot: Snapshot) -> Decision:
        pair = counts[int(snapshot.now) % len(counts)]
        is_asked = snapshot.samples[-1].stages[0].ongoing > 0
        return Decision(replicas=(max(pair[0], int(is_asked)), pair[1]))

    rate = data.draw(st.floats(0.5, 60.0))
    model = pipeline(0.03, 0.02, policy=erratic, deadline_s=5.0, start_s=0.5)
    arrivals = traces.gamma(rate, 20.0, cv=2.0, seed=data.draw(st.integers(0, 99)))
    found = run(model, arrivals)
    lost = sum(took < 0 for _, took in found.requests)
    assert len(found.requests) == len(arrivals)
    assert lost == found.refused + found.late


def test_no_replica_runs_without_requests() -> None:
    limits = replace(LIMITS, min_replicas=0, downscale_delay_s=5)
    model = pipeline(0.1, 0.1, policy=default_policy.decide, start_s=2.0)
    stages = tuple(replace(s, limits=limits, replicas=0) for s in model.stages)
    found = run(replace(model, stages=stages), [Arrival(10.0), Arrival(100.0)])
    assert [round(took, 3) for _, took in found.requests] == [2.2, 2.2]
    assert sum(found.replica_s) < 2 * 2 * 25


def test_simulation_ends_whatever_the_policy_does() -> None:
    def never(snapshot: Snapshot) -> Decision:
        return Decision(replicas=(0,))

    limits = replace(LIMITS, min_replicas=0)
    model = pipeline(0.1, policy=never, deadline_s=3.0)
    stage = replace(model.stages[0], limits=limits, replicas=0)
    found = run(replace(model, stages=(stage,)), [Arrival(0.0), Arrival(1.0)])
    assert (found.late, found.refused) == (2, 0)
    assert found.seconds < 10


def test_machines_limit_what_is_started() -> None:
    room = Machines(
        Bookings([Node("a", cpus=2.0, memory_bytes=2**30)]), {"m": (Need(cpus=1.0),)}
    )
    model = pipeline(0.5, policy=default_policy.decide)
    arrivals = traces.gamma(8.0, 60.0)
    (found,) = simulate([model], [arrivals], random.Random(0).random, room)
    assert max(sum(m.ready) for m in found.moments) == 2
    assert max(sum(m.wanted) for m in found.moments) == 2


def test_decision_is_reduced_to_what_fits_as_in_the_service() -> None:
    """Room for five of eight: not four of the first stage and one of the second."""
    needs = (Need(cpus=1.0), Need(cpus=1.0))
    room = Machines(Bookings([Node("a", cpus=5.0, memory_bytes=2**30)]), {"m": needs})
    seen: list[tuple[int, ...]] = []

    def most(snapshot: Snapshot) -> Decision:
        seen.append(tuple(stage.replicas for stage in snapshot.stages))
        return Decision(replicas=(4, 4))

    model = pipeline(0.02, 0.02, policy=most)
    simulate([model], [traces.gamma(8.0, 30.0)], random.Random(0).random, room)
    assert seen[-1] in {(3, 2), (2, 3)}


# Policies compared.


def test_own_policy_is_better_than_a_plain_one_on_bursts() -> None:
    arrivals = traces.generated(
        "poisson:rate=3,seconds=120+poisson:rate=25,seconds=120+poisson:rate=3,seconds=300"
        "+poisson:rate=20,seconds=60+poisson:rate=2,seconds=200"
    )
    verdicts = {}
    for name, chosen in {
        "own": default_policy.decide,
        **BUILT_IN,
    }.items():
        model = pipeline(0.03, 0.1, 0.05, policy=chosen, objective_s=1.0)
        verdicts[name] = judge(name, run(model, arrivals))
    own = verdicts["own"]
    assert own.flaps < verdicts["queued"].flaps
    assert own.refused == own.late == 0
    assert own.attained > 0.93
    assert own.attained > verdicts["threshold"].attained
    assert own.attained > verdicts["queued"].attained
    model = pipeline(0.03, 0.1, 0.05, objective_s=1.0)
    knows = reference_policies.oracle([a.at for a in arrivals], costs_of(model), 1.0)
    best = judge("oracle", run(replace(model, policy=knows), arrivals))
    assert best.attained > 0.97
    assert own.replica_s < 2.5 * best.replica_s


def test_verdict_counts_what_it_says() -> None:
    """A flap is a change that is reverted within a minute."""
    model = pipeline(1.0, objective_s=1.5)
    stage = replace(model.stages[0], max_batch_size=1)
    found = judge("x", run(replace(model, stages=(stage,)), [Arrival(0.0)] * 4))
    assert found.attained == 0.25
    assert found.p99_s == 4.0
    changes = [(0.0, (1,), (2,)), (30.0, (2,), (1,)), (200.0, (1,), (3,))]
    assert flaps(changes) == 1


def profile_of(*curves: dict[int, float]) -> ModelProfile:
    stages = [
        StageProfile(
            name="s",
            weight_bytes=0,
            loaded_bytes=0,
            peak_bytes=0,
            out_bytes=0.0,
            seconds=seconds,
        )
        for seconds in curves
    ]
    return ModelProfile(
        model="m", version="1", device="cpu", threads=1, base_bytes=0, stages=stages
    )


def test_specs_say_what_is_simulated() -> None:
    spec = ModelSpec.model_validate(
        {
            "factory": "a:b",
            "objective_ms": 200,
            "stages": [
                {"name": "x", "item_ms": 5, "max_batch_size": 4},
                {"name": "y", "autoscaling_config": {"max_replicas": 3}},
            ],
        }
    )
    with pytest.raises(SpecError, match="item_ms"):
        pipeline_of("m", spec, reference_policies.fixed, None, 1.0)
    model = pipeline_of(
        "m", spec, reference_policies.fixed, profile_of({}, {1: 0.01, 4: 0.02}), 1.0
    )
    assert model.objective_s == 0.2
    assert model.stages[0].limits is None
    assert model.stages[1].limits == StageLimits(max_replicas=3)
    assert model.stages[1].seconds(2.5) == pytest.approx(0.015)
    assert model.stages[1].seconds(7.0) == pytest.approx(0.03)
    assert model.stages[1].item_s == 0.005
    single = spec.model_copy(
        update={
            "stages": [s.model_copy(update={"max_batch_size": 1}) for s in spec.stages]
        }
    )
    measured = profile_of({}, {1: 0.01, 4: 0.02})
    model = pipeline_of("m", single, reference_policies.fixed, measured, 1.0)
    assert model.stages[1].item_s == 0.01
