"""Open Inference Protocol v2: parsing of requests, rendering of answers. Shell.

Supports JSON and the binary tensor extension: a JSON part whose length is in the header
``Inference-Header-Content-Length``, followed by the raw tensors in order.
https://github.com/kserve/open-inference-protocol
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
import torch
from torch import Tensor

from multiworld.backends.dtypes import memory_of, plain
from multiworld.errors import InvalidRequestError
from multiworld.serve.spec.datatypes import NAME_OF, TORCH_OF
from multiworld.serve.spec.stage import Model, Tensors, TensorSpec
from multiworld.serve.transport.collation import rows_of

MAX_DIMENSIONS = 16
"""Most dimensions of a tensor."""

MAX_DIGITS = 18
"""Most digits of a length that is parsed; ``int`` takes long for millions of them."""

MAX_ELEMENTS = 2**40
"""Bound on the elements of a tensor, and on each size."""

SHOWN = 80
"""Most characters of an invalid value that an error text repeats."""


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A parsed inference request.

    Attributes:
        tensors: Inputs by name.
        id: The client's id, which the answer repeats.
        parameters: Parameters of the request.
        outputs: Names of the requested outputs, and whether each is binary; empty: all.
        is_binary: Whether outputs that are not named are binary.
    """

    tensors: Tensors
    id: str | None
    parameters: dict[str, Any]
    outputs: dict[str, bool]
    is_binary: bool


def parse(body: bytes, header_length: str | None, model: Model) -> InferenceRequest:
    """Parse and check a request.

    Args:
        body: Body of the request: JSON, with raw tensors after it if a length is given.
        header_length: Value of ``Inference-Header-Content-Length``; None: not given.
        model: The model that the inputs must fit.

    Raises:
        InvalidRequestError: The request is malformed or does not fit the model; the
            text says what to change.
    """
    length = _header_length(header_length, len(body))
    try:
        payload = orjson.loads(memoryview(body)[:length])
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error
    if not isinstance(payload, dict) or not isinstance(payload.get("inputs"), list):
        raise InvalidRequestError('body has no "inputs"; give a list of tensors')
    parameters = _parameters(payload)
    raw, offset = memoryview(body), length
    tensors: Tensors = {}
    for item in payload["inputs"]:
        name, tensor, used = _input(item, raw[offset:])
        offset += used
        if name in tensors:
            raise InvalidRequestError(
                f"input {name!r} occurs twice; give each input once"
            )
        tensors[name] = tensor
    if offset != len(body):
        left = len(body) - offset
        raise InvalidRequestError(
            f"body has {left} extra bytes after the last input; remove them"
        )
    check(tensors, model)
    request_id = payload.get("id")
    outputs, is_binary = _outputs(payload, parameters, model)
    return InferenceRequest(tensors, _text(request_id), parameters, outputs, is_binary)


def _header_length(header: str | None, total: int) -> int:
    if header is None:
        return total
    is_number = len(header) <= MAX_DIGITS and header.isascii() and header.isdigit()
    if not is_number or int(header) > total:
        raise InvalidRequestError(
            f"Inference-Header-Content-Length is {header[:40]!r}; it must be the "
            f"length of the JSON part in bytes, at most {total}"
        )
    return int(header)


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequestError('"id" must be a string')
    return value


def _parameters(payload: dict[str, Any]) -> dict[str, Any]:
    parameters = payload.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidRequestError('"parameters" must be an object')
    return parameters


