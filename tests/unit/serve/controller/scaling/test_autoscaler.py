"""The autoscaler: policies that fail, machines that are full, models that change."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.errors import PlacementError
from multiworld.serve.controller.fleet.decision_log import DecisionLog
from multiworld.serve.controller.fleet.events import DesiredStateChanged
from multiworld.serve.controller.fleet.history import History
from multiworld.serve.controller.fleet.reconciler import Reconciler
from multiworld.serve.controller.fleet.state import (
    DesiredModel,
    DesiredState,
    ProcessPhase,
)
from multiworld.serve.controller.scaling import autoscaler as module
from multiworld.serve.controller.scaling.autoscaler import Autoscaler
from multiworld.serve.controller.scaling.limits import largest_that_fits
from multiworld.serve.controller.scaling.snapshot import Decision, Snapshot
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.wire.control_messages import GatewayReport, Reports
from tests.unit.serve.edges import until

INTERVAL_S = 0.001
"""Seconds between decisions in these tests."""


class FakePolicy:
    def __init__(self) -> None:
        self.decides: Callable[[Snapshot], Any] = keep
        self.seen: list[Snapshot] = []

    def __call__(self, snapshot: Snapshot) -> Any:
        self.seen.append(snapshot)
        return self.decides(snapshot)


def keep(snapshot: Snapshot) -> Decision:
    return Decision(replicas=tuple(s.replicas for s in snapshot.stages), why="enough")


def to(*replicas: int, why: str = "needed") -> Callable[[Snapshot], Decision]:
    return lambda snapshot: Decision(replicas=replicas, why=why, facts={"load": 3})


POLICIES = {"one": FakePolicy(), "two": FakePolicy()}


def one(snapshot: Snapshot) -> Any:
    return POLICIES["one"](snapshot)


def two(snapshot: Snapshot) -> Any:
    return POLICIES["two"](snapshot)


@pytest.fixture(autouse=True)
def policies(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakePolicy]:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "START_S", 0.002)
    POLICIES.update(one=FakePolicy(), two=FakePolicy())
    return POLICIES


def spec(
    stages: int = 1,
    *,
    version: str = "1",
    low: int = 0,
    high: int = 8,
    policy: str = "one",
    interval_s: float = INTERVAL_S,
    weight: float = 1.0,
) -> ModelSpec:
    made = ModelSpec(
        version=version,
        factory="x:y",
        scaling=policy if ":" in policy else f"{__name__}:{policy}",
        weight=weight,
        stages=[
            {"name": f"s{k}", "autoscaling_config": _config(low, high)}  # type: ignore[misc]
            for k in range(stages)
        ],
    )
    for stage in made.stages:
        assert stage.autoscaling_config is not None
        stage.autoscaling_config.__dict__["metrics_interval_s"] = interval_s
    return made


def _config(low: int, high: int) -> dict[str, Any]:
    return {"min_replicas": low, "max_replicas": high}


class FakeOwner:
    """The controller, as far as the autoscaler sees it."""

    def __init__(self, fleet: Reconciler) -> None:
        self._fleet = fleet
        self.specs: dict[str, dict[str, ModelSpec]] = {}
        self.room = 100
        self.asked = 0
        self.next_reports: Reports | Exception = Reports()
        self.wanted: list[DesiredState] = []
        self.trials: list[tuple[int, ...]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def reports(self, limit_s: float) -> Reports:
        self.asked += 1
        await self.gate.wait()
        if isinstance(self.next_reports, Exception):
            raise self.next_reports
        return self.next_reports

    def admit(self, wanted: DesiredState, model: str) -> None:
        self.trials.append(tuple(wanted.models[model].replicas))
        count = sum(sum(m.replicas) for m in wanted.models.values())
        if count > self.room:
            raise PlacementError(f"no machine has a core for the {count}th")

    def want(self, wanted: DesiredState) -> None:
        self.wanted.append(wanted)
        self._fleet.handle(DesiredStateChanged(wanted), 0.0)


class Service:
    def __init__(self, path: Path | None = None) -> None:
        self.fleet = Reconciler(active={})
        self.owner = FakeOwner(self.fleet)
        self.history = History()
        self.journal = DecisionLog(path)
        owner = self.owner
        self.scaler = Autoscaler(
            self.fleet,
            self.history,
            self.journal,
            owner.specs,
            owner.reports,
            owner.admit,
            owner.want,
        )

    def serve(
        self,
        name: str,
        spec: ModelSpec,
        *replicas: int,
        is_active: bool = True,
        phase: ProcessPhase = ProcessPhase.READY,
    ) -> None:
        self.owner.specs.setdefault(name, {})[spec.version] = spec
        desired = self.fleet.desired
        model = DesiredModel(spec.version, tuple(replicas), deadline_s=7.0)
        models = {**desired.models, name: model}
        if is_active:
            self.fleet.active[name] = spec.version
        self.fleet.handle(DesiredStateChanged(replace(desired, models=models)), 0.0)
        for process in self.fleet.processes.values():
            process.phase = phase

    def replicas(self, name: str = "m") -> tuple[int, ...]:
        return tuple(self.fleet.desired.models[name].replicas)

    def reason(self, name: str = "m") -> str:
        reasons = {r.about: r.what for r in self.journal.reasons()}
        return reasons.get(name, "")

    def said(self) -> list[tuple[str, str]]:
        return [(e.kind, e.text) for e in self.history.since(0)]


@asynccontextmanager
async def service(path: Path | None = None) -> AsyncIterator[Service]:
    made = Service(path)
    try:
        yield made
    finally:
        made.owner.gate.set()
        await made.scaler.close()


# What a policy wants.


async def test_decision_is_carried_out_reported_and_recorded(
    policies: dict[str, FakePolicy], tmp_path: Path
) -> None:
    async with service(tmp_path / "decisions.jsonl") as s:
        s.serve("m", spec(2), 1, 2)
        policies["one"].decides = to(3, 1)
        s.scaler.start()
        await until(lambda: s.owner.wanted)
        assert s.replicas() == (3, 1)
        assert s.said() == [("scaled", "m: needed")]
        s.journal.settle(20.0)
        (line,) = (tmp_path / "decisions.jsonl").read_text().splitlines()
        recorded = json.loads(line)
        assert (recorded["about"], recorded["what"]) == ("m", "needed")
        facts = {"before": [1, 2], "after": [3, 1], "short": "", "load": 3}
        assert recorded["facts"] == facts
        assert recorded["snapshot"]["deadline_s"] == 7.0
        seen = policies["one"].seen[0]
        assert [stage.replicas for stage in seen.stages] == [1, 2]
        assert seen.interval_s == INTERVAL_S


async def test_unchanged_decision_is_not_carried_out(
    policies: dict[str, FakePolicy],
) -> None:
    """An unchanged decision only replaces the model's reason."""
    async with service() as s:
        s.serve("m", spec(), 2)
        s.scaler.start()
        await until(lambda: len(policies["one"].seen) > 2)
        assert s.reason() == "enough"
        assert (s.owner.wanted, s.said(), s.owner.trials) == ([], [], [])


