"""The dtype that a version of a model is computed in.

It is decided once for a version, from what its hosts measured: replicas that compute in
several dtypes would make different tokens of one text. Everything else (bookings,
replicas, gateways, the record) sees a spec that names the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multiworld.serve.models.factory import build_model
from multiworld.serve.resources.amounts import MIB, Node, needs_of
from multiworld.serve.spec.schema import AppSpec, ModelSpec
from multiworld.serve.spec.stage import Generation

SLOW = 1.2
"""Cost of a product in bfloat16, as a multiple of float32, up to which it is used."""

Specs = Mapping[str, Mapping[str, ModelSpec]]
"""Specs by model and version."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A spec whose models name their dtype, where it was decided.

    Attributes:
        app: The spec.
        why: In words, the dtype of each model that generates text, and the reason.
    """

    app: AppSpec
    why: dict[str, str]


def resolve(app: AppSpec, nodes: Sequence[Node], known: Specs) -> Resolved:
    """Decide the dtype of each model that generates text and does not name one.

    Args:
        app: The spec.
        nodes: The machines.
        known: Versions for which it was decided before; they keep their dtype.

    Raises:
        SpecError: A model cannot be built.
    """
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
        if facts.dtype != "bfloat16":
            is_wide = False
        elif before is not None and before.generation is not None:
            is_wide = before.generation.dtype == "float32"
        else:
            is_wide = slow is not None
        why[name] = facts.dtype
        if is_wide:
            models[name] = widened(spec, facts)
            why[name] = "float32"
        if is_wide and slow is not None:
            why[name] += f" ({slow.name} computes bfloat16, as in the folder, "
            why[name] += f"{slow.bfloat16:.1f} times slower; dtype: overrides it)"
    return Resolved(app.model_copy(update={"models": models}), why)


def resolved_here(name: str, spec: ModelSpec, node: Node) -> ModelSpec:
    """Return the spec of one model with the dtype that a machine would compute it in.

    Args:
        name: Name of the model.
        spec: Its spec.
        node: The machine.

    Raises:
        SpecError: The model cannot be built.
    """
    return resolve(AppSpec(models={name: spec}), [node], {}).app.models[name]


def slowest(spec: ModelSpec, nodes: Sequence[Node]) -> Node | None:
    """Return the machine that is slowest in bfloat16, if it is too slow.

    Args:
        spec: Spec of the model; only machines on which it may run count.
        nodes: The machines; one that has not measured it counts as fast.
    """
    needs = needs_of(spec)
    usable = [n for n in nodes if any(need.allows(n.name) for need in needs)]
    found = max(usable, key=lambda n: n.bfloat16 or 0.0, default=None)
    return None if found is None or (found.bfloat16 or 0.0) <= SLOW else found


def widened(spec: ModelSpec, facts: Generation) -> ModelSpec:
    """Return a spec that computes a bfloat16 folder in float32.

    Its weights take twice the memory, which is booked where a stage books any.

    Args:
        spec: The spec.
        facts: Facts about the model, as in the folder.
    """
    assert spec.generation is not None
    generation = spec.generation.model_copy(update={"dtype": "float32"})
    stages = []
    for number, stage in enumerate(spec.stages):
        memory_mb = stage.memory_mb
        if memory_mb and number < len(facts.weight_bytes):
            memory_mb += facts.weight_bytes[number] / MIB
        stages.append(stage.model_copy(update={"memory_mb": memory_mb}))
    return spec.model_copy(update={"generation": generation, "stages": stages})
