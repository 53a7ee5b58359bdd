"""Matmuls with weights that are packed once, for CPUs.

Matmuls with bfloat16 weights use C code compiled on this machine, if available; all
others use oneDNN, which computes on blocks of weights. torch's ``linear`` packs weights
into blocks at every call. With weights that are packed once, a matmul of 4 to 16 rows
takes half to three quarters of the time, and a language model's head less than half
(EPYC, float32).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from multiworld.serve.engine.models.bfloat16_products import Bfloat16Linear

logger = logging.getLogger("multiworld.serve")

DTYPES = (torch.float32, torch.bfloat16)  # dtypes whose weights are packed


# A matrix product with packed weights: a ``PackedLinear`` or a ``Bfloat16Linear``.
Product = Callable[[Tensor], Tensor]

# Numbers of rows in the trial: one for the code of a single row, one for tiles.
CHECKED = 1, 40


class PackedLinear:
    """A matmul with one weight, [outputs, inputs], and a bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.outputs, self.inputs = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._bias = None if bias is None else bias.detach()
        self._multiply: Any = torch.ops.mkldnn._linear_pointwise

    def __call__(self, given: Tensor) -> Tensor:
        rows = given.reshape(-1, given.shape[-1])
        out: Tensor = self._multiply(rows, self._weight, self._bias, "none", [], "")
        return out.view(*given.shape[:-1], self.outputs)


def pack_linears(module: nn.Module) -> None:
    """Pack the weights of linears; the module then cannot be trained."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return
    # Number of modules that use each parameter. The unpacked weight is freed only if no
    # other module uses it.
    users: dict[int, int] = {}
    for user in module.modules():
        for used in user.parameters(recurse=False):
            users[id(used)] = users.get(id(used), 0) + 1
    checked: set[object] = set()
    refused: set[object] = set()
    for found in module.modules():
        each: Any = found
        weight: Any = getattr(each, "weight", None)
        is_linear = type(each) is nn.Linear
        if not is_linear and type(each).__name__ != "Conv1D":
            continue
        if not isinstance(weight, Tensor) or weight.dtype not in DTYPES:
            continue
        if weight.device.type != "cpu":
            continue
        matrix = weight if is_linear else weight.t().contiguous()
        kind = matrix.shape, matrix.dtype, each.bias is None
        for make in makers_of(matrix.dtype):
            if (make, kind) in refused:
                continue
            try:
                with torch.inference_mode():
                    packed = make(matrix, each.bias)
                    # Check only the first linear of each kind.
                    if (make, kind) not in checked:
                        _check(packed, matrix, each)
                        checked.add((make, kind))
                break
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                if make is PackedLinear:
                    logger.warning("weights are not packed: %s (in %s)", error, each)
                refused.add((make, kind))
        else:
            continue
        each.forward = packed
        if users[id(weight)] == 1:
            each.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


def makers_of(dtype: torch.dtype) -> Sequence[Callable[[Tensor, Any], Product]]:
    """Return the classes that pack weights of a dtype, the fastest first."""
    return [Bfloat16Linear, PackedLinear] if dtype is torch.bfloat16 else [PackedLinear]


def packed_product(weight: Tensor) -> Product:
    """Return a matmul with a weight, packed in the fastest way that works.

    Raises RuntimeError or NotImplementedError if no way works.
    """
    *others, last = makers_of(weight.dtype)
    for make in others:
        try:
            return make(weight, None)
        except (RuntimeError, AttributeError, NotImplementedError):
            pass
    return last(weight, None)


def unmap(module: nn.Module) -> None:
    """Copy a module's tensors on the CPU into this process's own memory."""
    # transformers maps the file of the weights into memory, where it would change if
    # the file were overwritten while the model is served.
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.numel():
            tensor.data = tensor.data.clone()


def _check(packed: Product, matrix: Tensor, module: Any) -> None:
    """Raise RuntimeError if a matmul with packed weights gives other results."""
    row = torch.linspace(-1.0, 1.0, matrix.shape[1])
    for count in CHECKED:
        factors = torch.linspace(1.0, -2.0, count)[:, None]
        given = (row * factors).to(matrix)
        wanted, found = module(given).float(), packed(given).float()
        scale = float(wanted.abs().max())
        if not torch.allclose(found, wanted, rtol=0.05, atol=0.05 * scale):
            raise RuntimeError("a matmul with packed weights gives different results")
