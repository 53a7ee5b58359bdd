"""The dtype names of the Open Inference Protocol, and example inputs."""

from __future__ import annotations

import torch

from multiworld.errors import SpecError
from multiworld.serve.spec.stage import Model, Tensors, TensorSpec

# Torch dtypes, by their names in the Open Inference Protocol.
TORCH_OF = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "UINT16": torch.uint16,
    "UINT32": torch.uint32,
    "UINT64": torch.uint64,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
NAME_OF = {dtype: name for name, dtype in TORCH_OF.items()}


def example_of(model: Model) -> Tensors:
    """Return example inputs for one request: ``model.example()``, or zeros."""
    if model.example is not None:
        try:
            return model.example()
        except Exception as error:
            raise SpecError(
                f"the model's example= raised {type(error).__name__}: {error}"
            ) from error
    if not model.inputs:
        raise SpecError(
            "the model has neither an example nor inputs, so no probe can be sent "
            "through it; return a Model with inputs= or example="
        )
    return {spec.name: _zeros(spec) for spec in model.inputs}


def _zeros(spec: TensorSpec) -> torch.Tensor:
    if spec.datatype not in TORCH_OF:
        raise SpecError(
            f"{spec.name} has the datatype {spec.datatype!r}; give one of "
            f"{', '.join(TORCH_OF)}"
        )
    shape = [1 if size < 0 else size for size in spec.shape]
    return torch.zeros(shape, dtype=TORCH_OF[spec.datatype])
