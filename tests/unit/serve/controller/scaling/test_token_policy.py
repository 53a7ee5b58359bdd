"""Scaling by tokens: fleets for loads, and decisions on simulated samples."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.controller.scaling.snapshot import (
    Sample,
    Snapshot,
    StageLimits,
    StageNow,
    StageSeen,
    TextObjectives,
)
from multiworld.serve.controller.scaling.snapshot_json import (
    snapshot_from_json,
    snapshot_to_json,
)
from multiworld.serve.controller.scaling.step_costs import StepCost
from multiworld.serve.controller.scaling.token_policy import (
    Lengths,
    Load,
    decide,
    fleet,
    round_of,
)

COSTS = [StepCost(9 * row, row) for row in (0.0003, 0.0006, 0.0004)]
TEXT = TextObjectives(ttft_s=2.0, tpot_s=0.06)
LIMITS = StageLimits(min_replicas=1, max_replicas=16, upscale_delay_s=0.0)


def load(rate: float, prompt: float = 500.0, answer: float = 100.0) -> Load:
    return Load(rate, rate, 1.0, Lengths(prompt, answer))


def snapshot(samples: list[Sample] | None = None, **changes: Any) -> Snapshot:
    stages = tuple(
        StageNow(name=str(k), replicas=2, limits=LIMITS) for k in range(len(COSTS))
    )
    seen = StageSeen(ongoing=0, ready=2)
    first = Sample(at=0.0, arrived=0, stages=(seen,) * len(COSTS))
    given: dict[str, Any] = {
        "model": "m",
        "now": (samples or [first])[-1].at,
        "stages": stages,
        "samples": tuple(samples or [first]),
        "text": TEXT,
        **changes,
    }
    return Snapshot(**given)


def test_overload_has_no_finite_round() -> None:
    """Prompts arrive faster than they are computed."""
    assert math.isinf(round_of((1, 1, 1), COSTS, load(3.0)))
    assert round_of((1, 1, 1), COSTS, load(0.5)) < 0.05


@given(st.floats(0.1, 20.0), st.floats(1, 2000), st.floats(1, 500))
def test_fleets_grow_with_the_load(rate: float, prompt: float, answer: float) -> None:
    small = fleet(snapshot(), COSTS, load(rate, prompt, answer), TEXT)
    large = fleet(snapshot(), COSTS, load(2 * rate, prompt, answer), TEXT)
    assert sum(small) <= sum(large)
    found = round_of(small, COSTS, load(rate, prompt, answer))
    assert found <= 0.06 or max(small) == 16


def test_stage_that_takes_longer_has_more_replicas() -> None:
    costs = [StepCost(0.0009, 0.0001), StepCost(0.009, 0.001)]
    stages = snapshot().stages[:2]
    seen = StageSeen(ongoing=0, ready=2)
    first = Sample(at=0.0, arrived=0, stages=(seen, seen))
    given = snapshot([first], stages=stages)
    counts = fleet(given, costs, load(5.0, 400), TEXT)
    assert counts[0] < counts[1]


def test_kv_memory_and_sequence_slots_count() -> None:
    """They count in stage 0, which has the scheduler."""
    seen = StageSeen(ongoing=20.0, ready=2)
    full = Sample(at=0.0, arrived=0, stages=(seen,) * 3, kv_usage=0.9)
    busy = Load(0.1, 0.1, 40.0, Lengths(10, 10))
    wanted = fleet(snapshot([full]), COSTS, busy, TEXT)
    assert wanted[0] >= 4, "twice the texts need twice the memory"
    few = TextObjectives(ttft_s=2.0, tpot_s=0.06, max_num_seqs=8)
    assert fleet(snapshot(), COSTS, busy, few)[0] == 5


def samples(rate: float, seconds: int, fleet_size: int = 2) -> list[Sample]:
    found = []
    for at in range(seconds):
        texts = int(rate * at)
        steps = 20 * at
        rows = int(rate * at * 600) + steps
        stages = tuple(
            StageSeen(
                ongoing=rate * 3,
                ready=fleet_size,
                batches=steps,
                rows=rows,
                busy_s=steps * cost.step_s + rows * cost.row_s,
            )
            for cost in COSTS
        )
        found.append(
            Sample(
                at=float(at),
                arrived=texts,
                stages=stages,
                tokens=texts * 100,
                completions=texts,
                prompt_tokens=texts * 500,
                generated_tokens=texts * 100,
            )
        )
    return found


def test_decision_follows_the_load_and_says_why() -> None:
    memory: Any = None
    all_ = samples(4.0, 40)
    for end in range(1, len(all_) + 1):
        decision = decide(snapshot(all_[:end], memory=memory))
        memory = decision.memory
        if end == 2:
            assert "not known yet" in decision.why
    assert all(count > 2 for count in decision.replicas)
    assert "4.00 sequences/s of 500 + 100 tokens" in decision.why
    assert decision.facts["row_s"][1] > 0


def test_idle_model_scales_down_to_its_minimum() -> None:
    memory: Any = None
    quiet = StageLimits(min_replicas=1, max_replicas=16, downscale_delay_s=5.0)
    stages = tuple(StageNow(name=str(k), replicas=2, limits=quiet) for k in range(3))
    all_ = [
        Sample(at=float(at), arrived=0, stages=(StageSeen(ongoing=0, ready=2),) * 3)
        for at in range(60)
    ]
    for end in range(1, len(all_) + 1):
        decision = decide(snapshot(all_[:end], memory=memory, stages=stages))
        memory = decision.memory
    assert decision.replicas == (1, 1, 1)


def test_recorded_decision_is_made_again() -> None:
    memory: Any = None
    all_ = samples(4.0, 40)
    for end in range(1, len(all_)):
        memory = decide(snapshot(all_[:end], memory=memory)).memory
    last = snapshot(all_, memory=memory)
    data = json.loads(json.dumps(snapshot_to_json(last)))
    assert decide(snapshot_from_json(data)) == decide(last)
