"""An ``nn.Module`` as a model: described here, cut by ``tracing``.

::

    def model() -> Module:
        return Module(
            make=MyNet,
            weights="/models/mynet.safetensors",
            inputs=[TensorSpec("image", "FP32", (-1, 3, 224, 224))],
            outputs=[TensorSpec("logits", "FP32", (-1, 1000))],
        )
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiworld.errors import SpecError
from multiworld.serve.spec.stage import (
    Model,
    Stage,
    StageContext,
    Tensors,
    TensorSpec,
    TextFrontend,
)

if TYPE_CHECKING:
    from torch import nn

    from multiworld.serve.models.tracing import Cutter, TracedPart

__all__ = ["Module", "cut_module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """An ``nn.Module`` that is cut into as many stages as the spec has.

    An ``nn.Sequential`` is cut between its children. Anything else is traced by
    ``torch.distributed.pipelining`` and cut where a submodule begins, so ``forward``
    must be something that ``torch.export`` can trace with any number of rows. Where,
    the spec's ``cut`` says; by default stages get about equally many operations.

    Attributes:
        make: Builds the module; the same one every time.
        inputs: What ``forward`` takes, in its order; rows in dimension 0.
        outputs: What it returns, in order (of a dict: in the order of its keys).
        weights: A safetensors file, or a folder with such files and their index. A
            replica then reads only what its stage owns, and ``make`` costs no memory.
            By default weights are what ``make`` leaves in the module; every replica
            builds it whole, and drops what it does not own.
        example: As of ``Model``. Its sizes are those it is traced with, where a size of
            1 stands for 1 only.
        ragged: Inputs of different lengths in dimension 1, which are padded; only for
            models of a single stage. With more, requests of equal length run together.
        text: As of ``Model``.
        embedding: As of ``Model``.
        check: As of ``Model``.
        preload: As of ``Model``.
    """

    make: Callable[[], nn.Module]
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    weights: str | None = None
    example: Callable[[], Tensors] | None = None
    ragged: Mapping[str, float] = field(default_factory=dict)
    text: Callable[[], TextFrontend] | None = None
    embedding: str = "embedding"
    check: Callable[[Tensors], None] | None = None
    preload: Sequence[str] = ()


def cut_module(module: Module, stages: int, cut: Sequence[int] | None = None) -> Model:
    """Return a module as a model of so many stages.

    Args:
        stages: How many.
        cut: The first part of every stage after the first, by number, as ``multiworld
            partition`` proposes.

    Raises:
        SpecError: The description cannot be right. What only shows when it is traced
            is raised by the ``load`` of its stages.
    """
    if not module.inputs or not module.outputs:
        raise SpecError(
            "a Module needs inputs= and outputs=: what forward takes and gives"
        )
    if module.ragged and stages > 1:
        raise SpecError(
            "ragged= is for a Module of one stage; what goes between stages is not "
            "padded, so leave it out, and requests of equal length run together"
        )
    check_cut(cut, stages)
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
        preload=["multiworld.serve.models.tracing", *module.preload],
        parts=functools.partial(_in_parts, module, stages),
    )


def check_cut(cut: Sequence[int] | None, stages: int) -> None:
    """Raise ``SpecError`` unless ``cut`` can be where so many stages begin."""
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
    from multiworld.serve.models import tracing

    return tracing.Cutter(module, stages, cut).load(number, context.device)


def _part(cutter: Cutter, number: int, context: StageContext) -> TracedPart:
    return cutter.load(number, context.device)


def _in_parts(module: Module, stages: int) -> Model:
    """Return it in as many stages as it can be cut into."""
    from multiworld.serve.models import tracing

    cutter = tracing.Cutter(module, None, least=stages)
    return Model(
        stages=[
            Stage(load=functools.partial(_part, cutter, number), name=name)
            for number, name in enumerate(cutter.begins)
        ],
        inputs=module.inputs,
        outputs=module.outputs,
        example=module.example,
    )
