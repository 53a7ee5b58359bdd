"""Flat views of tensors, and copies back into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multiworld.backends.dtypes import flat, overwrite, require_host
from multiworld.errors import TensorMismatchError


def on_device(tensor: Tensor, device: torch.device, what: str) -> Tensor:
    """Return ``tensor``, detached, if it is dense and on this device."""
    if not isinstance(tensor, Tensor):
        raise TensorMismatchError(
            f"{what} must be a torch.Tensor, not {type(tensor).__name__}"
        )
    # "cpu:0" and "cpu" are the same device.
    has_index = device.type != "cpu" and device.index is not None
    is_there = (
        tensor.device == device if has_index else tensor.device.type == device.type
    )
    if not is_there or tensor.layout is not torch.strided:
        raise TensorMismatchError(
            f"{what} is {tensor.layout} on {tensor.device}; this world carries dense "
            f"tensors on '{device}'"
        )
    if device.type == "cpu":
        return require_host(tensor, what)
    return tensor.detach()


def flat_of(tensor: Tensor) -> Tensor:
    """Return ``tensor`` flat and contiguous: as a view if possible, else as a copy."""
    return flat(tensor.detach().resolve_conj().resolve_neg().contiguous())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, so that groups can move every dtype."""
    return flat(tensor).view(torch.uint8)


def write_back(tensor: Tensor, source: Tensor) -> None:
    """Copy the flat ``source`` into ``tensor``, unless it is a view of ``tensor``."""
    if tensor.data_ptr() != source.data_ptr() or not tensor.is_contiguous():
        overwrite(tensor.detach(), source.view(tensor.shape))


def write_back_all(tensors: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
    for tensor, source in zip(tensors, flats, strict=True):
        write_back(tensor, source)
