"""Tensors in the Open Inference Protocol v2: parsing of requests, rendering of answers.

Supports JSON and the binary tensor extension: a JSON part whose length is in the header
``Inference-Header-Content-Length``, followed by the raw tensors in order.

https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import orjson
import torch
from torch import Tensor

from multiworld.backends.dtypes import memory_of, plain
from multiworld.errors import InvalidRequestError, ModelFailedError
from multiworld.serve.gateway.http.json_limits import (
    NOT_JSON,
    check_objects,
    decode,
    pieces,
    small,
)
from multiworld.serve.spec.datatypes import NAME_OF, TORCH_OF
from multiworld.serve.spec.stage import Model, Tensors, TensorSpec
from multiworld.serve.wire.collation import rows_of

MAX_DIMENSIONS = 16  # maximum dimensions of a tensor
MAX_DIGITS = 18  # maximum digits of a length: ``int`` is slow for millions of digits
MAX_ELEMENTS = 2**40  # maximum elements of a tensor, and maximum size of a dimension
UNSIGNED = (torch.uint8, torch.uint16, torch.uint32)
FEW = 16  # up to this many values, Python checks faster than torch
PIECE = 8192  # values to write as JSON at once: about 1 ms
SHOWN = 80  # maximum characters of an invalid value in an error text


class InferenceParameters(msgspec.Struct, frozen=True):
    """Supported parameters of a request; others are ignored."""

    binary_data_output: Any = False
    timeout_s: Any = None
    timeout: Any = None  # microseconds, as sent by Triton's clients
    sequence_id: int | str | None = None  # 0 and "" mean none


class _InputParameters(msgspec.Struct, frozen=True):
    binary_data_size: Any = None


class _OutputParameters(msgspec.Struct, frozen=True):
    binary_data: Any = None
    classification: Any = None
    shared_memory_region: Any = None


class _Input(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: msgspec.Raw
    data: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct, frozen=True):
    name: str
    parameters: _OutputParameters | None = None


class _Body(msgspec.Struct, frozen=True):
    inputs: list[_Input]
    id: str | None = None
    parameters: msgspec.Raw = msgspec.Raw()
    outputs: msgspec.Raw = msgspec.Raw()


_bodies = msgspec.json.Decoder(_Body)
_parameters = msgspec.json.Decoder(InferenceParameters | None)
_input_parameters = msgspec.json.Decoder(_InputParameters | None)
_outputs_lists = msgspec.json.Decoder(list[_Output] | None)
_shapes = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]])
_numbers: dict[str, msgspec.json.Decoder[Any]] = {
    "float": msgspec.json.Decoder(list[float]),
    "int": msgspec.json.Decoder(list[int]),
    "bool": msgspec.json.Decoder(list[bool]),
}


class NotFiniteError(InvalidRequestError):
    """The answer has a NaN or an infinity, but the client asked for JSON."""

    status = 406


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A parsed request; ``outputs``: whether each requested output is binary."""

    tensors: Tensors
    id: str | None
    parameters: InferenceParameters
    outputs: dict[str, bool]

    @property
    def is_binary(self) -> bool:
        """True if outputs that the request does not name are sent as binary data."""
        return self.parameters.binary_data_output is True


def parse(
    body: bytes | bytearray, header_length: str | None, model: Model
) -> InferenceRequest:
    length = json_length(header_length, len(body))
    text = body if length == len(body) else body[:length]
    check_objects(text)
    payload = decode(text, _bodies)
    parameters = InferenceParameters()
    if payload.parameters:
        parameters = (
            small(payload.parameters, '"parameters"', _parameters) or parameters
        )
    raw, offset = memoryview(body), length
    tensors: Tensors = {}
    for item in payload.inputs:
        tensor, used = _input(item, raw[offset:])
        offset += used
        if item.name in tensors:
            raise InvalidRequestError(
                f"input {item.name!r} occurs twice; give each input once"
            )
        tensors[item.name] = tensor
    if offset != len(body):
        left = len(body) - offset
        raise InvalidRequestError(
            f"body has {left} extra bytes after the last input; remove them"
        )
    check(tensors, model)
    outputs = _outputs(payload.outputs, parameters, model)
    return InferenceRequest(tensors, payload.id, parameters, outputs)


def json_length(header: str | None, total: int) -> int:
    """Return the length of the JSON part of a body of ``total`` bytes."""
    if header is None:
        return total
    is_number = len(header) <= MAX_DIGITS and header.isascii() and header.isdigit()
    if not is_number or int(header) > total:
        raise InvalidRequestError(
            f"Inference-Header-Content-Length is {header[:40]!r}; it must be the "
            f"length of the JSON part in bytes, at most {total}"
        )
    return int(header)


