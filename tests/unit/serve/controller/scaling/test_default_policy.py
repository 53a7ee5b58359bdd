"""The default autoscaling policy: its parts, and whole situations."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from multiworld.errors import SpecError
from multiworld.serve.controller.fleet.desired_state import with_new_versions_started
from multiworld.serve.controller.fleet.state import DesiredModel, DesiredState
from multiworld.serve.controller.scaling import (
    default_policy,
    queue_model,
)
from multiworld.serve.controller.scaling.demand import demand_of, envelope
from multiworld.serve.controller.scaling.limits import within
from multiworld.serve.controller.scaling.policies import BUILT_IN
from multiworld.serve.controller.scaling.samples import ObservedReplica, SampleWindow
from multiworld.serve.controller.scaling.scaling_plans import (
    StageCost,
    plan_for,
    plans_of,
)
from multiworld.serve.controller.scaling.snapshot import (
    Decision,
    Sample,
    Snapshot,
    StageLimits,
    StageNow,
    StageSeen,
)
from multiworld.serve.controller.scaling.snapshot_json import (
    snapshot_from_json,
    snapshot_to_json,
)
from multiworld.serve.controller.scaling.stabilization import (
    PendingChange,
    remember,
    stabilized,
)
from multiworld.serve.engine.models.factory import check_policies
from multiworld.serve.spec.schema import AppSpec
from multiworld.serve.wire.control_messages import (
    GatewayReport,
    Reports,
    WorkerReport,
)

QUICK = StageLimits(
    max_replicas=8, upscale_delay_s=2, downscale_delay_s=10, look_back_period_s=10
)


def costs(*item_s: float, limits: StageLimits = QUICK) -> list[StageCost]:
    return [StageCost(item_s=s, batch_s=s, limits=limits) for s in item_s]


class Situation:
    """A simulated model that computes arrivals at once, under a load of the test."""

    def __init__(
        self,
        item_s: tuple[float, ...],
        limits: StageLimits = QUICK,
        objective_s: float | None = 1.0,
        policy: Any = default_policy.decide,
    ) -> None:
        self.item_s, self.limits, self.policy = item_s, limits, policy
        self.objective_s = objective_s
        self.replicas = tuple(max(1, limits.min_replicas) for _ in item_s)
        self.now, self.arrived, self.memory = 0.0, 0.0, None
        self.ongoing = [0.0] * len(item_s)
        self.samples: list[Sample] = [self.sample()]
        self.changes: list[tuple[float, tuple[int, ...]]] = []

    def sample(self) -> Sample:
        stages = tuple(
            StageSeen(
                ongoing=self.ongoing[k],
                ready=self.replicas[k],
                requests=int(self.arrived),
                batches=int(self.arrived),
                busy_s=int(self.arrived) * s,
            )
            for k, s in enumerate(self.item_s)
        )
        return Sample(at=self.now, arrived=int(self.arrived), stages=stages)

    def snapshot(self) -> Snapshot:
        stages = tuple(
            StageNow(name=str(k), replicas=n, limits=self.limits, item_s=self.item_s[k])
            for k, n in enumerate(self.replicas)
        )
        return Snapshot(
            model="m",
            now=self.now,
            stages=stages,
            samples=tuple(self.samples[-60:]),
            objective_s=self.objective_s,
            start_s=1.0,
            memory=self.memory,
        )

    def play(self, rate: float, seconds: int, noise: list[float] | None = None) -> None:
        """Let requests arrive at ``rate``, with one decision a second."""
        for second in range(seconds):
            self.now += 1.0
            self.arrived += rate * (noise[second % len(noise)] if noise else 1.0)
            self.samples.append(self.sample())
            decision = self.policy(self.snapshot())
            self.memory = decision.memory
            if tuple(decision.replicas) != self.replicas:
                self.replicas = tuple(decision.replicas)
                self.changes.append((self.now, self.replicas))


# Queue model, scaling plans.


def test_waiting_is_that_of_a_queue_that_is_known_exactly() -> None:
    """M/M/1 waits rho / (1 - rho) services; M/D/1 waits half of it."""
    assert queue_model.mean_wait_s(0.5, 1.0, 1) == pytest.approx(1.0)
    assert queue_model.mean_wait_s(0.8, 1.0, 1) == pytest.approx(4.0)
    assert queue_model.mean_wait_s(0.8, 1.0, 1, 0.5) == pytest.approx(2.0)
    # M/M/1: P(W > t) = rho exp(-(mu - lambda) t)
    exact = math.log(0.8 / 0.01) / 0.2
    assert queue_model.wait_quantile_s(0.8, 1.0, 1) == pytest.approx(exact)
    assert math.isinf(queue_model.mean_wait_s(1.0, 1.0, 1))
    assert queue_model.wait_quantile_s(0.001, 1.0, 1) == 0.0


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=4),
    st.integers(1, 6),
    st.sampled_from([None, 0.5, 3.0]),
)
def test_scaling_plans_grow_and_stay_within_limits(
    item_s: list[float], most: int, objective_s: float | None
) -> None:
    found = plans_of(costs(*item_s, limits=StageLimits(max_replicas=most)), objective_s)
    assert found
    for one, other in pairwise(found):
        assert other.rate > one.rate
        assert all(b >= a for a, b in zip(one.replicas, other.replicas, strict=True))
    for plan in found:
        assert all(1 <= count <= most for count in plan.replicas)
        assert plan_for(found, plan.rate) == found.index(plan)
    assert plan_for(found, found[-1].rate * 2) == len(found) - 1


def test_plans_of_many_replicas_are_few() -> None:
    """Plans grow by a sixteenth, so their number is logarithmic in the replicas."""
    limits = StageLimits(max_replicas=4096)
    found = plans_of(costs(0.01, 0.04, 0.02, limits=limits), 0.5)
    assert len(found) < 400
    assert max(found[-1].replicas) == 4096
    rates = [plan.rate for plan in found]
    assert rates == sorted(rates)


def test_scaling_plans_widen_the_narrowest_stage() -> None:
    last = plans_of(costs(0.01, 0.04, 0.02), 0.5)
    wide = last[plan_for(last, 50.0)].replicas
    assert wide[1] > wide[2] >= wide[0]


def test_objective_that_nothing_can_meet_does_not_take_everything() -> None:
    """Even an idle service takes longer, so more replicas would not help."""
    found = plans_of(costs(0.5, 0.5), objective_s=0.1)
    assert found[0].rate > 0


# Demand.


def sampled(counts: list[float]) -> list[Sample]:
    total, found = 0.0, [Sample(at=0.0, arrived=0, stages=())]
    for second, count in enumerate(counts, 1):
        total += count
        found.append(Sample(at=float(second), arrived=round(total), stages=()))
    return found


def test_steady_load_is_expected_to_stay() -> None:
    found = demand_of(sampled([5.0] * 60), 30.0, 2.0, 1.0)
    assert found.rate == pytest.approx(5.0)
    assert (found.slope, found.is_burst) == (0.0, False)
    assert found.expected == found.rate


def test_trend_is_followed_and_noise_is_not() -> None:
    rising = demand_of(sampled([n / 2 for n in range(60)]), 30.0, 5.0, 1.0)
    assert rising.slope == pytest.approx(0.5, rel=0.1)
    assert rising.expected > rising.rate > 20
    scattered = demand_of(sampled([3, 9, 2, 7, 8, 1, 5, 6] * 8), 30.0, 5.0, 1.0)
    assert scattered.slope == 0.0


def test_burst_counts_fully_at_once() -> None:
    """A burst counts fully, not averaged over the look-back period."""
    found = demand_of(sampled([2.0] * 40 + [20.0] * 3), 30.0, 1.0, 1.0)
    assert found.is_burst
    assert found.rate > 10


def test_envelope_is_the_rate_that_absorbs_a_burst() -> None:
    """Thirty requests in two seconds, plus one second of waiting, need ten a second."""
    quiet = sampled([0.0] * 10 + [30.0] + [0.0] * 10)
    assert envelope(quiet, 30.0, 2.0) == pytest.approx(10.0)
    assert envelope(sampled([4.0] * 20), 30.0, 0.0) == pytest.approx(4.0)


# Stabilization.


def needed(
    pairs: list[tuple[float, int]], limits: StageLimits
) -> tuple[PendingChange, ...]:
    found: tuple[PendingChange, ...] = ()
    for at, count in pairs:
        found = remember(found, PendingChange(at, count, count), limits)
    return found


@pytest.mark.parametrize(
    ("pairs", "replicas", "is_urgent", "after"),
    [
        ([(0, 3)], 1, False, 1),  # not for long enough
        ([(0, 3), (1, 4), (2, 5)], 1, False, 3),  # what was needed all the time
        ([(0, 3), (1, 1), (2, 5)], 1, False, 1),  # not all the time
        ([(0, 1), (1, 5)], 1, True, 5),
        ([(0, 2)], 0, False, 2),  # from nothing at once
        ([(0, 1), (5, 1), (10, 1)], 3, False, 1),
        ([(0, 1), (5, 2), (10, 1)], 3, False, 2),  # as many as were needed once
        ([(1, 1), (10, 1)], 3, False, 3),
        ([(0, 9), (1, 9), (2, 9)], 1, False, 8),  # never more than max_replicas
    ],
)
def test_need_is_applied_after_its_stabilization_window(
    pairs: list[tuple[float, int]], replicas: int, is_urgent: bool, after: int
) -> None:
    """The stabilization windows work like Ray Serve's delays."""
    needs = needed(pairs, QUICK)
    assert stabilized(needs, replicas, QUICK, is_urgent=is_urgent) == after


