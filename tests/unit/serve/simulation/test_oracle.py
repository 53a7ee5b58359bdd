"""The oracle: the cheapest fleet that meets the objective, if one does."""

from __future__ import annotations

import random
from dataclasses import replace

from multiworld.serve.controller.scaling import reference_policies
from multiworld.serve.controller.scaling.snapshot import StageLimits
from multiworld.serve.routing.load_balancer import Chance
from multiworld.serve.simulation.model_builder import seconds_of
from multiworld.serve.simulation.oracle import with_foresight
from multiworld.serve.simulation.pipeline import Arrival, PipelineModel, StageModel
from multiworld.serve.simulation.replay import simulate
from multiworld.serve.simulation.score import Score, judge


def chance() -> Chance:
    """Return the same random choices each time."""
    return random.Random(7).random


def model(objective_s: float | None, max_replicas: int = 20) -> PipelineModel:
    limits = StageLimits(
        max_replicas=max_replicas,
        upscale_delay_s=1,
        downscale_delay_s=5,
        look_back_period_s=5,
    )
    stage = StageModel(
        name="s",
        seconds=seconds_of({1: 0.2}),
        limits=limits,
        item_s=0.2,
        max_batch_size=1,
    )
    return PipelineModel(
        name="m",
        stages=(stage,),
        policy=reference_policies.fixed,
        objective_s=objective_s,
        start_s=1.0,
    )


def score(tried: PipelineModel, arrivals: list[Arrival]) -> Score:
    (outcome,) = simulate([tried], [arrivals], chance())
    return judge("x", outcome)


def burst(count: int, at: float) -> list[Arrival]:
    return [Arrival(at + 2 * n / count) for n in range(count)]


ARRIVALS = [Arrival(0.0), *burst(40, 20.0), *burst(40, 60.0)]


def test_oracle_is_ready_for_a_burst_that_nobody_could_foresee() -> None:
    plain = model(1.0)
    knowing = with_foresight(plain, ARRIVALS, chance)
    assert score(plain, ARRIVALS).attained < 0.5
    assert score(knowing, ARRIVALS).attained >= plain.objective_share


def test_oracle_is_cheap_between_bursts() -> None:
    plain = model(1.0)
    found = score(with_foresight(plain, ARRIVALS, chance), ARRIVALS)
    stage = replace(plain.stages[0], limits=None, replicas=20)
    always = score(replace(plain, stages=(stage,)), ARRIVALS)
    assert found.replica_s < always.replica_s / 2


def test_first_margin_that_meets_the_objective_is_taken() -> None:
    """A larger margin would cost more."""
    runs = 0

    def counted() -> Chance:
        nonlocal runs
        runs += 1
        return chance()

    easy = [Arrival(float(n)) for n in range(10)]
    knowing = with_foresight(model(5.0), easy, counted)
    assert score(knowing, easy).attained == 1.0
    assert runs == 1


def test_objective_that_cannot_be_met_gets_the_best_there_is() -> None:
    runs = 0

    def counted() -> Chance:
        nonlocal runs
        runs += 1
        return chance()

    plain = model(0.3, max_replicas=2)
    knowing = with_foresight(plain, ARRIVALS, counted)
    found = score(knowing, ARRIVALS)
    assert runs == len(reference_policies.MARGINS)
    assert found.attained < plain.objective_share
    assert found.attained >= score(plain, ARRIVALS).attained
    (outcome,) = simulate([knowing], [ARRIVALS], chance())
    assert max(max(moment.wanted) for moment in outcome.moments) <= 2


def test_model_without_an_objective_answers_everything() -> None:
    """Without an objective, only the deadline can be missed."""
    knowing = with_foresight(model(None), ARRIVALS, chance)
    assert score(knowing, ARRIVALS).attained == 1.0


def test_model_itself_is_not_changed() -> None:
    """The caller compares several policies on the same model."""
    plain = model(1.0)
    knowing = with_foresight(plain, ARRIVALS, chance)
    assert plain.policy is reference_policies.fixed
    assert knowing.policy is not plain.policy
    assert knowing.stages == plain.stages
