"""Encoding of objects, and of bundles: a JSON manifest, then the tensors, aligned."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiworld.backends import dtypes
from multiworld.backends.base import Bundle, Meta
from multiworld.backends.offload import size_of
from multiworld.errors import ConfigError, TensorMismatchError

ALIGNMENT = 64  # bytes: one cache line, and enough for any vector load
COPIED_BYTES = 64 * 1024  # largest tensor that is copied faster without torch


def encode_object(obj: Any, what: str) -> bytes:
    """Return plain data as JSON; ``what`` names it in the ``ConfigError``."""
    try:
        return json.dumps(obj, separators=(",", ":"), allow_nan=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"send plain data (str, int, float, bool, None, list, dict): {error}"
        raise ConfigError(what, obj, rule) from error


def decode_object(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TensorMismatchError("an object arrived that is not JSON") from error


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of the parts of a bundle in its message."""

    manifest: bytes
    # Each tensor, with its offset in the bundle in bytes.
    pieces: list[tuple[int, Tensor]]
    size: int

    def pack(self) -> Tensor:
        """Return one uint8 tensor that holds the manifest and all tensors."""
        packed = torch.empty(self.size, dtype=torch.uint8)
        memory = dtypes.memory_of(packed)
        memory[: len(self.manifest)] = self.manifest
        for begin, given in self.pieces:
            tensor = dtypes.plain(given)
            end = begin + tensor.nbytes
            if tensor.nbytes <= COPIED_BYTES:
                memory[begin:end] = dtypes.memory_of(tensor)
            else:
                # Copy with torch: a copy through a memoryview would hold the GIL.
                packed[begin:end].copy_(tensor.view(-1).view(torch.uint8))
        return packed


def lay_out(tensors: Mapping[str, Tensor], meta: Meta) -> Layout:
    for field, value in (("tensors", tensors), ("meta", meta)):
        if not isinstance(value, Mapping):
            raise ConfigError(field, value, "give a mapping")
    entries, pieces, offset = [], [], 0
    for name, given in tensors.items():
        if not isinstance(name, str):
            raise ConfigError("a tensor's name", name, "give a str")
        tensor = dtypes.require_host(given, f"tensor {name!r}")
        entries.append([name, dtypes.code_of(tensor), list(tensor.shape), offset])
        pieces.append((offset, tensor))
        offset += aligned(size_of(tensor))
    manifest = encode_object([entries, dict(meta)], "meta")
    start = aligned(len(manifest))
    placed = [(start + where, tensor) for where, tensor in pieces]
    return Layout(manifest, placed, start + offset)


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def unpack_bundle(packed: Tensor, length: int, source: int) -> Bundle:
    """Return the bundle in ``packed`` (uint8), whose memory its tensors share."""
    start = aligned(length)
    content = decode_object(bytes(dtypes.memory_of(packed)[:length]))
    try:
        entries, meta = content
        tensors = {
            str(name): tensor_at(packed, start + int(offset), int(code), shape)
            for name, code, shape, offset in entries
        }
        return Bundle(tensors, dict(meta), source)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise TensorMismatchError(
            f"rank {source} sent a bundle whose manifest cannot be read ({error}); use "
            "one release of multiworld everywhere"
        ) from error


def tensor_at(packed: Tensor, begin: int, code: int, shape: Sequence[int]) -> Tensor:
    """Return a tensor that lies in ``packed`` (flat, uint8) and shares its memory."""
    # KeyError: the dtype is unknown. ValueError: the tensor is not within ``packed``.
    # RuntimeError: torch refuses the arguments.
    size = _size_within(packed.numel(), begin, code, shape)
    return packed[begin : begin + size].view(dtypes.DTYPES[code]).view(shape)


def tensor_from(
    memory: memoryview, begin: int, code: int, shape: Sequence[int]
) -> Tensor:
    """Return a copy of a tensor in ``memory``; errors are as for ``tensor_at``."""
    size = _size_within(len(memory), begin, code, shape)
    tensor = torch.empty(shape, dtype=dtypes.DTYPES[code])
    dtypes.memory_of(tensor)[:] = memory[begin : begin + size]
    return tensor


def _size_within(room: int, begin: int, code: int, shape: Sequence[int]) -> int:
    size = math.prod(shape) * dtypes.DTYPES[code].itemsize
    if any(extent < 0 for extent in shape):
        raise ValueError("a tensor has a negative size")
    if begin < 0 or begin + size > room:
        raise ValueError("a tensor extends beyond its bundle")
    return size