def test_last_replica_is_released_after_its_own_delay() -> None:
    limits = replace(QUICK, min_replicas=0, downscale_to_zero_delay_s=20.0)
    needs = needed([(float(t), 0) for t in range(12)], limits)
    assert stabilized(needs, 3, limits, is_urgent=False) == 1
    assert stabilized(needs, 1, limits, is_urgent=False) == 1
    needs = needed([(float(t), 0) for t in range(22)], limits)
    assert stabilized(needs, 1, limits, is_urgent=False) == 0


def test_factors_make_steps_smaller() -> None:
    """A factor of 0.5 halves the change, but never below one replica."""
    limits = replace(QUICK, upscaling_factor=0.5, downscaling_factor=0.5)
    up = needed([(0, 7), (1, 7), (2, 7)], limits)
    assert stabilized(up, 1, limits, is_urgent=False) == 4
    down = needed([(0, 1), (10, 1)], limits)
    assert stabilized(down, 6, limits, is_urgent=False) == 4
    assert stabilized(down, 2, limits, is_urgent=False) == 1


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=1, max_size=40),
    st.integers(1, 8),
    st.booleans(),
)
def test_stabilized_replicas_stay_within_limits(
    needs: list[tuple[int, int]], replicas: int, is_urgent: bool
) -> None:
    found: tuple[PendingChange, ...] = ()
    for at, (low, margin) in enumerate(needs):
        need = PendingChange(float(at), min(low, 8), min(low + margin, 8))
        found = remember(found, need, QUICK)
        replicas = stabilized(found, replicas, QUICK, is_urgent=is_urgent)
        assert QUICK.min_replicas <= replicas <= QUICK.max_replicas


