"""An ``nn.Module`` as a model: the description of it. Shell.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multiworld.serve.spec.stage import Tensors, TensorSpec, TextFrontend

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Module"]


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
