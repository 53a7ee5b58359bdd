"""The burst reserve: replicas kept for recurring bursts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.controller.scaling import default_policy
from multiworld.serve.controller.scaling.burst_reserve import (
    EVERY_SIZE_UP_TO,
    BurstRecord,
    BurstReserve,
    candidate_sizes,
    reserved_replicas,
    update,
)
from multiworld.serve.simulation.oracle import with_foresight
from multiworld.serve.simulation.pipeline import (
    Arrival,
    PipelineModel,
    SimulationResult,
)
from multiworld.serve.simulation.replay import simulate
from multiworld.serve.simulation.score import judge
from tests.unit.serve.simulation.test_pipeline import LIMITS, pipeline, run

EVERY_S = 50.0
BURST = 30
BURSTS = [Arrival(EVERY_S * n + k / 1000) for n in range(1, 25) for k in range(BURST)]
"""Thirty requests at once, 24 times; five replicas of 0.1 s compute them in 0.6 s."""


def model(start_s: float = 3.0, **more: Any) -> PipelineModel:
    """Return a model of one stage whose new replicas come too late for any burst."""
    made = pipeline(0.1, policy=default_policy.decide, objective_s=0.7, start_s=start_s)
    stage = replace(made.stages[0], max_batch_size=1)
    return replace(made, **{"stages": (stage,), **more})


def missed(outcome: SimulationResult, since_s: float) -> int:
    limit = outcome.objective_s
    assert limit is not None
    return sum(not 0 <= s <= limit for at, s in outcome.requests if at >= since_s)


def test_recurring_bursts_find_enough_replicas() -> None:
    """Without a reserve, the replicas would be drained 30 s after each burst."""
    outcome = run(model(), BURSTS)
    assert missed(outcome, 0.0) > 20, "the first ones could not be known"
    later = [a for a in BURSTS if a.at >= EVERY_S * 5]
    assert missed(outcome, EVERY_S * 5) <= 0.02 * len(later)
    kept = [m.ready[0] for m in outcome.moments if m.at >= EVERY_S * 5]
    assert min(kept) >= 3
    assert max(kept) <= 6, "no more than it takes"
    assert any("burst reserve" in d.why for d in outcome.decided)


def test_lower_objective_share_needs_a_smaller_reserve() -> None:
    """A lower ``objective_share`` needs a smaller reserve."""
    all_ = judge("all", run(model(), BURSTS))
    some = judge("some", run(model(objective_share=0.6), BURSTS))
    assert all_.attained > some.attained > 0.55
    assert some.replica_s < 0.8 * all_.replica_s


@pytest.mark.parametrize("busy_s", [0, 600])
def test_reserve_is_released_after_its_horizon(busy_s: int) -> None:
    """A busy period after the bursts does not prolong the reserve."""
    end_s = BURSTS[-1].at
    busy = [Arrival(end_s + 10.0 + n / 40) for n in range(40 * busy_s)]
    end_s += busy_s + 10.0
    quiet = [Arrival(end_s + 2.0 * n) for n in range(1, 600)]
    outcome = run(model(), [*BURSTS, *busy, *quiet])
    horizon_s = default_policy.RESERVE_HORIZON * LIMITS.downscale_delay_s
    later = [m.ready for m in outcome.moments if m.at > end_s + horizon_s * 1.25]
    assert outcome.moments[-1].ready == (1,)
    assert set(later) <= {(1,)}
    assert not outcome.decided[-1].after > (1,)


def test_fixed_stages_do_not_prolong_the_reserve() -> None:
    """A stage with a fixed number of replicas has no stabilization windows."""
    made = model()
    fixed = replace(made.stages[0], name="fixed", limits=None, replicas=6)
    end_s = BURSTS[-1].at
    quiet = [Arrival(end_s + 2.0 * n) for n in range(1, 400)]
    outcome = run(replace(made, stages=(*made.stages, fixed)), [*BURSTS, *quiet])
    assert any("burst reserve" in d.why for d in outcome.decided)
    assert outcome.moments[-1].ready == (1, 6)


def test_refused_requests_count_as_missed() -> None:
    """Refused requests count as missed, though they never waited."""
    narrow = replace(model().stages[0], window=2)
    outcome = run(model(max_queued_requests=4, stages=(narrow,)), BURSTS)
    assert any("burst reserve" in d.why for d in outcome.decided)

    def refused(since_s: float) -> int:
        bursts = [t for at, t in outcome.requests if since_s <= at < since_s + 160]
        return sum(took < 0 for took in bursts)

    assert refused(EVERY_S * 15) < 0.7 * refused(EVERY_S)


def test_batches_do_not_make_an_objective_unreachable() -> None:
    """Large batches of a burst are slow, but an idle service meets the objective."""
    stage = replace(model().stages[0], max_batch_size=16, item_s=None)
    slow = replace(model(), stages=(stage,), objective_s=1.0)
    outcome = run(slow, BURSTS)
    assert missed(outcome, EVERY_S * 5) < 0.4 * 600
    assert missed(outcome, 0.0) > 30


def test_no_reserve_is_kept_if_the_objective_is_met() -> None:
    """Replicas that start at once need no reserve."""
    long = [Arrival(100.0 * n + k / 20) for n in range(1, 12) for k in range(400)]
    quick = run(replace(model(start_s=0.05), objective_s=3.0), long)
    assert missed(quick, 0.0) < 0.01 * len(long)
    assert not any("burst reserve" in d.why for d in quick.decided)
    assert min(m.ready[0] for m in quick.moments if m.at > 500) == 1


def test_model_that_scales_to_zero_keeps_no_reserve() -> None:
    """A model that scales to zero keeps no reserve while it is idle."""
    stage = replace(model().stages[0], limits=replace(LIMITS, min_replicas=0))
    outcome = run(replace(model(), stages=(stage,)), BURSTS)
    assert missed(outcome, EVERY_S * 5) > 0
    before_next = EVERY_S * 10 - 1
    (ready,) = [m for m in outcome.moments if m.at <= before_next][-1].ready
    assert ready == 0


def record(arrived: float, missed: float, **more: Any) -> BurstRecord:
    of: dict[str, Any] = {
        "seconds": 1.0,
        "objective_share": 0.99,
        "item_s": [0.1],
        "refused": 0.0,
        "min_replicas": [1],
        "max_replicas": [8],
        "ready": [1],
        "max_wait_s": 0.5,
        "deadline_s": 30.0,
        "burst_gap_s": 5.0,
        "ongoing": [missed],
    }
    return BurstRecord(**{**of, "arrived": arrived, "missed": missed, **more})


def after(*all_: BurstRecord) -> BurstReserve:
    found = BurstReserve()
    for one in all_:
        found = update(found, one, 1000.0)
    return found


def apart(*all_: BurstRecord) -> list[BurstRecord]:
    """Return the records twice, each time followed by a quiet period."""
    return [*all_, *[record(0.0, 0.0) for _ in range(6)]] * 2


def test_answers_that_did_not_wait_need_no_reserve() -> None:
    """An objective that even an idle service misses must not claim all replicas."""
    found = after(*[record(5.0, 5.0, ongoing=[0.5]) for _ in range(100)])
    assert found.recent.missed == found.arrived
    assert reserved_replicas(found, [0.1], 0.99) == (0,)
    waiting = after(*apart(*[record(5.0, 5.0, ongoing=[5.0]) for _ in range(100)]))
    assert reserved_replicas(waiting, [0.1], 0.99) > (1,)


def test_reserve_does_not_depend_on_the_sampling_interval() -> None:
    """The arrivals of a long interval do not count as simultaneous."""
    often = after(*[record(10.0, 0.0)] * 100)
    seldom = after(*[record(100.0, 0.0, seconds=10.0)] * 10)
    assert often.fleets == seldom.fleets


def test_single_burst_needs_no_reserve() -> None:
    found = after(*[record(100.0, 90.0, ongoing=[90.0])] * 20)
    assert reserved_replicas(found, [0.1], 0.99) == (0,)


def test_reserve_is_the_smallest_sufficient_fleet() -> None:
    """Two replicas compute thirty requests in 1.5 s; one would be too slow."""
    found = after(*[record(30.0, 20.0), *[record(0.0, 0.0) for _ in range(9)]] * 10)
    assert reserved_replicas(found, [0.1], 0.99) == (2,)


def test_reserve_grows_if_the_fluid_model_is_too_optimistic() -> None:
    """If more requests are late than the fluid model predicts, the reserve grows."""
    smooth = after(*apart(record(12.0, 3.0)) * 30)
    assert max(f.late[0] for f in smooth.actual) < smooth.missed
    assert reserved_replicas(smooth, [0.1], 0.99) == (2,)


def test_no_stage_is_kept_larger_than_the_bottleneck_needs() -> None:
    """The bottleneck passes 20 requests/s; two replicas of the other stage suffice."""
    both = {"item_s": [0.1, 0.1], "max_replicas": [2, 8], "ready": [2, 1]}
    waiting = record(80.0, 60.0, **both, ongoing=[60.0, 0.0])
    quiet = [replace(waiting, arrived=0.0, missed=0.0, ongoing=[0.0, 0.0])] * 6
    found = after(*[*[waiting] * 20, *quiet] * 2)
    assert reserved_replicas(found, [0.1, 0.1], 0.99) == (2, 2)


@given(
    st.integers(1, 3000),
    st.lists(st.tuples(st.floats(0, 500), st.floats(0, 1)), max_size=20),
)
def test_more_replicas_are_never_later(
    most: int, story: list[tuple[float, float]]
) -> None:
    assert candidate_sizes(most)[0] == 1
    assert candidate_sizes(most)[-1] == most
    assert candidate_sizes(min(most, EVERY_SIZE_UP_TO)) == list(
        range(1, min(most, EVERY_SIZE_UP_TO) + 1)
    )
    found = after(
        *[
            record(arrived, arrived * share, max_replicas=[most])
            for arrived, share in story
        ]
    )
    for fleets in found.fleets:
        for fewer, more in pairwise(fleets):
            waits = fewer.queue / fewer.replicas, more.queue / more.replicas
            assert waits[0] >= waits[1] - 1e-6
            for late, rarer in zip(fewer.late, more.late, strict=True):
                assert late >= rarer - 1e-6
    assert all(0 <= n <= most for n in reserved_replicas(found, [0.1], 0.99)[:1])


@pytest.mark.parametrize("share", [0.9, 0.99])
def test_oracle_reaches_the_objective_with_fewer_replica_seconds(share: float) -> None:
    """The oracle knows the bursts and keeps nothing between them."""
    asked = model(objective_share=share)
    knowing = with_foresight(asked, BURSTS, lambda: random.Random(0).random)
    (outcome,) = simulate([knowing], [BURSTS], random.Random(0).random)
    best, own = judge("oracle", outcome), judge("own", run(asked, BURSTS))
    assert best.attained >= share
    assert best.replica_s < own.replica_s


def test_limits_are_those_of_the_tests() -> None:
    """Bursts are further apart than the stabilization window for scaling down."""
    assert LIMITS.downscale_delay_s < EVERY_S
    assert default_policy.RESERVE_HORIZON * LIMITS.downscale_delay_s > 3 * EVERY_S