def _input(item: Any, rest: memoryview) -> tuple[str, Tensor, int]:
    """Return the name, the tensor, and the number of binary bytes that it took."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise InvalidRequestError('an input has no "name"; give each input a name')
    name, datatype = item["name"], item.get("datatype")
    dtype = TORCH_OF.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        known = ", ".join(TORCH_OF)
        raise InvalidRequestError(
            f"input {name!r}: datatype {datatype!r} is unknown; use one of {known}"
        )
    shape = item.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or any(type(n) is not int or not 0 <= n < MAX_ELEMENTS for n in shape)
    ):
        raise InvalidRequestError(
            f"input {name!r}: shape {shape!r} must be a list of sizes, 0 or more"
        )
    count = 1
    for size in shape:
        count *= size
    if count >= MAX_ELEMENTS:
        raise InvalidRequestError(
            f"input {name!r}: shape {shape} is too large; split the request"
        )
    binary = _parameters(item).get("binary_data_size")
    if binary is not None:
        tensor = _from_bytes(name, dtype, count, binary, rest)
        return name, tensor.reshape(shape), binary
    return name, _from_json(name, dtype, count, item.get("data")).reshape(shape), 0


def _from_bytes(
    name: str, dtype: torch.dtype, count: int, size: Any, rest: memoryview
) -> Tensor:
    wanted = count * dtype.itemsize
    if type(size) is not int or size != wanted:
        raise InvalidRequestError(
            f"input {name!r}: binary_data_size is {size!r}; its shape needs {wanted}"
        )
    if len(rest) < wanted:
        raise InvalidRequestError(
            f"input {name!r}: body ends before its {wanted} bytes; send all of them"
        )
    if count == 0:
        return torch.empty(0, dtype=dtype)
    if dtype is torch.bool:
        return torch.frombuffer(bytearray(rest[:wanted]), dtype=torch.uint8) != 0
    return torch.frombuffer(bytearray(rest[:wanted]), dtype=dtype)


def _from_json(name: str, dtype: torch.dtype, count: int, data: Any) -> Tensor:
    if not isinstance(data, list):
        raise InvalidRequestError(
            f'input {name!r}: "data" must be a list; or give binary_data_size'
        )
    flat = _flat(data)
    if len(flat) != count:
        raise InvalidRequestError(
            f"input {name!r}: {len(flat)} values in data; its shape needs {count}"
        )
    kinds: tuple[type, ...] = (int, float) if dtype.is_floating_point else (int,)
    if dtype is torch.bool:
        kinds = (bool,)
    for value in flat:
        if not isinstance(value, kinds) or (
            isinstance(value, bool) and dtype is not torch.bool
        ):
            raise InvalidRequestError(
                f"input {name!r}: {repr(value)[:SHOWN]} is not a valid "
                f"{NAME_OF[dtype]} value"
            )
    try:
        return torch.tensor(flat, dtype=dtype)
    except (RuntimeError, OverflowError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"input {name!r}: {error}") from error


def _flat(data: list[Any]) -> list[Any]:
    """Return the values of nested lists in order; also accept a flat list."""
    if not any(isinstance(value, list) for value in data):
        return data
    flat: list[Any] = []
    stack = [iter(data)]
    while stack:
        for value in stack[-1]:
            if isinstance(value, list):
                stack.append(iter(value))
                break
            flat.append(value)
        else:
            stack.pop()
    return flat


def check(tensors: Tensors, model: Model) -> None:
    """Check inputs against the specs and the check of a model.

    Raises:
        InvalidRequestError: The inputs do not fit the model.
    """
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
    payload: dict[str, Any], parameters: dict[str, Any], model: Model
) -> tuple[dict[str, bool], bool]:
    is_binary = parameters.get("binary_data_output") is True
    listed = payload.get("outputs") or []
    if not isinstance(listed, list):
        raise InvalidRequestError('"outputs" must be a list')
    wanted: dict[str, bool] = {}
    for item in listed:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise InvalidRequestError(
                'an output has no "name"; give each output a name'
            )
        wanted[item["name"]] = _parameters(item).get("binary_data", is_binary) is True
    known = {spec.name for spec in model.outputs}
    unknown = wanted.keys() - known
    if known and unknown:
        raise InvalidRequestError(
            f"model has the outputs {', '.join(sorted(known))}; the request wants "
            f"{', '.join(sorted(unknown))}"
        )
    return wanted, is_binary


def render(
    name: str, version: str, request: InferenceRequest, tensors: Tensors
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON part.

    Args:
        name: Name of the model.
        version: Its version.
        request: The request.
        tensors: Outputs by name.

    Returns:
        The body, and the length of its JSON part in bytes; None if all of it is JSON.

    Raises:
        InvalidRequestError: The request wants an output that the model did not return.
    """
    missing = request.outputs.keys() - tensors.keys()
    if missing:
        raise InvalidRequestError(
            f"model returned no output {', '.join(sorted(missing))}; leave it out"
        )
    outputs, blobs = [], []
    for label in request.outputs or tensors:
        tensor = tensors[label]
        item: dict[str, Any] = {
            "name": label,
            "datatype": NAME_OF[tensor.dtype],
            "shape": list(tensor.shape),
        }
        if request.outputs.get(label, request.is_binary):
            whole = plain(tensor)  # keeps the memory alive while it is read
            blob = bytes(memory_of(whole))
            item["parameters"] = {"binary_data_size": len(blob)}
            blobs.append(blob)
        else:
            item["data"] = tensor.reshape(-1).tolist()
        outputs.append(item)
    answer: dict[str, Any] = {"model_name": name, "model_version": version}
    if request.id is not None:
        answer["id"] = request.id
    head = orjson.dumps({**answer, "outputs": outputs})
    if not blobs:
        return head, None
    return b"".join([head, *blobs]), len(head)
