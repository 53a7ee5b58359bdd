"""From a model's spec to its stages."""

from __future__ import annotations

from multiworld.errors import SpecError
from multiworld.serve.spec import ModelSpec
from multiworld.serve.stage import Model, build

HUGGINGFACE = "multiworld.serve.models.huggingface:model"


def build_model(spec: ModelSpec) -> Model:
    """Return the stages of a model.

    Raises:
        SpecError: They cannot be made, or are not as many as the spec has.
    """
    wanted = len(spec.stages)
    if spec.factory is not None:
        model = build(spec.factory, spec.options)
    else:
        options = {"path": spec.path, "stages": wanted, **spec.options}
        model = build(HUGGINGFACE, options)
    if len(model.stages) != wanted:
        names = ", ".join(s.name or str(n) for n, s in enumerate(model.stages))
        raise SpecError(
            f"the model has {len(model.stages)} stages ({names}) and its `stages:` in "
            f"the spec {wanted}; give as many there"
        )
    return model


def modules_of(spec: ModelSpec, model: Model) -> list[str]:
    """Return the modules that a warm process has imported for this model."""
    factory = spec.factory or HUGGINGFACE
    return [factory.partition(":")[0], *model.preload]


def stage_name(spec: ModelSpec, model: Model, number: int) -> str:
    """Return what to call a stage before people."""
    return spec.stages[number].name or model.stages[number].name or str(number)