async def test_what_is_still_starting_is_not_drained(
    policies: dict[str, FakePolicy],
) -> None:
    policies["one"].decides = to(1, why="too many")
    async with service() as s:
        s.serve("m", spec(), 3, phase=ProcessPhase.JOINED)
        first, *others = s.fleet.processes.values()
        first.phase = ProcessPhase.READY
        s.scaler.start()
        await until(lambda: "starting are not drained" in s.reason())
        assert s.replicas() == (3,)
        for process in others:
            process.phase = ProcessPhase.READY
        await until(lambda: s.replicas() == (1,))
        await until(lambda: s.reason() == "too many")


async def test_decision_beyond_the_limits_is_brought_within_them(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        s.serve("m", spec(2, low=1, high=4), 2, 2)
        policies["one"].decides = to(99, 0)
        s.scaler.start()
        await until(lambda: s.owner.wanted)
        assert s.replicas() == (4, 1)


async def test_reason_of_a_policy_is_a_text_whatever_it_returns(
    policies: dict[str, FakePolicy],
) -> None:
    """Clients could not read another type."""
    async with service() as s:
        s.serve("m", spec(), 2)
        policies["one"].decides = to(3, why=0.7)  # type: ignore[arg-type]
        s.scaler.start()
        await until(lambda: s.owner.wanted)
        assert s.reason() == "0.7"


async def test_half_a_pipeline_is_not_started(policies: dict[str, FakePolicy]) -> None:
    """Its replica would take the room of a model that could answer."""
    async with service() as s:
        s.serve("m", spec(2, low=0, high=4), 0, 0)
        s.owner.room = 1
        policies["one"].decides = to(1, 1)
        s.scaler.start()
        await until(lambda: s.owner.trials)
        await until(lambda: "no room" in s.reason())
        assert s.replicas() == (0, 0)


async def test_policy_gets_its_memory_back(policies: dict[str, FakePolicy]) -> None:
    async with service() as s:
        s.serve("m", spec(), 1)
        policies["one"].decides = lambda snapshot: replace(
            keep(snapshot), memory=(snapshot.memory or 0) + 1
        )
        s.scaler.start()
        await until(lambda: len(policies["one"].seen) > 3)
        assert [seen.memory for seen in policies["one"].seen][:3] == [None, 1, 2]


async def test_policy_sees_what_gateways_report(
    policies: dict[str, FakePolicy],
) -> None:
    """Waiting requests count as the first stage's."""
    async with service() as s:
        s.serve("m", spec(), 1)
        (gateway,) = [p.name for p in s.fleet.processes.values() if p.is_gateway]
        report = GatewayReport(pending={"m": 5}, arrived={"m": 9})
        s.owner.next_reports = Reports(gateways={gateway: report})
        s.scaler.start()
        await until(lambda: policies["one"].seen)
        sample = policies["one"].seen[0].samples[-1]
        assert sample.stages[0].ongoing == 5
        s.owner.next_reports = Reports()  # none answers: as it was before
        count = len(policies["one"].seen)
        await until(lambda: len(policies["one"].seen) > count + 1)
        assert policies["one"].seen[-1].samples[-1].stages[0].ongoing == 5


# Policies that fail.


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (ValueError("as asked"), "ValueError: as asked"),
        (Decision(replicas=(1, 2)), "return 1 whole numbers"),
        (Decision(replicas=(1.5,)), "return 1 whole numbers"),  # type: ignore[arg-type]
        (None, "AttributeError"),
        (Decision(replicas=None), "TypeError"),  # type: ignore[arg-type]
    ],
)
async def test_policy_that_fails_keeps_no_other_model_from_being_scaled(
    policies: dict[str, FakePolicy], returned: Any, words: str
) -> None:
    def fails(snapshot: Snapshot) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    async with service() as s:
        s.serve("m", spec(weight=5.0), 1)
        s.serve("n", spec(policy="two"), 1)
        policies["one"].decides, policies["two"].decides = fails, to(2)
        s.scaler.start()
        await until(lambda: s.owner.wanted and len(policies["one"].seen) > 1)
        assert words in s.reason("m")
        assert s.reason("m").startswith("the policy failed")
        assert (s.replicas("m"), s.replicas("n")) == ((1,), (2,))
        policies["one"].decides = to(3)
        await until(lambda: s.replicas("m") == (3,))


