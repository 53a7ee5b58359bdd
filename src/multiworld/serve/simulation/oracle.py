"""Oracle: the best fleet at every moment, given all future arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from multiworld.serve.controller.scaling import reference_policies
from multiworld.serve.routing.load_balancer import Chance
from multiworld.serve.simulation.model_builder import costs_of
from multiworld.serve.simulation.pipeline import Arrival, PipelineModel
from multiworld.serve.simulation.replay import simulate
from multiworld.serve.simulation.score import judge


def with_foresight(
    model: PipelineModel, arrivals: Sequence[Arrival], new_chance: Callable[[], Chance]
) -> PipelineModel:
    """Return the model with the cheapest oracle that meets the objective."""
    # If no oracle meets it, return the one with the best attainment.
    times = [arrival.at for arrival in arrivals]
    best, best_share = model, -1.0
    for margin in reference_policies.MARGINS:
        aim = model.objective_s, model.objective_share
        knowing = reference_policies.oracle(times, costs_of(model), *aim, margin)
        tried = replace(model, policy=knowing)
        (outcome,) = simulate([tried], [arrivals], new_chance())
        attained = judge("oracle", outcome).attained
        if attained > best_share:
            best, best_share = tried, attained
        if attained >= model.objective_share:
            break
    return best
