"""What /docs says of bodies that are read by hand, for speed."""

from __future__ import annotations

from typing import Any

from multiworld.serve.spec.datatypes import TORCH_OF

_ERRORS = {
    400: "The request cannot be understood, or does not fit the model.",
    404: "No such model, or another version of it answers.",
    408: "The body did not arrive in time.",
    413: "The body is too large (gateway.max_body_mb).",
    415: "The body is compressed in a way that is not known here.",
    429: "The queue is full; Retry-After says when to come again.",
    500: "The model raised for this request, or it killed two replicas.",
    503: "A stage had no replica until the deadline; see Retry-After.",
    504: "The deadline has passed.",
}

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

_TIMEOUT = {
    "name": "X-Timeout-S",
    "in": "header",
    "description": "Seconds that the request may take; the model's by default.",
    "schema": {"type": "number"},
}


def _described(
    schema: dict[str, Any], example: Any, parameters: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema, "example": example}},
        },
        "parameters": parameters,
        "responses": {
            str(status): {"description": text} for status, text in _ERRORS.items()
        },
    }


INFER = _described(
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
    [
        _TIMEOUT,
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "description": "Bytes of the JSON part, where raw tensors follow it.",
            "schema": {"type": "integer"},
        },
    ],
)

EMBEDDINGS = _described(
    {
        "type": "object",
        "required": ["model", "input"],
        "properties": {
            "model": {"type": "string"},
            "input": {
                "oneOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                ]
            },
            "encoding_format": {"type": "string", "enum": ["float", "base64"]},
            "dimensions": {"type": "integer"},
            "user": {"type": "string"},
        },
    },
    {"model": "minilm", "input": ["hello world"]},
    [_TIMEOUT],
)
