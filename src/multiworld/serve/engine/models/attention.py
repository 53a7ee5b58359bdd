"""What a decoder's layers need of the engine that they compute in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Attention(Protocol):
    """Attention of the rows of one step over all earlier tokens of their sequences."""

    def attend(
        self,
        layer: int,
        query: Tensor,  # [heads, rows, size]
        key: Tensor,  # [key heads, rows, size]; heads are a multiple of key heads
        value: Tensor,  # like ``key``; its size may differ
        *,
        scale: float | None = None,  # of the scores; None: 1 / sqrt(size)
        window: int | None = None,  # tokens that a row attends to, with itself
        softcap: float | None = None,  # ``softcap * tanh(score / softcap)``
    ) -> Tensor:
        """Append keys and values of the rows; return [rows, heads, size of values]."""
