"""Description of a model that is an ``nn.Module``.

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

    An ``nn.Sequential`` is cut between its children. Any other module is traced by
    ``torch.distributed.pipelining`` and cut where a submodule starts, so
    ``torch.export`` must be able to trace its ``forward`` with any number of rows. The
    spec's ``cut`` sets the cut points; by default the stages have about equal numbers
    of operations.

    Attributes:
        make: Builds the module. Every call must return the same structure and, without
            ``weights``, the same weights.
        inputs: Arguments of ``forward``, in order; dimension 0 holds the rows.
        outputs: Results of ``forward``, in order; if it returns a dict, in the order of
            its keys.
        weights: Safetensors file, or folder with such files and their index. Each
            replica then reads only the weights of its own stage, and ``make`` allocates
            no memory for weights. By default the weights are those of the module that
            ``make`` returns; every replica then builds the whole module and drops the
            other stages.
        example: As in ``Model``. Tracing uses its sizes: a dimension whose size is 1
            there accepts only size 1. A request is refused if its sizes would make
            ``forward`` take another branch than in tracing. The number of rows has no
            such limits.
        ragged: Padding values as in ``Stage``, for a single stage only. With several
            stages it must be empty, and only requests of equal length share a batch.
        text: As in ``Model``.
        embedding: As in ``Model``.
        check: As in ``Model``.
        preload: As in ``Model``.
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
