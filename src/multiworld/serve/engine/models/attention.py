"""The attention of a step, as the layers of a decoder call it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class AttentionCall:
    """Arguments of the attention of one layer, for all rows of a step."""

    layer: int  # number of the layer in the model
    query: Tensor  # [heads, rows, size]
    key: Tensor  # [key heads, rows, size]; heads are a multiple of key heads
    value: Tensor  # like ``key``; its size may differ
    scale: float | None = None  # factor of the scores; None: 1 / sqrt(size)
    # Tokens that a row attends to, itself included; None: all earlier ones.
    window: int | None = None
    # Scores become ``softcap * tanh(score / softcap)``; None: no cap.
    softcap: float | None = None

    @property
    def factor(self) -> float:
        """The scale, or its default."""
        size: int = self.query.shape[2]
        return size**-0.5 if self.scale is None else self.scale

    def empty(self) -> Tensor:
        """Allocate the result, [rows, heads, size of values]."""
        heads, rows, _ = self.query.shape
        return self.query.new_empty((rows, heads, self.value.shape[2]))


class Attention(ABC):
    """Attention of the rows of one step over all earlier tokens of their sequences."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return ``compute`` of an ``AttentionCall`` with these arguments."""
        return self.compute(
            AttentionCall(layer, query, key, value, scale, window, softcap)
        )

    @abstractmethod
    def compute(self, call: AttentionCall) -> Tensor:
        """Append keys and values; return the result, [rows, heads, size of values]."""