def _input(item: _Input, rest: memoryview) -> tuple[Tensor, int]:
    """Return the tensor of an input, and the number of bytes it takes from ``rest``."""
    name = f"input {item.name[:SHOWN]!r}"
    dtype = TORCH_OF.get(item.datatype)
    if dtype is None:
        known = ", ".join(TORCH_OF)
        raise InvalidRequestError(
            f"{name}: datatype {item.datatype[:SHOWN]!r} is unknown; use one of {known}"
        )
    shape = _shape(name, item.shape)
    count = math.prod(shape)
    # Count sizes of 0 as 1: a tensor without elements also has strides, which are
    # products of its sizes.
    if math.prod(max(1, size) for size in shape) >= MAX_ELEMENTS:
        raise InvalidRequestError(
            f"{name}: shape {shape} is too large; split the request"
        )
    parameters = _InputParameters()
    if item.parameters:
        found = small(item.parameters, f'{name}: "parameters"', _input_parameters)
        parameters = found or parameters
    binary = parameters.binary_data_size
    if binary is not None and bytes(item.data) not in (b"", b"null"):
        raise InvalidRequestError(
            f"{name}: it has both data and binary_data_size; give one of them"
        )
    if binary is not None:
        tensor = _from_bytes(name, dtype, count, binary, rest)
        return tensor.reshape(shape), binary
    return _from_json(name, dtype, count, bytes(item.data)).reshape(shape), 0


def _shape(name: str, given: msgspec.Raw) -> list[int]:
    text = bytes(given)
    try:
        if text.count(b",") >= MAX_DIMENSIONS:
            raise ValueError("too many dimensions")
        shape = _shapes.decode(text)
        if any(size >= MAX_ELEMENTS for size in shape):
            raise ValueError("too large")
    except (*NOT_JSON, ValueError):
        shown = text[:SHOWN].decode(errors="replace")
        raise InvalidRequestError(
            f"{name}: shape {shown} must be a list of sizes, 0 or more, with at most "
            f"{MAX_DIMENSIONS} dimensions"
        ) from None
    return shape


def _from_bytes(
    name: str, dtype: torch.dtype, count: int, size: Any, rest: memoryview
) -> Tensor:
    wanted = count * dtype.itemsize
    if type(size) is not int or size != wanted:
        raise InvalidRequestError(
            f"{name}: binary_data_size is {repr(size)[:SHOWN]}, but the tensor's "
            f"shape needs {wanted} bytes"
        )
    if len(rest) < wanted:
        raise InvalidRequestError(
            f"{name}: the body has only {len(rest)} of this tensor's {wanted} bytes; "
            "send all of them"
        )
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if dtype is torch.bool:
        return torch.frombuffer(bytearray(rest[:wanted]), dtype=torch.uint8) != 0
    return torch.frombuffer(bytearray(rest[:wanted]), dtype=dtype)


def _from_json(name: str, dtype: torch.dtype, count: int, data: bytes) -> Tensor:
    """Decode a JSON list in pieces, so as not to hold the GIL for long."""
    if not data.startswith(b"["):
        raise InvalidRequestError(
            f'{name}: "data" must be a list, or give binary_data_size'
        )
    kind = "float" if dtype.is_floating_point else "int"
    decoder = _numbers["bool" if dtype is torch.bool else kind]
    found: list[Tensor] = []
    size = 0
    for piece in pieces(data):
        values = _values(name, dtype, piece, decoder)
        size += len(values)
        if size <= count:
            found.append(_tensor(name, dtype, values))
    if size != count:
        raise InvalidRequestError(
            f"{name}: data has {size} values, but the tensor's shape needs {count}"
        )
    if len(found) == 1:
        return found[0]
    return torch.cat(found) if found else torch.empty(0, dtype=dtype)


def _values(
    name: str, dtype: torch.dtype, piece: bytes, decoder: msgspec.json.Decoder[Any]
) -> list[Any]:
    try:
        values: list[Any] = decoder.decode(piece)
    except NOT_JSON as error:
        wrong = _first_wrong(piece, decoder)
        raise InvalidRequestError(
            f"{name}: {wrong} is not a valid {NAME_OF[dtype]} value"
        ) from error
    return values


def _first_wrong(piece: bytes, decoder: msgspec.json.Decoder[Any]) -> str:
    for part in piece[1:-1].split(b","):
        try:
            decoder.decode(b"[%b]" % part)
        except NOT_JSON:
            return part[:SHOWN].decode(errors="replace") or "an empty list"
    return "a string"


def _tensor(name: str, dtype: torch.dtype, values: list[Any]) -> Tensor:
    if dtype in UNSIGNED and (low := min(values, default=0)) < 0:  # torch would wrap it
        raise InvalidRequestError(
            f"{name}: {low} is not a valid {NAME_OF[dtype]} value"
        )
    try:
        tensor = torch.tensor(values, dtype=dtype)
    except (RuntimeError, OverflowError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"{name}: {error}") from error
    if dtype.is_floating_point and not _is_finite(tensor):
        raise InvalidRequestError(
            f"{name}: a value is too large for {NAME_OF[dtype]}; send infinities as "
            "binary data"
        )
    return tensor