async def test_policy_that_hangs_stops_nothing_else(
    policies: dict[str, FakePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy has its own thread and is not called again before it returns."""
    monkeypatch.setattr(module, "POLICY_S", 0.02)
    is_over = threading.Event()

    def hangs(snapshot: Snapshot) -> Decision:
        is_over.wait(20.0)
        return Decision(replicas=(4,), why="too late")

    async with service() as s:
        s.serve("m", spec(weight=5.0), 1)
        s.serve("n", spec(policy="two"), 1)
        policies["one"].decides, policies["two"].decides = hangs, to(2)
        s.scaler.start()
        try:
            await until(lambda: "has not returned" in s.reason("m"))
            assert len(policies["one"].seen) == 1
            await until(lambda: s.replicas("n") == (2,))
            policies["one"].decides = to(3)
        finally:
            is_over.set()
        await until(lambda: s.replicas("m") == (3,))


async def test_policy_that_takes_long_delays_no_other_model(
    policies: dict[str, FakePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOGETHER_S", 0.01)
    is_over = threading.Event()

    def takes_long(snapshot: Snapshot) -> Decision:
        is_over.wait(9.0)
        return Decision(replicas=(4,), why="late")

    async with service() as s:
        s.serve("m", spec(weight=5.0), 1)
        s.serve("n", spec(policy="two"), 1)
        policies["one"].decides, policies["two"].decides = takes_long, to(2)
        s.scaler.start()
        try:
            await until(lambda: s.replicas("n") == (2,))
            policies["two"].decides = to(3)
            await until(lambda: s.replicas("n") == (3,))
            assert len(policies["one"].seen) == 1
            assert s.replicas("m") == (1,)
        finally:
            is_over.set()
        await until(lambda: s.replicas("m") == (4,))


async def test_decision_about_a_fleet_that_has_changed_does_not_count(
    policies: dict[str, FakePolicy],
) -> None:
    """The model was scaled by hand while the policy computed."""
    begun, goes_on = threading.Event(), threading.Event()

    def decides(snapshot: Snapshot) -> Decision:
        begun.set()
        goes_on.wait(20.0)
        return Decision(replicas=(7,), why="old")

    async with service() as s:
        s.serve("m", spec(), 1)
        policies["one"].decides = decides
        s.scaler.start()
        await until(begun.is_set)
        policies["one"].decides = to(5)
        s.serve("m", s.owner.specs["m"]["1"], 2)
        goes_on.set()
        await until(lambda: s.replicas("m") == (5,))
        assert ("scaled", "m: old") not in s.said()


async def test_policy_that_cannot_be_imported_leaves_its_model_alone(
    policies: dict[str, FakePolicy],
) -> None:
    """It could be imported when the service started."""
    async with service() as s:
        s.serve("m", spec(policy="no.such.module:policy"), 1)
        s.serve("n", spec(policy="two"), 1)
        policies["two"].decides = to(2)
        s.scaler.start()
        await until(lambda: s.owner.wanted)
        assert s.reason("m").startswith("not scaled: factory 'no.such.module")
        assert (s.replicas("m"), s.replicas("n")) == ((1,), (2,))


async def test_owner_that_cannot_report_is_asked_again(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        s.serve("m", spec(), 1)
        policies["one"].decides = to(2)
        s.owner.next_reports = RuntimeError("as asked")
        s.scaler.start()
        await until(lambda: s.owner.asked > 1)
        assert s.replicas() == (1,)
        s.owner.next_reports = Reports()
        await until(lambda: s.replicas() == (2,))


# Machines that are full.


async def test_decision_is_reduced_to_what_fits_stage_by_stage(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        s.serve("m", spec(2), 1, 1)
        s.owner.room = 5
        policies["one"].decides = to(5, 5)
        s.scaler.start()
        await until(lambda: s.owner.wanted)
        assert s.replicas() == (3, 2)
        unplaced, scaled = s.said()
        assert unplaced[0] == "unplaced"
        assert "no machine has a core for the 10th" in unplaced[1]
        assert "[1, 1] → [3, 2], limited by the machines" in scaled[1]
        seen = len(policies["one"].seen)
        await until(lambda: len(policies["one"].seen) > seen + 2)
        assert len(s.said()) == 2
        assert len(s.owner.wanted) == 1
        assert "needed; no room: no machine has a core" in s.reason()


async def test_one_stage_shrinks_though_another_cannot_grow(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        s.serve("m", spec(2), 4, 1)
        s.owner.room = 5
        policies["one"].decides = to(2, 6)
        s.scaler.start()
        await until(lambda: s.owner.wanted)
        assert s.replicas() == (2, 3)
        assert all(sum(m.models["m"].replicas) <= 5 for m in s.owner.wanted)


async def test_model_with_more_weight_gets_the_last_slot(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        s.serve("light", spec(policy="one", weight=1.0), 1)
        s.serve("heavy", spec(policy="two", weight=2.0), 1)
        s.owner.room = 3
        policies["one"].decides = policies["two"].decides = to(2)
        s.scaler.start()
        await until(lambda: len(policies["one"].seen) > 1)
        assert (s.replicas("heavy"), s.replicas("light")) == ((2,), (1,))


# Models that come, go and change.


async def test_model_without_limits_is_never_asked_about(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        fixed = ModelSpec(factory="x:y", stages=[{}])  # type: ignore[list-item]
        s.serve("fixed", fixed, 1)
        s.serve("m", spec(interval_s=30.0), 1)
        s.scaler.start()
        await until(s.journal.reasons)
        assert [(r.kind, r.about) for r in s.journal.reasons()] == [("scaling", "m")]
        assert s.owner.asked == 1


async def test_nothing_is_scaled_while_a_new_version_is_on_its_way(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        s.serve("m", spec(), 1)
        policies["one"].decides = lambda snapshot: replace(keep(snapshot), memory=1)
        s.scaler.start()
        await until(lambda: len(policies["one"].seen) > 1)
        s.serve("m", spec(2, version="2", policy="two"), 1, 1, is_active=False)
        assert s.fleet.active["m"] == "1"
        asked = s.owner.asked
        await until(lambda: s.owner.asked > asked + 3)
        assert policies["two"].seen == []
        s.fleet.active["m"] = "2"
        await until(lambda: policies["two"].seen)
        assert policies["two"].seen[0].memory is None
        assert len(policies["two"].seen[0].stages) == 2


async def test_model_that_was_removed_is_forgotten_though_its_reports_are_in_flight(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        s.serve("m", spec(), 1)
        s.serve("n", spec(policy="two"), 1)
        s.owner.gate.clear()
        s.scaler.start()
        await until(lambda: s.owner.asked == 1)
        models = {"n": s.fleet.desired.models["n"]}
        s.fleet.handle(DesiredStateChanged(DesiredState(models)), 0.0)
        s.owner.gate.set()
        await until(lambda: len(policies["two"].seen) > 1)
        assert policies["one"].seen == []


# Models at zero.


async def test_request_for_a_model_at_zero_triggers_a_decision(
    policies: dict[str, FakePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service() as s:
        s.serve("m", spec(interval_s=3600.0), 0)

        def is_the_last_look(snapshot: Snapshot) -> Decision:
            monkeypatch.setattr(module, "LOOK_S", 3600.0)
            return keep(snapshot)

        policies["one"].decides = is_the_last_look
        s.scaler.start()
        await until(lambda: len(policies["one"].seen) == 1)
        policies["one"].decides = to(1)
        s.scaler.wake("m")
        await until(lambda: s.replicas() == (1,))
        s.scaler.wake("m")  # already running: nothing to hurry
        s.scaler.wake("unknown")
        assert len(policies["one"].seen) == 2


async def test_request_that_comes_while_reports_are_in_flight_is_not_forgotten(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        s.serve("m", spec(interval_s=3600.0), 0)
        s.owner.gate.clear()
        s.scaler.start()
        await until(lambda: s.owner.asked == 1)
        s.scaler.wake("m")
        s.owner.gate.set()
        await until(lambda: len(policies["one"].seen) == 2)


async def test_close_ends_it_though_reports_are_in_flight(
    policies: dict[str, FakePolicy],
) -> None:
    async with service() as s:
        await s.scaler.close()  # it was never started
        s.serve("m", spec(), 1)
        s.owner.gate.clear()
        s.scaler.start()
        await until(lambda: s.owner.asked == 1)
        await s.scaler.close()
        assert policies["one"].seen == []


class _CountingFinder:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> Any:
        self.counts[name] += 1


async def test_policy_that_cannot_be_imported_is_not_imported_at_every_look(
    policies: dict[str, FakePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports run on the controller's event loop and may take long."""
    finder = _CountingFinder()
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    async with service() as s:
        s.serve("m", spec(policy="no_such_policy_module:policy"), 1)
        s.serve("n", spec(policy="two"), 1)
        s.scaler.start()
        await until(lambda: len(policies["two"].seen) > 5)
        assert finder.counts["no_such_policy_module"] == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4)),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 60),
)
def test_largest_fit_equals_adding_replicas_one_by_one(
    stages: list[tuple[int, int, int]], room: int
) -> None:
    """Each trial places all replicas, so there must be few."""
    before, after, sizes = zip(*stages, strict=True)
    trials = 0

    def fits(counts: Sequence[int]) -> bool:
        nonlocal trials
        trials += 1
        taken = [n * size for n, size in zip(counts, sizes, strict=True)]
        return bool(sum(taken) <= room)

    found = largest_that_fits(before, after, fits)
    tried, trials = trials, 0
    wanted = list(map(min, before, after))
    growing = [k for k, count in enumerate(after) if count > wanted[k]]
    while growing:
        for k in list(growing):
            more = [count + (j == k) for j, count in enumerate(wanted)]
            wanted = more if fits(more) else wanted
            if wanted is not more or wanted[k] == after[k]:
                growing.remove(k)
    if 0 in wanted and 0 not in after:
        wanted = list(map(min, before, after))
    assert found == wanted
    assert tried <= (len(after) + 1) * (4 + len(after))


def test_hundreds_of_replicas_need_few_trials() -> None:
    """The controller answers nothing else during the trials."""
    trials: list[int] = []

    def fits(counts: Sequence[int]) -> bool:
        trials.append(sum(counts))
        return sum(counts) <= 300

    assert largest_that_fits([1, 1], [400, 200], fits) == [150, 150]
    assert len(trials) < 25
