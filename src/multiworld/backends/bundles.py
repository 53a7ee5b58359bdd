"""Bytes of objects and bundles.

A bundle is several named tensors and metadata in one message: a manifest in JSON, then
the tensors, each at an aligned offset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multiworld.backends.base import Bundle, Meta
from multiworld.backends.dtypes import (
    DTYPES,
    code_of,
    memory_of,
    plain,
    require_host,
)
from multiworld.backends.offload import size_of
from multiworld.errors import ConfigError, TensorMismatchError

ALIGNMENT = 64
"""Bytes that each tensor of a bundle is aligned to: one cache line, and enough for any
vector load."""

COPIED_BYTES = 64 * 1024
"""Bytes of a tensor up to which it is copied without torch, which costs less."""


def encode_object(obj: Any, what: str) -> bytes:
    """Return plain data as JSON; ``what`` names it in the error.

    Raises:
        ConfigError: ``obj`` is not JSON data.
    """
    try:
        return json.dumps(obj, separators=(",", ":"), allow_nan=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"send plain data (str, int, float, bool, None, list, dict): {error}"
        raise ConfigError(what, obj, rule) from error


def decode_object(body: bytes) -> Any:
    """Return the data that ``encode_object`` encoded.

    Raises:
        TensorMismatchError: ``body`` is not JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TensorMismatchError("an object arrived that is not JSON") from error


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory layout of a manifest with tensors behind it.

    Attributes:
        manifest: The first bytes, which describe the tensors.
        pieces: Each tensor, contiguous, with its offset in bytes.
        size: Bytes of all together.
    """

    manifest: bytes
    pieces: list[tuple[int, Tensor]]
    size: int

    def pack(self) -> Tensor:
        """Return one uint8 tensor that holds the manifest and all tensors."""
        packed = torch.empty(self.size, dtype=torch.uint8)
        memory = memory_of(packed)
        memory[: len(self.manifest)] = self.manifest
        for begin, tensor in self.pieces:
            end = begin + tensor.nbytes
            if tensor.nbytes <= COPIED_BYTES:
                memory[begin:end] = memory_of(tensor)
            else:
                # Not by memoryview, because its copy would hold the GIL.
                packed[begin:end].copy_(tensor.view(-1).view(torch.uint8))
        return packed


def lay_out(tensors: Mapping[str, Tensor], meta: Meta) -> Layout:
    """Return the layout of a bundle.

    Raises:
        TensorMismatchError: A tensor cannot be sent.
        ConfigError: A name is not a str, or ``meta`` is not JSON data.
    """
    entries, pieces, offset = [], [], 0
    for name, given in tensors.items():
        if not isinstance(name, str):
            raise ConfigError("a tensor's name", name, "give a str")
        tensor = plain(require_host(given, f"tensor {name!r}"))
        entries.append([name, code_of(tensor), list(tensor.shape), offset])
        pieces.append((offset, tensor))
        offset += aligned(size_of(tensor))
    manifest = encode_object([entries, dict(meta)], "meta")
    start = aligned(len(manifest))
    placed = [(start + where, tensor) for where, tensor in pieces]
    return Layout(manifest, placed, start + offset)


def aligned(size: int) -> int:
    """Return the next multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def unpack_bundle(packed: Tensor, length: int, source: int) -> Bundle:
    """Return the bundle whose manifest is the first ``length`` bytes of ``packed``.

    Args:
        packed: The bundle as a uint8 tensor; the bundle's tensors share its storage.
        length: Bytes of the manifest.
        source: Rank of the sender.

    Raises:
        TensorMismatchError: The manifest does not describe what follows it.
    """
    start = aligned(length)
    content = decode_object(bytes(memory_of(packed)[:length]))
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
    """Return a tensor that lies in ``packed`` and shares its memory.

    Args:
        packed: A flat uint8 tensor.
        begin: Offset of the tensor, in bytes.
        code: Wire code of its dtype.
        shape: Its dimensions.

    Raises:
        KeyError: The code is unknown.
        ValueError: It does not lie within ``packed``.
        RuntimeError: Torch does not allow such a shape, or such an offset.
    """
    size = _size_within(packed.numel(), begin, code, shape)
    return packed[begin : begin + size].view(DTYPES[code]).view(shape)


def tensor_from(
    memory: memoryview, begin: int, code: int, shape: Sequence[int]
) -> Tensor:
    """Return a copy of a tensor that lies in ``memory``.

    Args:
        memory: Bytes.
        begin: Offset of the tensor, in bytes.
        code: Wire code of its dtype.
        shape: Its dimensions.

    Raises:
        KeyError: The code is unknown.
        ValueError: It does not lie within ``memory``.
        RuntimeError: Torch does not allow such a shape.
    """
    size = _size_within(len(memory), begin, code, shape)
    tensor = torch.empty(shape, dtype=DTYPES[code])
    memory_of(tensor)[:] = memory[begin : begin + size]
    return tensor


def _size_within(room: int, begin: int, code: int, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor that must lie within a number of bytes.

    Raises:
        KeyError: The code is unknown.
        ValueError: It does not.
    """
    size = math.prod(shape) * DTYPES[code].itemsize
    if any(extent < 0 for extent in shape):
        raise ValueError("a negative extent")
    if begin < 0 or begin + size > room:
        raise ValueError("a tensor outside its bundle")
    return size
