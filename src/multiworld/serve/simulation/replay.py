"""Replay of traces in a simulation."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from multiworld.serve.routing.load_balancer import Chance
from multiworld.serve.simulation.pipeline import (
    Arrival,
    At,
    Pipeline,
    PipelineModel,
    Room,
    SimulationResult,
)
from multiworld.serve.simulation.token_pipeline import TokenPipeline

# Maximum random delay of a decision after its interval, in seconds. The real autoscaler
# polls, so its decisions are late, too.
POLL_S = 0.1


def simulate(
    models: Sequence[PipelineModel],
    arrivals: Sequence[Sequence[Arrival]],
    chance: Chance,
    room: Room | None = None,
) -> list[SimulationResult]:
    """Replay each model's trace, in order of time, and return the results."""
    heap: list[tuple[float, int, Callable[[float], None]]] = []
    numbers = itertools.count()

    def at(time: float, callback: Callable[[float], None]) -> None:
        heapq.heappush(heap, (time, next(numbers), callback))

    pipelines = [
        (Pipeline if m.limits is None else TokenPipeline)(m, at, chance, room or Room())
        for m in models
    ]
    last = max((a[-1].at for a in arrivals if a), default=0.0)
    for pipeline, trace, model in zip(pipelines, arrivals, models, strict=True):
        pipeline.begin()
        _feed(pipeline, iter(trace), at)
        _tick(pipeline, model.interval_s, last, at, chance)
    now = 0.0
    while heap:
        due, _, callback = heapq.heappop(heap)
        if due > last and not any(p.in_flight for p in pipelines):
            break
        now = due
        callback(now)
    return [pipeline.outcome(max(now, last)) for pipeline in pipelines]


def _feed(pipeline: Pipeline, trace: Iterator[Arrival], at: At) -> None:
    arrival = next(trace, None)
    if arrival is not None:

        def arrive(now: float) -> None:
            _feed(pipeline, trace, at)
            pipeline.arrive(arrival, now)

        at(arrival.at, arrive)


def _tick(
    pipeline: Pipeline, interval_s: float, last: float, at: At, chance: Chance
) -> None:
    """Schedule a decision every interval until no request is left."""

    def tick(now: float) -> None:
        pipeline.decide(now)
        if now <= last or pipeline.in_flight:
            at(now + interval_s + POLL_S * chance(), tick)

    at(interval_s, tick)
