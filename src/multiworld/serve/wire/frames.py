"""Frames: messages that a process sends to another in one event loop iteration.

A frame has any number of messages, with the tensors that they carry. It consists of:
``_LEAD``, with the protocol version and the length of the header; the header, which is
MessagePack of the messages and of the name, dtype and shape of each tensor; and the
tensors, each at an offset that ``aligned`` returns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from multiworld.backends.bundles import Layout, aligned, tensor_at, tensor_from
from multiworld.backends.dtypes import code_of, memory_of, plain
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.wire.edge_messages import EdgeMessage, contents_of
from multiworld.serve.wire.protocol import PROTOCOL, MessageError, check_version

_LEAD = struct.Struct("<HxxI")

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Described = tuple[str, int, tuple[_Size, ...]]

Entry = tuple[EdgeMessage, Sequence[Tensors]]  # a message, and the tensors of its items


class _Header(msgspec.Struct, array_like=True):
    messages: tuple[EdgeMessage, ...]
    contents: tuple[tuple[_Described, ...], ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def lay_out(entries: Sequence[Entry]) -> Layout:
    """Return the layout of a frame; its tensors must be dense and on the host."""
    tensors: list[Tensor] = []
    contents = []
    for _, items in entries:
        for item in items:
            described = []
            for name, given in item.items():
                tensor = plain(given)
                tensors.append(tensor)
                described.append((name, code_of(tensor), tuple(tensor.shape)))
            contents.append(described)
    body = _encoder.encode([[message for message, _ in entries], contents])
    header = _LEAD.pack(PROTOCOL, len(body)) + body
    offset = len(header)
    pieces = []
    for tensor in tensors:
        offset = aligned(offset)
        pieces.append((offset, tensor))
        offset += tensor.nbytes
    return Layout(header, pieces, offset)


def unpack(packed: Tensor | memoryview) -> list[tuple[EdgeMessage, list[Tensors]]]:
    """Return the messages of a frame, each with the tensors of its items."""
    memory = _bytes_of(packed)
    if len(memory) < _LEAD.size:
        raise MessageError("a frame is malformed: it is too short")
    version, length = _LEAD.unpack_from(memory)
    if version != PROTOCOL:
        check_version(version)
    offset = _LEAD.size + length
    at: Callable[..., Tensor] = tensor_at  # tensors share the memory of the frame
    if isinstance(packed, memoryview):
        at = tensor_from  # tensors are copies
    try:
        header = _decoder.decode(memory[_LEAD.size : offset])
        contents = []
        for described in header.contents:
            tensors: Tensors = {}
            for name, code, shape in described:
                begin = aligned(offset)
                tensors[name] = tensor = at(packed, begin, code, shape)
                offset = begin + tensor.nbytes
            contents.append(tensors)
        return list(_shared_out(header.messages, contents))
    except (msgspec.DecodeError, KeyError, ValueError, RuntimeError) as error:
        raise MessageError(f"a frame is malformed: {error}") from None


def _bytes_of(packed: Tensor | memoryview) -> memoryview:
    if isinstance(packed, memoryview):
        return packed
    return memory_of(packed) if packed.dtype == torch.uint8 else memoryview(b"")


def _shared_out(
    messages: Sequence[EdgeMessage], contents: list[Tensors]
) -> list[tuple[EdgeMessage, list[Tensors]]]:
    found: list[tuple[EdgeMessage, list[Tensors]]] = []
    begin = 0
    for message in messages:
        count = contents_of(message)
        found.append((message, contents[begin : begin + count]))
        begin += count
    if begin != len(contents):
        raise ValueError(f"{len(contents)} contents for {begin} items")
    return found
