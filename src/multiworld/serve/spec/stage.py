"""Description of a model: its stages, inputs and outputs, and batching.

A factory returns a ``Model`` (or just a list of stages). The factory runs in every
process of the service, so it must be cheap and must not load weights. Each stage's
``load`` loads the weights, only in the processes that run this stage.

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
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Generation",
    "Model",
    "Stage",
    "StageContext",
    "TensorSpec",
    "Tensors",
    "TextFrontend",
]

Tensors = dict[str, "Tensor"]
"""Tensors by name; dimension 0 of each holds the rows."""

StageFunction = Callable[[Tensors], Tensors]
"""The computation of a stage: inputs to outputs."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, datatype and shape of one input or output.

    Attributes:
        name: Name of the tensor.
        datatype: Datatype of the Open Inference Protocol: BOOL, UINT8 … UINT64,
            INT8 … INT64, FP16, BF16, FP32 or FP64.
        shape: Sizes; -1 for a dimension of any size. Dimension 0 holds the rows.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


class Group(Protocol):
    """Collectives among the ranks of one replica, called from the model's thread.

    Every rank must call the same operations in the same order.

    Attributes:
        rank: Rank of this process in the replica, from 0.
        size: Number of ranks.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place.

        Args:
            tensor: Summand; same shape and dtype on every rank.

        Returns:
            The same tensor, which now holds the sum.
        """

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Gather the tensors of all ranks.

        Args:
            tensor: Contribution of this rank; same shape and dtype on every rank.

        Returns:
            The tensors of all ranks, in rank order.
        """


@dataclass(frozen=True, slots=True)
class StageContext:
    """The environment in which a stage is loaded.

    Attributes:
        device: Torch device of the stage's tensors, such as ``cuda:0``.
        group: Collectives among the ranks of this replica; None if it has one rank.
        gpus: Indexes of the GPUs that the stage may use; ``device`` is the first of
            them.
    """

    device: str = "cpu"
    group: Group | None = None
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of a model.

    Attributes:
        load: Loads the weights of this stage and returns the function that computes it.
            That function takes and returns a dict of tensors, each with the rows in
            dimension 0. The replica calls the function in a separate thread, under
            ``torch.inference_mode``.
        name: Display name.
        ragged: Padding values, by name, of inputs and outputs whose dimension 1 differs
            between requests. A batch pads such inputs to the longest request, and cuts
            such outputs back to the length of their own request.
        buckets: Lengths to pad to, ascending, for models that should see few distinct
            lengths (such as compiled models). Empty: pad to the longest request.
        is_batched: False if the stage must compute one request at a time.
    """

    load: Callable[[StageContext], StageFunction]
    name: str = ""
    ragged: Mapping[str, float] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    is_batched: bool = True


class TextFrontend(Protocol):
    """Tokenizer for ``/v1/embeddings``: turns text into the inputs of stage 0.

    It runs in the gateway. A tokenizer that also has ``encode_tokens(ids)`` accepts
    arrays of token ids. By convention, on every API, text longer than the model's
    maximum is truncated, but an array with more token ids than the maximum is refused.
    """

    def encode(self, text: str) -> Tensors:
        """Return the inputs of stage 0 for one text.

        Args:
            text: The text to encode.

        Returns:
            The inputs, with one row each.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Properties of a model that generates text.

    Its stages are loaded as functions ``(rows, positions, attention, wanted)``; see
    ``multiworld.serve.engine.models.decoder_stage.DecoderStage.forward``.

    Attributes:
        tokenizer: Loads the tokenizer, which runs in the gateway.
        end_tokens: Tokens that end a completion.
        vocabulary: Number of tokens in the vocabulary.
        max_tokens: Maximum number of tokens of a sequence.
        kv_bytes: Bytes of the keys and values of one token, by stage.
        weights: Returns a name for the weights, such as a hash. If the weights of two
            versions of the model have the same name, running sequences move from one
            version to the other without a pause. Empty: sequences never move.
        dtype: Dtype of the computation; empty: unknown. A model with bfloat16 weights
            is computed in float32 if a machine is slow in bfloat16.
        weight_bytes: Bytes of the weights in the folder, by stage; empty: unknown.
        defaults: Values of ``temperature``, ``top_p``, ``top_k``, ``min_p`` and
            ``repetition_penalty`` for requests that give none.
    """

    tokenizer: Callable[[], Any]
    end_tokens: tuple[int, ...]
    vocabulary: int
    max_tokens: int
    kv_bytes: Sequence[int]
    weights: Callable[[], str] = str
    dtype: str = ""
    weight_bytes: Sequence[int] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model, cut into stages.

    Attributes:
        stages: The stages in order.
        inputs: Inputs of stage 0.
        outputs: Outputs of the last stage.
        example: Returns the inputs of one request. A replica is ready once a probe with
            these inputs has passed through it. By default the inputs are zeros in their
            declared shapes, with size 1 for each -1.
        text: Loads the tokenizer for ``/v1/embeddings``; None if the model has none.
        embedding: Name of the output that ``/v1/embeddings`` returns.
        notes: Notes for users of the model; ``plan`` and ``serve`` print them.
        check: Validates the inputs of a request in the gateway, once their names,
            datatypes and shapes match ``inputs``. Raises ``InvalidRequestError`` for
            values that the model cannot take.
        preload: Modules that the stages need and that take long to import.
        parts: Returns the same model in as many stages as possible, for ``multiworld
            partition``; None if the model is cut by hand.
        generation: Set if the model generates text; its stages then have another
            signature.
        files: Files that the stages read. A replica refuses to start if one of these
            files has changed since the version of the model was made.
    """

    stages: Sequence[Stage]
    inputs: Sequence[TensorSpec] = ()
    outputs: Sequence[TensorSpec] = ()
    example: Callable[[], Tensors] | None = None
    text: Callable[[], TextFrontend] | None = None
    embedding: str = "embedding"
    notes: Sequence[str] = ()
    check: Callable[[Tensors], None] | None = None
    preload: Sequence[str] = ()
    parts: Callable[[], Model] | None = None
    generation: Generation | None = None
    files: Sequence[str] = ()
