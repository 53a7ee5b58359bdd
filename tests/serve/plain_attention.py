"""An attention kernel of one's own: plain products, without windows and caps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multiworld.serve.engine.compute.kv_cache import KvCache, Rows


class PlainAttention:
    """Attention of one step.

    Args:
        cache: Keys and values of the stage.
        rows: The rows of the step.
    """

    def __init__(self, cache: KvCache, rows: Sequence[Rows]) -> None:
        self._cache, self._rows = cache, rows

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
        """Keep the keys and values, and attend; see ``kv_cache.Attention``."""
        assert window is softcap is None
        scale = query.shape[2] ** -0.5 if scale is None else scale
        found, offset = [], 0
        for rows in self._rows:
            here = slice(offset, offset + rows.count)
            kept = self._cache.append(rows, layer, key[:, here], value[:, here])
            group = len(query) // len(key)
            keys, values = (each.repeat_interleave(group, 0) for each in kept)
            scores = query[:, here] @ keys.transpose(1, 2) * scale
            at = torch.arange(rows.begin, rows.begin + rows.count)[:, None]
            later = torch.arange(keys.shape[1])[None] > at
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            found.append((weights @ values).transpose(0, 1))
            offset += rows.count
        return torch.cat(found)