# The policy as a whole.


def test_all_stages_are_scaled_together() -> None:
    at = Situation((0.02, 0.08, 0.04))
    at.play(2.0, 30)
    assert at.replicas == (1, 1, 1)
    at.play(30.0, 8)
    assert at.replicas[1] >= 3
    assert at.replicas[2] >= 2
    assert len(at.changes) <= 3


def test_noise_changes_nothing() -> None:
    at = Situation((0.02, 0.08, 0.04))
    noise = [0.6, 1.5, 1.1, 0.8, 1.3, 0.4, 1.2, 1.1]
    at.play(12.0, 60, noise)
    settled_at = len(at.changes)
    at.play(12.0, 600, noise)
    assert at.changes[settled_at:] == []


def test_replicas_of_a_load_that_ended_are_released_down_to_the_last() -> None:
    limits = replace(QUICK, min_replicas=0)
    at = Situation((0.02, 0.08), limits)
    at.play(25.0, 40)
    assert at.replicas[1] >= 3
    at.play(0.0, 40)
    assert at.replicas == (0, 0)
    at.ongoing[0] = 1.0
    at.play(1.0, 1)
    assert min(at.replicas) >= 1


def test_backlog_scales_up_without_delay() -> None:
    """A backlog that misses the objective skips the stabilization window."""
    limits = replace(QUICK, upscale_delay_s=60.0)
    at = Situation((0.05, 0.1), limits)
    at.play(2.0, 70)
    before = at.replicas[1]
    at.ongoing[1] = 60.0
    at.play(2.0, 1)
    assert at.replicas[1] > before + 2


def test_queue_length_decides_without_measured_times() -> None:
    """Ray Serve's rule applies until enough requests have been computed."""
    at = Situation((0.05, 0.1), objective_s=None)
    stages = tuple(replace(s, item_s=None) for s in at.snapshot().stages)
    seen = tuple(StageSeen(ongoing=7.0, ready=1) for _ in stages)
    samples = tuple(Sample(at=float(t), arrived=t, stages=seen) for t in range(12))
    memory = None
    for now in range(4):
        snapshot = replace(
            at.snapshot(), stages=stages, samples=samples, now=float(now), memory=memory
        )
        decision = default_policy.decide(snapshot)
        memory = decision.memory
    assert decision.replicas == (4, 4)
    assert "queued" in decision.why


