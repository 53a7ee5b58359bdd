"""Choice of the dtype of a model's version, made once, from measurements of its
machines. Replicas with different dtypes would produce different tokens for one
sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from multiworld.config import MIB
from multiworld.serve.controller.placement.replica_placement import Specs
from multiworld.serve.engine.models.factory import build_model, takes_dtype
from multiworld.serve.machines.amounts import Node, needs_of
from multiworld.serve.spec.schema import AppSpec, ModelSpec
from multiworld.serve.spec.stage import Generation

# Bfloat16 is used if its matmuls take at most this multiple of float32's time.
SLOW = 1.2


@dataclass(frozen=True, slots=True)
class Resolved:
    """A spec whose models name their dtype; `why` explains each choice in words."""

    app: AppSpec
    why: dict[str, str]


def resolve(app: AppSpec, nodes: Sequence[Node], known: Specs) -> Resolved:
    """Choose the dtype of each model that names none; `known` versions keep theirs."""
    models, why = {}, {}
    for name, spec in app.models.items():
        models[name] = spec
        if spec.generation is None:
            continue
        if spec.generation.dtype is not None:
            why[name] = f"{spec.generation.dtype} (dtype)"
            continue
        facts = build_model(spec).generation
        if facts is None or not facts.dtype:
            continue
        before = known.get(name, {}).get(spec.version)
        slow = slowest(spec, nodes)
        if facts.dtype != "bfloat16" or not takes_dtype(spec):
            is_wide = False
        elif before is not None and before.generation is not None:
            is_wide = before.generation.dtype == "float32"
        else:
            is_wide = slow is not None
        why[name] = facts.dtype
        if spec.generation.quantization is not None:
            why[name] += f" (quantization: {spec.generation.quantization})"
        if is_wide:
            models[name] = widened(spec, facts)
            why[name] = "float32"
        if is_wide and slow is not None:
            why[name] += (
                f" ({slow.name} computes bfloat16, the folder's dtype, "
                f"{slow.bfloat16:.1f} times slower than float32; `dtype:` overrides "
                "this choice)"
            )
    return Resolved(app.model_copy(update={"models": models}), why)


def resolved_here(name: str, spec: ModelSpec, node: Node) -> ModelSpec:
    return resolve(AppSpec(models={name: spec}), [node], {}).app.models[name]


def slowest(spec: ModelSpec, nodes: Sequence[Node]) -> Node | None:
    """Return the slowest machine in bfloat16; None if all are fast enough."""
    pairs = zip(needs_of(spec), spec.stages, strict=True)
    needs = [need for need, stage in pairs if stage.device == "cpu"]
    # Unmeasured machines count as fast.
    usable = [n for n in nodes if any(need.allows(n.name) for need in needs)]
    found = max(usable, key=lambda n: n.bfloat16 or 0.0, default=None)
    return None if found is None or (found.bfloat16 or 0.0) <= SLOW else found


def widened(spec: ModelSpec, facts: Generation) -> ModelSpec:
    """Return a spec that computes in float32 with bfloat16 weights on disk."""
    assert spec.generation is not None
    generation = spec.generation.model_copy(update={"dtype": "float32"})
    stages = []
    for number, stage in enumerate(spec.stages):
        memory_mb = stage.memory_mb
        # ``weight_bytes`` is the size in bfloat16. Float32 takes twice as much: add it
        # again.
        if memory_mb and number < len(facts.weight_bytes):
            memory_mb += facts.weight_bytes[number] / MIB
        stages.append(stage.model_copy(update={"memory_mb": memory_mb}))
    return spec.model_copy(update={"generation": generation, "stages": stages})
