"""Simulation models, built from a spec and measured service times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from multiworld.errors import PlacementError, SpecError
from multiworld.serve.controller.scaling.limits import interval_s, limits_of, text_of
from multiworld.serve.controller.scaling.rules import limits_now
from multiworld.serve.controller.scaling.scaling_plans import StageCost
from multiworld.serve.controller.scaling.snapshot import Policy
from multiworld.serve.controller.scaling.step_costs import USUAL_RATIO
from multiworld.serve.machines.amounts import Need
from multiworld.serve.machines.assignment import assign
from multiworld.serve.machines.bookings import Bookings
from multiworld.serve.simulation.pipeline import PipelineModel, Room, StageModel
from multiworld.serve.spec.profiles import ModelProfile, item_s_of
from multiworld.serve.spec.schema import ModelSpec
from multiworld.serve.text.limits import limits_by

Curve = Mapping[int, float]  # seconds of a batch, by its rows


def seconds_of(curve: Curve) -> Callable[[float], float]:
    """Return the seconds of a batch as a function of its work, interpolated."""
    points = sorted(curve.items())

    def seconds(work: float) -> float:
        if len(points) == 1 or work <= points[0][0]:
            rows, took = points[0]
            # If only one batch size was measured, scale its time. Otherwise a batch
            # below the smallest measured size takes as long as that size.
            return took * work / rows if len(points) == 1 else took
        upper = next(
            (k for k in range(1, len(points)) if work <= points[k][0]), len(points) - 1
        )
        (one, took), (other, longer) = points[upper - 1], points[upper]
        slope = max(0.0, (longer - took) / (other - one))
        return max(1e-9, took + slope * (work - one))

    return seconds


def pipeline_of(
    name: str,
    spec: ModelSpec,
    policy: Policy,
    measured: ModelProfile | None,
    start_s: float,
) -> PipelineModel:
    """Return the simulation model of a spec; unmeasured stages use ``item_ms``."""
    stages = []
    for k, stage in enumerate(spec.stages):
        title = stage.name or str(k)
        curve: Curve = {}
        if measured is not None:
            curve = measured.stages[k].seconds
        if not curve:
            if not stage.item_ms:
                raise SpecError(
                    f"models.{name}.stages[{k}] ({title}): its computing time is not "
                    "known; give item_ms, or profile: (see multiworld profile)"
                )
            curve = {1: stage.item_ms / 1000}
            if spec.generation is not None:
                curve = _steps(stage.item_ms / 1000)
        stages.append(
            StageModel(
                name=title,
                seconds=seconds_of(curve),
                max_batch_size=stage.max_batch_size,
                max_wait_s=stage.max_wait_ms / 1000,
                window=stage.max_ongoing_requests,
                replicas=stage.initial_count,
                limits=limits_of(stage),
                item_s=item_s_of(
                    curve, stage.max_batch_size if spec.generation is None else math.inf
                ),
            )
        )
    text, limits, objective_ms = text_of(spec), None, spec.objective_ms
    if spec.generation is not None:
        objective_ms = spec.generation.ttft_ms
        kv_bytes = [] if measured is None else [s.kv_bytes for s in measured.stages]
        limits = limits_by(spec.generation, max(kv_bytes, default=0), len(stages))
    return PipelineModel(
        name=name,
        stages=tuple(stages),
        policy=policy,
        text=text,
        limits=limits,
        max_model_len=spec.generation.max_model_len if spec.generation else None,
        objective_s=objective_ms / 1000 if objective_ms else None,
        objective_share=spec.objective_share,
        deadline_s=_deadline_s(spec),
        max_queued_requests=spec.max_queued_requests,
        start_s=start_s,
        interval_s=interval_s(spec),
    )


# Deadline in seconds of text generation whose spec sets none: longer than any stream.
NO_DEADLINE_S = 3600.0


def _deadline_s(spec: ModelSpec) -> float:
    if spec.deadline_s is not None:
        return spec.deadline_s
    return NO_DEADLINE_S if spec.generation is not None else 30.0


def _steps(row_s: float) -> Curve:
    """Return typical step times if one token takes ``row_s``."""
    return {rows: row_s * (USUAL_RATIO + rows) for rows in (1, 2)}


def with_fleet(model: PipelineModel, replicas: tuple[int, ...]) -> PipelineModel:
    stages = [
        replace(stage, replicas=count)
        for stage, count in zip(model.stages, replicas, strict=True)
    ]
    return replace(model, stages=tuple(stages))


def costs_of(model: PipelineModel) -> list[StageCost]:
    return [
        StageCost(
            item_s=stage.item_s or 0.0,
            batch_s=stage.seconds(1.0),
            limits=limits_now(stage),
        )
        for stage in model.stages
    ]


class Machines(Room):
    """Room on a limited set of machines; ``needs`` are the stages' needs by model."""

    def __init__(self, ledger: Bookings, needs: Mapping[str, tuple[Need, ...]]) -> None:
        self._ledger, self._needs = ledger, needs

    def take(self, name: str, model: str, stage: int) -> bool:
        return self._book(self._ledger, name, model, stage)

    def fits(self, model: str, more: Sequence[int]) -> bool:
        trial = self._ledger.copy()
        return all(
            self._book(trial, f"{model}/{stage} more {number}", model, stage)
            for stage, count in enumerate(more)
            for number in range(count)
        )

    def _book(self, ledger: Bookings, name: str, model: str, stage: int) -> bool:
        need, post = self._needs[model][stage], (model, stage)
        try:
            spot = assign(ledger, post, need, {})
        except PlacementError:
            return False
        ledger.book(name, post, spot, need)
        return True

    def free(self, name: str) -> None:
        self._ledger.release(name)
