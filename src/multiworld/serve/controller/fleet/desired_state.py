"""The desired state derived from a spec, and the updates that a spec allows. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import multiworld
from multiworld.errors import ServeError, UnknownModelError
from multiworld.serve.controller.fleet.state import DesiredModel, DesiredState
from multiworld.serve.spec.schema import AppSpec, GatewaySpec, ModelSpec

MAX_REPLICAS = 4096  # maximum number of replicas of a stage


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of replicas of a version's stages, and the version's spec."""

    replicas: Sequence[int]
    spec: ModelSpec


def desired_state_of(
    app: AppSpec, before: Mapping[str, Sizes] | None = None
) -> DesiredState:
    """Return the desired state of a spec; scaled stages keep their size if in range."""
    # A fixed number is only the initial size: a stage that was scaled keeps its size
    # until that number changes.
    models = {}
    for name, model in app.models.items():
        old = (before or {}).get(name)
        replicas = []
        for number, stage in enumerate(model.stages):
            count = stage.initial_count
            if old is not None and len(old.replicas) == len(model.stages):
                low, high = bounds_of(model, number)
                if low == high and _fixed(old.spec, number) == low:
                    low, high = 1, MAX_REPLICAS
                count = min(max(old.replicas[number], low), high)
            replicas.append(count)
        models[name] = DesiredModel(
            model.version,
            tuple(replicas),
            model.max_queued_requests,
            model.stages[0].max_ongoing_requests,
            30.0 if model.deadline_s is None else model.deadline_s,
            model.objective_ms / 1000 if model.objective_ms else None,
            tuple(
                number
                for number in range(len(model.stages))
                if bounds_of(model, number)[0] == 0
            ),
            model.generation is not None,
            *_text_objectives(model),
            start_s=model.start_s,
            has_deadline=model.generation is None or model.deadline_s is not None,
            spares=tuple(stage.spares for stage in model.stages),
        )
    return DesiredState(models, app.gateways, _options_of(app.gateway))


def _options_of(gateway: GatewaySpec) -> str:
    """Return a digest of the options that a gateway process is started with."""
    options = gateway.model_dump_json(exclude=CONTROLLER_FIELDS)
    text = f"{multiworld.__version__} {options}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fixed(model: ModelSpec, stage: int) -> int | None:
    """Return a stage's fixed number of replicas; None if the number is not fixed."""
    if stage >= len(model.stages):
        return None
    found = model.stages[stage].replicas
    is_scaled = model.stages[stage].autoscaling_config is not None
    return found if isinstance(found, int) and not is_scaled else None


def _text_objectives(model: ModelSpec) -> tuple[float | None, float | None]:
    spec = model.generation
    if spec is None:
        return None, None
    ttft_s = spec.ttft_ms / 1000 if spec.ttft_ms else None
    return ttft_s, spec.tpot_ms / 1000 if spec.tpot_ms else None


def with_new_versions_started(
    desired: DesiredState, old: Mapping[str, str]
) -> DesiredState:
    """Return ``desired`` with at least one replica of each stage of new versions."""
    # A new version becomes active once each of its stages has a ready replica, so even
    # stages that scale to zero start one. ``old``: the previous version of each
    # model.
    models = dict(desired.models)
    for name, model in desired.models.items():
        if old.get(name, model.version) != model.version:
            counts = tuple(max(1, count) for count in model.replicas)
            models[name] = replace(model, replicas=counts)
    return replace(desired, models=models)


def bounds_of(model: ModelSpec, stage: int) -> tuple[int, int]:
    if (config := model.stages[stage].autoscaling_config) is not None:
        return config.min_replicas, config.max_replicas
    replicas = model.stages[stage].replicas
    if isinstance(replicas, int):
        return replicas, replicas
    return replicas.min_replicas, replicas.max_replicas


def rescaled(
    desired: DesiredState, spec: ModelSpec, model: str, stage: int, replicas: int
) -> tuple[int, DesiredState]:
    """Return a stage's previous number of replicas, and the new desired state."""
    low, high = bounds_of(spec, stage)
    stage_spec = spec.stages[stage]
    if stage_spec.autoscaling_config is None and isinstance(stage_spec.replicas, int):
        # A fixed number is only the initial size, so any other number is allowed.
        low, high = 1, MAX_REPLICAS
    if not low <= replicas <= high:
        raise ServeError(
            f"stage {stage_spec.name or stage} of {model!r} may have {low} to "
            f"{high} replicas (see its spec), not {replicas}"
        )
    old = desired.models[model]
    counts = list(old.replicas)
    before, counts[stage] = counts[stage], replicas
    models = {**desired.models, model: replace(old, replicas=tuple(counts))}
    return before, replace(desired, models=models)


def stage_number(spec: ModelSpec, model: str, stage: str) -> int:
    names = [s.name or str(n) for n, s in enumerate(spec.stages)]
    if stage in names:
        return names.index(stage)
    if stage.isdecimal() and int(stage) < len(names):
        return int(stage)
    raise UnknownModelError(
        f"model {model!r} has no stage {stage!r}; its stages are {', '.join(names)}"
    )


def check_update(
    old: AppSpec, new: AppSpec, specs: Mapping[str, Mapping[str, ModelSpec]]
) -> None:
    """Raise ``ServeError`` if a running service cannot be updated to another spec."""
    fixed = (
        "app",
        "launcher",
        "ray",
        "machine",
        "host",
        "placement",
        "silence_s",
        "orphan_s",
    )
    for name in fixed:
        if getattr(new, name) != getattr(old, name):
            raise ServeError(
                f"{name} cannot be changed while the service runs; shut the service "
                "down, and serve the new spec"
            )
    for name in ("host", "port", "keeper", "keeper_memory_mb", "is_kept"):
        if getattr(new.gateway, name) != getattr(old.gateway, name):
            field = "tls_certificate" if name == "is_kept" else name
            raise ServeError(
                f"gateway.{field} cannot be changed while the service runs; shut the "
                "service down, and serve the new spec"
            )
    for name, model in new.models.items():
        known = specs.get(name, {}).get(model.version)
        if known is not None and version_fields(known) != version_fields(model):
            raise ServeError(
                f"model {name!r} has changed, but its version is still "
                f"{model.version!r}; give it a new version"
            )


def version_fields(spec: ModelSpec) -> Any:
    """Return the fields that define a version: all but scaling and placement."""
    stages = [s.model_dump(exclude=SCALING_STAGE_FIELDS) for s in spec.stages]
    found = spec.model_dump(exclude={"stages", *SCALING_FIELDS})
    for name in SCALING_TEXT_FIELDS if spec.generation is not None else ():
        del found["generation"][name]
    return found, stages


# Fields of `gateway` that a gateway process does not use.
CONTROLLER_FIELDS = {"replicas", "spare", "keeper_memory_mb", "handover_s"}

# Fields of a model that affect scaling and placement but not results.
SCALING_FIELDS = {
    "identity",
    "deadline_s",
    "profile",
    "demand",
    "weight",
    "latency_ms",
    "objective_ms",
    "objective_share",
    "scaling",
    "dedicated",
    "start_s",
    "spares",
}

SCALING_STAGE_FIELDS = {
    "replicas",
    "spares",
    "autoscaling_config",
    "item_ms",
    "out_kb",
}

SCALING_TEXT_FIELDS = ("ttft_ms", "tpot_ms")