def _is_finite(tensor: Tensor) -> bool:
    if len(tensor) <= FEW:
        return all(map(math.isfinite, tensor.tolist()))
    return bool(tensor.isfinite().all())


def check(tensors: Tensors, model: Model) -> None:
    if model.inputs:
        _check_specs(tensors, {spec.name: spec for spec in model.inputs})
    rows_of(tensors)
    if model.check is not None:
        model.check(tensors)


def _check_specs(tensors: Tensors, wanted: dict[str, TensorSpec]) -> None:
    if tensors.keys() != wanted.keys():
        raise InvalidRequestError(
            f"model takes the inputs {', '.join(wanted)}; the request has "
            f"{', '.join(tensors) or 'none'}"
        )
    for name, tensor in tensors.items():
        _check_one(name, tensor, wanted[name])


def _check_one(name: str, tensor: Tensor, spec: TensorSpec) -> None:
    given = NAME_OF[tensor.dtype]
    if given != spec.datatype:
        raise InvalidRequestError(
            f"input {name!r} must be {spec.datatype}; it is {given}"
        )
    shape = tuple(tensor.shape)
    if len(shape) != len(spec.shape) or any(
        size not in (-1, actual) for size, actual in zip(spec.shape, shape, strict=True)
    ):
        raise InvalidRequestError(
            f"input {name!r} must have shape {list(spec.shape)} (-1: any size); it has "
            f"shape {list(shape)}"
        )
    if 0 in shape:
        raise InvalidRequestError(
            f"input {name!r} is empty: shape {list(shape)}; every size must be above 0"
        )


def _outputs(
    given: msgspec.Raw, parameters: InferenceParameters, model: Model
) -> dict[str, bool]:
    listed = (small(given, '"outputs"', _outputs_lists) if given else None) or []
    is_binary = parameters.binary_data_output is True
    wanted: dict[str, bool] = {}
    for item in listed:
        asked = item.parameters
        if asked and (asked.classification or asked.shared_memory_region is not None):
            raise InvalidRequestError(
                f"output {item.name[:SHOWN]!r}: classification and shared memory are "
                "not supported; leave them out"
            )
        chosen = item.parameters and item.parameters.binary_data
        wanted[item.name] = (is_binary if chosen is None else chosen) is True
    known = {spec.name for spec in model.outputs}
    unknown = wanted.keys() - known
    if known and unknown:
        raise InvalidRequestError(
            f"model has no output {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(known))}"
        )
    return wanted


def render(
    name: str, version: str, request: InferenceRequest, tensors: Tensors
) -> tuple[bytes, int | None]:
    """Return an answer's body, and the length of its JSON part (None: all is JSON)."""
    missing = request.outputs.keys() - tensors.keys()
    if missing:
        raise InvalidRequestError(
            f"model returned no output {', '.join(sorted(missing))}; do not request it"
        )
    answer: dict[str, Any] = {"model_name": name, "model_version": version}
    if request.id is not None:
        answer["id"] = request.id
    # In pieces, so as not to hold the GIL for long: see ``json_limits.pieces``.
    head, blobs = [orjson.dumps(answer)[:-1], b',"outputs":['], []
    for label in request.outputs or tensors:
        tensor = tensors[label]
        if tensor.dtype not in NAME_OF:
            raise ModelFailedError(
                f"output {label!r} has dtype {tensor.dtype}, which the Open Inference "
                "Protocol does not support; return another dtype from the last stage"
            )
        item: dict[str, Any] = {
            "name": label,
            "datatype": NAME_OF[tensor.dtype],
            "shape": list(tensor.shape),
        }
        if request.outputs.get(label, request.is_binary):
            whole = plain(tensor)  # keeps alive the memory that ``memory_of`` reads
            blob = bytes(memory_of(whole))
            item["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
            head += orjson.dumps(item), b","
        else:
            head += orjson.dumps(item)[:-1], b',"data":'
            head += _listed(label, tensor)
            head += b"}", b","
    if head[-1] == b",":
        head.pop()
    head.append(b"]}")
    length = sum(map(len, head)) if blobs else None
    return b"".join([*head, *blobs]), length


def _listed(name: str, tensor: Tensor) -> Iterator[bytes]:
    """Yield the values of a tensor as JSON, in pieces."""
    flat = tensor.reshape(-1)
    if flat.is_floating_point() and not _is_finite(flat):
        raise NotFiniteError(
            f"output {name!r} has NaN or an infinity, which JSON cannot carry; request "
            "it as binary data (binary_data_output)"
        )
    yield from listed(flat)


def listed(values: Tensor) -> Iterator[bytes]:
    """Yield a tensor as JSON: [values] in pieces, and any other shape at once."""
    if values.dim() != 1:
        yield orjson.dumps(values.tolist())
        return
    yield b"["
    for begin in range(0, values.numel(), PIECE):
        part = values[begin : begin + PIECE].tolist()
        yield (b"," if begin else b"") + orjson.dumps(part)[1:-1]
    yield b"]"