def test_starting_replicas_are_not_released_while_requests_wait() -> None:
    """While lost replicas are replaced, nothing arrives and all requests wait."""
    at = Situation((0.05, 0.1), replace(QUICK, min_replicas=0))
    at.play(20.0, 20)
    assert at.replicas[1] > 1
    for _ in range(30):
        at.now += 1.0
        sample = at.sample()
        seen = [replace(s, ready=0, ongoing=5.0) for s in sample.stages]
        at.samples.append(replace(sample, stages=tuple(seen)))
        decision = default_policy.decide(at.snapshot())
        at.memory = decision.memory
        assert min(decision.replicas) >= 1


def test_stage_with_a_number_keeps_it() -> None:
    at = Situation((0.02, 0.08))
    at.play(40.0, 20)
    snapshot = at.snapshot()
    stages = replace(snapshot.stages[0], limits=None), snapshot.stages[1]
    assert (
        default_policy.decide(replace(snapshot, stages=stages)).replicas[0]
        == at.replicas[0]
    )


@pytest.mark.parametrize("name", ["queued", "threshold", "fixed"])
def test_other_policies_decide_too(name: str) -> None:
    at = Situation((0.05, 0.1), policy=BUILT_IN[name])
    at.ongoing = [4.0, 9.0]
    at.play(9.0, 30)
    assert at.replicas[1] == (1 if name == "fixed" else 5 if name == "queued" else 2)


def test_recorded_snapshot_gets_the_same_decision() -> None:
    at = Situation((0.02, 0.08, 0.04))
    at.play(3.0, 30)
    at.play(30.0, 4)
    snapshot = at.snapshot()
    again = snapshot_from_json(snapshot_to_json(snapshot))
    assert (
        default_policy.decide(again).replicas
        == default_policy.decide(snapshot).replicas
    )
    assert default_policy.decide(again).why == default_policy.decide(snapshot).why


# Samples.


def worker(requests: int, queued: int = 0, waiting: int = 0) -> WorkerReport:
    return WorkerReport(
        queued=queued,
        computing=2,
        probing=1,
        waiting_for_next=waiting,
        computed_s=requests * 0.1,
        counts={"requests": requests, "batches": requests},
    )


def test_sums_continue_over_processes_that_are_lost() -> None:
    watch = SampleWindow("m", 2, 10.0)
    replicas = [ObservedReplica("m/0/1", 0, True), ObservedReplica("m/1/2", 1, True)]
    gateway = GatewayReport(pending={"m": 3}, arrived={"m": 1000}, missed={"m": 70})
    workers = {"m/0/1": worker(10, 2, 4), "m/1/2": worker(6)}
    reports = Reports(workers, {"gateway/1": gateway})
    first = watch.note(0.0, ["gateway/1"], replicas, reports)
    assert first.arrived == 0, "what they counted before this watch is no news"
    assert [s.ongoing for s in first.stages] == [6.0, 5.0]
    assert first.missed == 0
    more = structs.replace(gateway, arrived={"m": 1010}, missed={"m": 74})
    workers = {"m/0/1": worker(15, 2, 4), "m/1/2": worker(8)}
    reports = Reports(workers, {"gateway/1": more})
    second = watch.note(1.0, ["gateway/1"], replicas, reports)
    assert (second.arrived, second.stages[0].requests) == (10, 5)
    assert second.missed == 4
    other = Reports({"m/0/3": worker(5), "m/1/2": worker(9)})
    fresh = [ObservedReplica("m/0/3", 0, False), replicas[1]]
    third = watch.note(2.0, ["gateway/1"], fresh, other)
    assert third.arrived == 10
    assert [s.requests for s in third.stages] == [10, 3]
    assert [s.ready for s in third.stages] == [0, 1]
    assert third.stages[0].ongoing == 4.0, "the gateway is silent: as it was"
    gateways = Reports({}, {"gateway/1": structs.replace(gateway, arrived={"m": 1012})})
    assert watch.note(3.0, ["gateway/1"], fresh, gateways).arrived == 12


