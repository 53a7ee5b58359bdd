"""The inference route: tensors in, tensors out."""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.responses import Response

from multiworld.errors import InvalidRequestError, NoReplicaError, OverloadedError
from multiworld.serve.gateway.http.calls import AdmittedCall
from multiworld.serve.gateway.http.http_responses import RENDER_BYTES, timeout_of
from multiworld.serve.gateway.http.openapi import body_of
from multiworld.serve.gateway.http.request_body import JSON_LENGTH, off_loop
from multiworld.serve.gateway.openinference import tensor_format
from multiworld.serve.gateway.openinference.tensor_format import InferenceRequest
from multiworld.serve.routing.refusals import OutdatedError
from multiworld.serve.spec.datatypes import TORCH_OF
from multiworld.serve.spec.stage import Model, Tensors

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string", "enum": list(TORCH_OF)},
        "parameters": {
            "type": "object",
            "properties": {"binary_data_size": {"type": "integer"}},
        },
        "data": {"type": "array", "items": {}},
    },
}


# OpenAPI description of the route.
INFER = {
    **body_of(
        {
            "type": "object",
            "required": ["inputs"],
            "properties": {
                "id": {"type": "string"},
                "parameters": {
                    "type": "object",
                    "properties": {
                        "timeout_s": {"type": "number"},
                        "sequence_id": {},
                        "binary_data_output": {"type": "boolean"},
                    },
                },
                "inputs": {"type": "array", "items": _TENSOR},
                "outputs": {"type": "array", "items": {"type": "object"}},
            },
        },
        {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1.0]}]},
    ),
    "parameters": [
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "description": "Bytes of the JSON part, if raw tensors follow it.",
            "schema": {"type": "integer"},
        },
    ],
}


async def infer(call: AdmittedCall) -> Response:
    """Run inference with a model; a version in the path must be the active one."""
    # Refuse an unknown model before the body is read, because the body may be long.
    call.gateway.model(call.name, call.version, call.tenant)
    body = await call.read_body(may_be_binary=True)
    version, model = _model(call)
    length = call.request.headers.get(JSON_LENGTH)
    parse = partial(tensor_format.parse, body, length, model)
    default_s = call.gateway.deadline_s(call.name, call.tenant)
    asked = await off_loop(len(body), parse)
    del body, parse  # frees the body: the tensors are copies
    version, answer = await _computed(call, asked, version, default_s)
    return await _rendered(call, asked, version, answer)


def _model(call: AdmittedCall) -> tuple[str, Model]:
    """Return the active version and its model, which must take tensors."""
    version, model = call.gateway.model(call.name, call.version, call.tenant)
    if model.generation is not None:
        raise InvalidRequestError(
            f"model {call.name!r} generates text; use /v1/chat/completions, or "
            f"/v2/models/{call.name}/generate",
            param="model",
        )
    return version, model


async def _computed(
    call: AdmittedCall, asked: InferenceRequest, version: str, default_s: float
) -> tuple[str, Tensors]:
    """Run inference; return the version that answered, and its answer."""
    gateway, name = call.gateway, call.name
    clock, given = gateway.authenticator.clock, asked.parameters
    timeout_s = timeout_of(call.request, given.timeout_s, given.timeout)
    if timeout_s is None:
        timeout_s = default_s
    timeout_s = max(0.001, timeout_s - call.record.spent_s)
    # Requests of a session prefer the same replicas.
    session = str(given.sequence_id) if given.sequence_id else None
    ends_at, call.admitted.model = clock() + timeout_s, name
    ids = asked.tensors.get("input_ids")  # the name that transformers uses
    tokens = 0 if ids is None else ids.numel()
    gateway.check_rows(name, version, asked.tensors, call.tenant)
    try:
        while True:
            try:
                with gateway.authenticator.tokens_held(call.admitted, tokens):
                    answer = await gateway.infer(
                        call.admitted, name, version, asked.tensors, timeout_s, session
                    )
                return version, answer
            except OutdatedError:  # an update has just made another version active
                version, model = _model(call)
                tensor_format.check(asked.tensors, model)
                gateway.check_rows(name, version, asked.tensors, call.tenant)
                timeout_s = max(0.001, ends_at - clock())
    except (OverloadedError, NoReplicaError):
        tokens = 0
        raise
    finally:
        # Another gateway that continues the request counts its tokens.
        if tokens and not call.record.is_abandoned():
            gateway.authenticator.count_prompt(call.admitted, tokens)


async def _rendered(
    call: AdmittedCall, asked: InferenceRequest, version: str, answer: Tensors
) -> Response:
    size = sum(tensor.nbytes for tensor in answer.values())
    render = partial(tensor_format.render, call.name, version, asked, answer)
    content, head = (
        await asyncio.to_thread(render) if size >= RENDER_BYTES else render()
    )
    if head is None:
        return Response(content, media_type="application/json")
    return Response(
        content,
        headers={"Inference-Header-Content-Length": str(head)},
        media_type="application/octet-stream",
    )
