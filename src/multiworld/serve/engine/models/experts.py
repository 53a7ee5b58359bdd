"""The experts of a mixture as linears, for CPUs.

transformers keeps the weights of all experts of a layer in two tensors. As separate
linears, experts are packed, quantized and made batch-invariant like other linears. The
outputs of a token's experts are added in the order of the experts' numbers, so the
other rows of a step do not affect the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Experts(nn.Module):
    """Replaces a module of transformers that has the weights of all experts."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.gate_up = nn.ModuleList(map(_linear, found.gate_up_proj.detach()))
        self.down = nn.ModuleList(map(_linear, found.down_proj.detach()))
        self.act_fn = found.act_fn  # ``_apply_gate`` uses it
        self._apply_gate = found._apply_gate
        del found.gate_up_proj, found.down_proj

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of the experts' outputs, [rows, hidden]."""
        # ``hidden`` is [rows, hidden]. ``chosen`` has the numbers of each row's
        # experts, [rows, experts of a token], int64. ``weights`` has their factors, in
        # the same shape.
        found = torch.zeros_like(hidden)
        for number in sorted(set(chosen.flatten().tolist())):
            if number >= len(self.down):
                continue  # the number stands for "no expert"
            rows, places = (chosen == number).nonzero(as_tuple=True)
            inner = self._apply_gate(self.gate_up[number](hidden[rows]))
            out = self.down[number](inner) * weights[rows, places, None]
            found.index_add_(0, rows, out.to(found.dtype))
        return found


def _linear(weight: Tensor) -> nn.Linear:
    outputs, inputs = weight.shape
    made = nn.Linear(inputs, outputs, bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def split_experts(module: nn.Module) -> None:
    """Replace the experts of a module, in place, where their form is known."""
    for holder in list(module.modules()):
        for name, found in list(holder.named_children()):
            if is_known(found):
                setattr(holder, name, Experts(found))


def is_known(module: Any) -> bool:
    """Return whether a module's experts can be replaced."""
    kept = {"gate_up_proj", "down_proj"}
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return (
        names == kept
        and getattr(module, "has_gate", False)
        and not module.is_transposed
        and not getattr(module, "has_post_expert_norm", False)
    )