def test_batches_that_shrink_do_not_make_a_stage_slow() -> None:
    """More replicas make batches smaller, which must not ask for yet more replicas."""

    def batched(snapshot: Snapshot) -> Snapshot:
        rows = max(1.0, 16.0 / snapshot.stages[0].replicas)
        samples = tuple(
            replace(
                sample,
                stages=tuple(
                    replace(
                        s,
                        batches=int(s.requests / rows),
                        busy_s=s.requests / rows * (0.05 + 0.0007 * rows),
                    )
                    for s in sample.stages
                ),
            )
            for sample in snapshot.samples
        )
        return replace(snapshot, samples=samples)

    at = Situation((0.06 / 16,), policy=lambda s: default_policy.decide(batched(s)))
    at.play(100.0, 120)
    assert at.replicas == (1,)


def test_requests_that_become_slower_count_though_their_batches_are_small() -> None:
    """Slow requests are few, so their batches never get as large as before."""
    times = (0.01, 0.16, 16.0)
    for _ in range(300):
        times = default_policy.smoothed(times, (0.4, 0.4, 1.0), 1 / 30)
    assert times[0] == pytest.approx(0.4, rel=0.1)


def test_fixed_stage_that_is_rescaled_has_the_others_follow() -> None:
    """Scaling plans cover all stages, so they are recomputed for the new number."""
    at = Situation((0.02, 0.08))
    at.play(40.0, 30)
    seen = at.snapshot()
    fixed = replace(seen.stages[0], limits=None, replicas=1)
    few = replace(seen, stages=(fixed, seen.stages[1]), memory=None)
    small = default_policy.decide(few)
    many = replace(few, stages=(replace(fixed, replicas=9), seen.stages[1]))
    again = default_policy.decide(replace(many, memory=small.memory))
    assert again.facts["needs"][1][0] > 1
    assert again.memory.bounds[0] == (9, 9)


@given(st.lists(st.integers(0, 3), min_size=5, max_size=60))
def test_merged_needs_give_the_same_decisions(needs: list[int]) -> None:
    kept: tuple[PendingChange, ...] = ()
    whole: tuple[PendingChange, ...] = ()
    for at, count in enumerate(needs):
        need = PendingChange(float(at), count, count)
        kept = remember(kept, need, QUICK)
        whole = (*whole, need)
        for replicas in (0, 1, 4):
            for is_urgent in (False, True):
                one = stabilized(kept, replicas, QUICK, is_urgent=is_urgent)
                other = stabilized(whole, replicas, QUICK, is_urgent=is_urgent)
                assert one == other
    assert len(remember(kept, PendingChange(99.0, 1, 1), QUICK)) <= len(needs) + 1


def test_steady_needs_are_merged() -> None:
    kept: tuple[PendingChange, ...] = ()
    for at in range(600):
        kept = remember(
            kept, PendingChange(float(at), 2, 2), StageLimits(max_replicas=4)
        )
    assert len(kept) <= 3


# Around the policy.


def test_new_version_is_started_once_before_it_scales_to_zero() -> None:
    """Otherwise the first request could meet a broken version."""
    new = DesiredState({"m": DesiredModel("2", (0, 3)), "n": DesiredModel("1", (0,))})
    found = with_new_versions_started(new, {"m": "1", "n": "1"}).models
    assert found["m"].replicas == (1, 3)
    assert found["n"].replicas == (0,)


@pytest.mark.parametrize("path", ["nowhere:policy", "json:nothing", "math:pi"])
def test_invalid_policy_is_refused_before_anything_starts(path: str) -> None:
    app = AppSpec.model_validate(
        {
            "models": {
                "m": {
                    "factory": "a:b",
                    "stages": [{"autoscaling_config": {"max_replicas": 2}}],
                    "scaling": path,
                }
            }
        }
    )
    with pytest.raises(SpecError, match=path.partition(":")[2]):
        check_policies(app)


@pytest.mark.parametrize("answer", [(1,), (1, 2, 3), (1.0, 2), (True, 1), None])
def test_invalid_policy_answers_are_reported(answer: Any) -> None:
    at = Situation((0.1, 0.1))
    with pytest.raises((ValueError, TypeError)):
        within(Decision(replicas=answer), at.snapshot().stages)


def test_answers_are_brought_within_the_limits() -> None:
    at = Situation((0.1, 0.1))
    stages = at.snapshot().stages
    found = within(Decision(replicas=(-3, 99)), stages)
    assert found.replicas == (1, 8)
    fixed = (replace(stages[0], limits=None, replicas=2), stages[1])
    assert within(Decision(replicas=(7, 2)), fixed).replicas == (2, 2)
