"""Cutting of an ``nn.Module`` into the stages of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from multiworld.errors import SpecError
from multiworld.serve.spec.module import Module
from multiworld.serve.spec.stage import Model, Stage, StageContext, Tensors

if TYPE_CHECKING:
    from multiworld.serve.engine.models.tracing import Cutter, TracedPart

__all__ = ["Module", "cut_module"]


def cut_module(module: Module, stages: int, cut: Sequence[int] | None = None) -> Model:
    """Return a module as a model with the given number of stages.

    Args:
        module: The description of the module.
        stages: Number of stages.
        cut: Number of the first part of every stage but the first; ``multiworld
            partition`` proposes it.

    Raises:
        SpecError: The description is inconsistent. Mistakes that only tracing finds are
            raised when a stage is loaded.
    """
    if not module.inputs or not module.outputs:
        raise SpecError(
            "a Module needs inputs= and outputs=: add what forward takes and returns"
        )
    if module.ragged and stages > 1:
        raise SpecError(
            "ragged= is for a Module of one stage, because tensors between stages are "
            "not padded; remove it: then only requests of equal length share a batch"
        )
    _check_cut(cut, stages)
    made = [
        Stage(
            load=functools.partial(_load, module, number, stages, cut),
            ragged=module.ragged,
        )
        for number in range(stages)
    ]
    return Model(
        stages=made,
        inputs=module.inputs,
        outputs=module.outputs,
        example=module.example,
        text=module.text,
        embedding=module.embedding,
        check=module.check,
        preload=["multiworld.serve.engine.models.tracing", *module.preload],
        parts=functools.partial(_in_parts, module, stages),
        files=() if module.weights is None else [str(module.weights)],
    )


def _check_cut(cut: Sequence[int] | None, stages: int) -> None:
    if cut is None:
        return
    if (
        len(cut) != stages - 1
        or list(cut) != sorted(set(cut))
        or min(cut, default=1) < 1
    ):
        raise SpecError(
            f"cut={list(cut)} must name the first parts of stages 1 to {stages - 1}, "
            "ascending, from 1"
        )


def _load(
    module: Module,
    number: int,
    stages: int,
    cut: Sequence[int] | None,
    context: StageContext,
) -> Callable[[Tensors], Tensors]:
    from multiworld.serve.engine.models import tracing

    return tracing.Cutter(module, stages, cut).load(number, context.device)


def _part(cutter: Cutter, number: int, context: StageContext) -> TracedPart:
    return cutter.load(number, context.device)


def _in_parts(module: Module, stages: int) -> Model:
    """Return the module with one stage for each part, at least ``stages`` parts."""
    from multiworld.serve.engine.models import tracing

    cutter = tracing.Cutter(module, None, min_parts=stages)
    return Model(
        stages=[
            Stage(load=functools.partial(_part, cutter, number), name=name)
            for number, name in enumerate(cutter.begins)
        ],
        inputs=module.inputs,
        outputs=module.outputs,
        example=module.example,
    )
