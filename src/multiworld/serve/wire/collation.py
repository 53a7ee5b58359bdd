"""Collation of requests into one batch, and splitting of its outputs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from multiworld.backends.dtypes import code_of, require_host
from multiworld.config import is_unicode
from multiworld.errors import InvalidRequestError, ModelFailedError, TensorMismatchError
from multiworld.serve.spec.stage import Tensors


def rows_of(tensors: Tensors) -> int:
    """Return the size of dimension 0, which must be the same for all tensors."""
    rows = -1
    for tensor in tensors.values():
        size = tensor.shape[0] if tensor.dim() else -1
        if size < 0 or size != rows >= 0:
            rows = -1
            break
        rows = size
    if rows < 0:
        sizes = {name: t.shape[0] if t.dim() else -1 for name, t in tensors.items()}
        raise InvalidRequestError(
            f"every tensor needs the same number of rows (dimension 0); got {sizes}"
        )
    return rows


def group_of(tensors: Tensors, ragged: Mapping[str, float]) -> Hashable:
    """Return a key that is equal for requests that can share a batch."""
    # Names, dtypes and fixed dimensions must be equal. Dimension 0 (rows) and, for
    # ragged tensors, dimension 1 (length) may differ. ``ragged`` maps the names of
    # ragged tensors to padding values.
    return tuple(
        (name, tensor.dtype, tensor.dim(), *tensor.shape[2 if name in ragged else 1 :])
        for name, tensor in sorted(tensors.items())
    )


def lengths_of(tensors: Tensors, ragged: Mapping[str, float]) -> dict[str, int]:
    """Return the size of dimension 1 of each ragged tensor, by name."""
    return {n: t.shape[1] for n, t in tensors.items() if n in ragged and t.dim() > 1}


def collate(
    requests: Sequence[Tensors], ragged: Mapping[str, float], buckets: Sequence[int]
) -> Tensors:
    """Return one batch of the rows of all requests, which must share a ``group_of``."""
    longest = {
        name: max(tensors[name].shape[1] for tensors in requests)
        for name in lengths_of(requests[0], ragged)
    }
    batch: Tensors = {}
    for name in requests[0]:
        parts = [tensors[name] for tensors in requests]
        if name in longest:
            # Buckets ascend: take the first that is long enough, or pad to ``most``.
            most = longest[name]
            length = next((bucket for bucket in buckets if bucket >= most), most)
            parts = [_padded(part, length, ragged[name]) for part in parts]
        batch[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
    return batch


def _padded(tensor: Tensor, length: int, value: float) -> Tensor:
    if tensor.shape[1] == length:
        return tensor
    shape = (tensor.shape[0], length, *tensor.shape[2:])
    padded = tensor.new_full(shape, value)
    padded[:, : tensor.shape[1]] = tensor
    return padded


def split(
    outputs: Tensors,
    rows: Sequence[int],
    lengths: Sequence[Mapping[str, int]],  # of ragged inputs, by request
    ragged: Mapping[str, float],
    stage: str,
) -> list[Tensors]:
    """Return each request's outputs, cut back to the length of its ragged inputs."""
    _check(outputs, sum(rows), stage)
    shares: list[Tensors] = []
    begin = 0
    for count, own in zip(rows, lengths, strict=True):
        share, most = {}, max(own.values(), default=None)
        for name, tensor in outputs.items():
            part = tensor[begin : begin + count]
            length = own.get(name, most)
            if name in ragged and part.dim() > 1 and length is not None:
                part = part[:, :length]
            share[name] = part
        shares.append(share)
        begin += count
    return shares


def _check(outputs: Tensors, rows: int, stage: str) -> None:
    if not isinstance(outputs, dict) or not outputs:
        raise ModelFailedError(
            f"stage {stage!r} returned a {type(outputs).__name__}; return a dict of "
            "tensors",
            stage=stage,
        )
    for name, tensor in outputs.items():
        if not isinstance(name, str) or not is_unicode(name):
            got = "a name that is not a valid string"
        elif not isinstance(tensor, Tensor):
            got = f"a {type(tensor).__name__}"
        elif tensor.dim() == 0 or tensor.shape[0] != rows:
            got = f"shape {tuple(tensor.shape)}"
        else:
            _check_sendable(name, tensor, stage)
            continue
        raise ModelFailedError(
            f"stage {stage!r} returned {got} for {name!r}; return a tensor with {rows} "
            "rows (dimension 0), one for each input row",
            stage=stage,
        )


def _check_sendable(name: str, tensor: Tensor, stage: str) -> None:
    try:
        require_host(tensor, f"output {name!r}")
        code_of(tensor)
    except TensorMismatchError as error:
        raise ModelFailedError(f"stage {stage!r}: {error}", stage=stage) from None
