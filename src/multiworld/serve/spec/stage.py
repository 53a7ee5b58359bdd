"""What a model is to the service: stages, inputs and outputs, how rows are joined.

A factory returns a ``Model`` (or just a list of stages). It runs in every process of
the service, so it is cheap: weights are loaded by the ``load`` of a stage, in the
processes that run this stage.

::

    def model() -> Model:
        return Model(
            stages=[
                Stage(name="double", load=lambda context: lambda t: {"x": t["x"] * 2}),
                Stage(name="add", load=lambda context: lambda t: {"y": t["x"] + 1}),
            ],
            inputs=[TensorSpec("x", "FP32", (-1, 4))],
            outputs=[TensorSpec("y", "FP32", (-1, 4))],
        )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Model", "Stage", "StageContext", "TensorSpec", "Tensors", "TextFrontend"]

Tensors = dict[str, "Tensor"]
StageFunction = Callable[[Tensors], Tensors]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output, in the words of the Open Inference Protocol.

    Attributes:
        datatype: BOOL, UINT8 … INT64, FP16, BF16, FP32, FP64.
        shape: -1 for a dimension of any size; the first one is the rows.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


class Group(Protocol):
    """The ranks of one replica, for stages of several; called from the model's thread.

    Every rank calls the same operations in the same order.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over all ranks, in place, and return it."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return everybody's ``tensor``, by rank."""


@dataclass(frozen=True, slots=True)
class StageContext:
    """Where a stage is loaded.

    Attributes:
        device: The device of its tensors.
        group: The ranks of this replica; None if there is one only.
    """

    device: str = "cpu"
    group: Group | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of a model.

    Attributes:
        load: Loads what this stage owns, and returns the function that computes it: a
            dict of tensors in, a dict of tensors out, rows in dimension 0 of each. It
            runs in a thread of its own, under ``torch.inference_mode``.
        name: For people.
        ragged: Tensors, of what comes in and goes out, whose dimension 1 differs from
            request to request, and the value they are padded with. In a batch they are
            padded to the longest; outputs named here are cut to what came in.
        buckets: Lengths to pad to, ascending, where few lengths are better than the
            exact one (compiled models).
        is_batched: False if requests may never run together.
    """

    load: Callable[[StageContext], StageFunction]
    name: str = ""
    ragged: Mapping[str, float] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    is_batched: bool = True


class TextFrontend(Protocol):
    """Turns text into the inputs of stage 0, for ``/v1/embeddings``; in the gateway."""

    def encode(self, text: str) -> Tensors:
        """Return the inputs, one row each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, cut into stages.

    Attributes:
        stages: In order.
        inputs: What stage 0 takes.
        outputs: What the last stage gives.
        example: Makes the inputs of one request; a replica is ready when this has gone
            through it. Zeros of the inputs' shapes by default (with 1 for each -1).
        text: Loads what turns text into inputs; None if there is no such thing.
        embedding: The output that ``/v1/embeddings`` answers with.
        check: Looks at the inputs of a request, in the gateway, and raises
            ``InvalidRequestError`` for values that the model cannot take; names,
            datatypes and shapes have been compared with ``inputs`` by then.
        preload: Modules that its stages need and that take long to import.
        parts: Makes the same model in as many stages as it can be cut into, for
            ``multiworld partition``; None if it is cut by hand.
    """

    stages: Sequence[Stage]
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    example: Callable[[], Tensors] | None = None
    text: Callable[[], TextFrontend] | None = None
    embedding: str = "embedding"
    check: Callable[[Tensors], None] | None = None
    preload: Sequence[str] = ()
    parts: Callable[[], Model] | None = None
