"""Pooling of the token vectors of a text into one vector, in sentence encoders."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import normalize


class Pooling(NamedTuple):
    kind: str  # ``mean`` of all tokens, or ``cls``: the first token
    is_normalized: bool

    def apply(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Pool [rows, length, hidden] to [rows, hidden]."""
        if self.kind == "cls":
            pooled = hidden[:, 0]
        else:
            weights = mask.unsqueeze(-1).to(hidden.dtype)
            pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return normalize(pooled, dim=-1) if self.is_normalized else pooled
