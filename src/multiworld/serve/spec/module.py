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
    ``torch.distributed.pipelining`` and cut where a submodule starts; ``torch.export``
    must be able to trace its ``forward`` with any number of rows. The spec's ``cut``
    sets the cut points; by default all stages have about the same number of operations.

    Attributes:
        make: Builds the module. Every call must return the same structure and, without
            ``weights``, the same weights.
        inputs: Arguments of ``forward``, in order; dimension 0 holds the rows.
        outputs: Results of ``forward``, in order; if it returns a dict, in the order of
            its keys.
        weights: Safetensors file, or folder with such files and their index. With it,
            each replica reads only the weights of its own stage, and ``make`` allocates
            no memory for weights. By default the module that ``make`` returns has the
            weights; every replica then builds the whole module and drops the other
            stages.
        example: As in ``Model``. Tracing uses the example's sizes: a dimension of size
            1 in the example accepts only size 1. A request is refused if its sizes
            would make ``forward`` take a branch other than the traced one. The number
            of rows has no such limits.
        ragged: Padding values as in ``Stage``, for a single stage only. With several
            stages, it must be empty, and only requests of equal length share a batch.
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
