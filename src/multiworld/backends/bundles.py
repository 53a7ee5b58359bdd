"""Bytes of objects and bundles. Shell.

A bundle is several named tensors and metadata in one message: a manifest in JSON, then
the tensors, each at an aligned offset.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def encode_object(obj: Any, what: str) -> bytes:
    """Return plain data as JSON; ``what`` names it in the error.

    Raises:
        ConfigError: ``obj`` is not JSON data.
    """
    try:
        return json.dumps(obj, separators=(",", ":"), allow_nan=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"plain data (str, int, float, bool, None, list, dict): {error}"
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
    """The memory layout of a bundle.

    Attributes:
        manifest: JSON of the tensors' names, dtypes, shapes and offsets, and of the
            metadata.
        pieces: Each tensor with its offset, in bytes.
        size: Bytes of the whole bundle.
    """

    manifest: bytes
    pieces: list[tuple[int, Tensor]]
    size: int

    def pack(self) -> Tensor:
        """Return one uint8 tensor that holds the manifest and all tensors."""
        packed = torch.empty(self.size, dtype=torch.uint8)
        memory_of(packed)[: len(self.manifest)] = self.manifest
        for begin, tensor in self.pieces:
            source = plain(tensor).view(-1).view(torch.uint8)
            # Not by memoryview, because its copy would hold the GIL.
            packed[begin : begin + len(source)].copy_(source)
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
            raise ConfigError("a tensor's name", name, "a str")
        tensor = require_host(given, f"tensor {name!r}")
        entries.append([name, code_of(tensor), list(tensor.shape), offset])
        pieces.append((offset, tensor))
        offset += _aligned(size_of(tensor))
    manifest = encode_object([entries, dict(meta)], "meta")
    start = _aligned(len(manifest))
    placed = [(start + where, tensor) for where, tensor in pieces]
    return Layout(manifest, placed, start + offset)


def _aligned(size: int) -> int:
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
    start = _aligned(length)
    content = decode_object(bytes(memory_of(packed)[:length]))
    try:
        entries, meta = content
        tensors = {
            str(name): _slice(packed, start + int(offset), int(code), shape)
            for name, code, shape, offset in entries
        }
        return Bundle(tensors, dict(meta), source)
    except (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise TensorMismatchError("a bundle's manifest is malformed") from error


def _slice(packed: Tensor, begin: int, code: int, shape: list[int]) -> Tensor:
    dtype = DTYPES[code]
    count = 1
    for extent in shape:
        if extent < 0:
            raise ValueError("a negative extent")
        count *= extent
    size = count * dtype.itemsize
    if begin < 0 or begin + size > packed.numel():
        raise ValueError("a tensor outside its bundle")
    return packed[begin : begin + size].view(dtype).view(shape)
