"""Score of a simulated run: goodput, SLO attainment, cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.serve.load.summary import quantile
from multiworld.serve.simulation.pipeline import SimulationResult

FLAP_S = 60.0  # seconds within which scaling one way and back counts as a flap


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of one model under one policy."""

    policy: str
    model: str
    requests: int
    # Share of requests answered within the objective; without an objective, share of
    # requests answered.
    attained: float
    goodput: float  # requests per second answered within the objective
    replica_s: float  # summed over all stages
    mean_replicas: float
    p50_s: float
    p99_s: float
    refused: int  # refused because of a full queue
    late: int  # not answered within their deadline
    changes: int
    flaps: int


def judge(policy: str, outcome: SimulationResult) -> Score:
    took = [seconds for _, seconds in outcome.requests if seconds >= 0]
    good = outcome.attained
    replica_s = sum(outcome.replica_s)
    seconds = max(outcome.seconds, 1e-9)
    return Score(
        policy=policy,
        model=outcome.model,
        requests=len(outcome.requests),
        attained=good / max(1, len(outcome.requests)),
        goodput=good / seconds,
        replica_s=replica_s,
        mean_replicas=replica_s / seconds,
        p50_s=quantile(took, 0.5),
        p99_s=quantile(took, 0.99),
        refused=outcome.refused,
        late=outcome.late,
        changes=len(outcome.decided),
        flaps=flaps([(d.at, d.before, d.after) for d in outcome.decided]),
    )


def flaps(changes: Sequence[tuple[float, Sequence[int], Sequence[int]]]) -> int:
    """Return how often a stage was scaled one way and back within ``FLAP_S``."""
    count = 0
    last: dict[int, tuple[float, int]] = {}
    for at, before, after in changes:
        for k, (old, new) in enumerate(zip(before, after, strict=True)):
            if old == new:
                continue
            way = 1 if new > old else -1
            then, other = last.get(k, (at, way))
            count += other != way and at - then <= FLAP_S
            last[k] = at, way
    return count
