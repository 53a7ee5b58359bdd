"""OpenAPI descriptions of bodies that the gateway parses itself, for speed."""

from __future__ import annotations

from typing import Any

from multiworld.serve.spec.datatypes import TORCH_OF

_ERRORS = {
    401: "A key is needed, or the given one is not valid.",
    400: "The request is malformed or does not fit the model.",
    404: "The model is unknown, or another version of it is active.",
    408: "The body did not arrive in time.",
    413: "The body is too large (gateway.max_body_mb).",
    415: "The Content-Encoding is not supported.",
    429: "The queue is full, a limit is reached, or the tenant is quarantined; see "
    "Retry-After.",
    406: "The answer cannot be written as JSON.",
    431: "The head of the request is too large.",
    499: "The client has closed the connection.",
    500: "The model raised an error, or the request is a poison request.",
    501: "The server has no structured output.",
    503: "A stage had no replica before the deadline; see Retry-After.",
    504: "The request missed its deadline.",
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

TIMEOUT = {
    "name": "X-Timeout-S",
    "in": "header",
    "description": "Seconds until the deadline of the request; default: the model's.",
    "schema": {"type": "number"},
}

# Body of an error in the Open Inference Protocol.
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}

# Body of an error in OpenAI's API.
OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def errors(schema: dict[str, Any], *statuses: int) -> dict[str, Any]:
    """Describe error responses; all statuses by default."""
    content = {"application/json": {"schema": schema}}
    return {
        str(status): {"description": _ERRORS[status], "content": content}
        for status in sorted(statuses or _ERRORS)
    }


def _described(
    schema: dict[str, Any],
    example: Any,
    parameters: list[dict[str, Any]],
    error: dict[str, Any],
) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema, "example": example}},
        },
        "parameters": parameters,
        "responses": errors(error),
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
        TIMEOUT,
        {
            "name": "Inference-Header-Content-Length",
            "in": "header",
            "description": "Bytes of the JSON part, if raw tensors follow it.",
            "schema": {"type": "integer"},
        },
    ],
    ERROR,
)

_TEXT = {"type": "string", "minLength": 1}
_TOKEN = {"type": "integer", "minimum": 0}

EMBEDDINGS = _described(
    {
        "type": "object",
        "required": ["model", "input"],
        "properties": {
            "model": {"type": "string", "minLength": 1},
            "input": {
                "oneOf": [
                    {"type": "string", "minLength": 1},
                    {"type": "array", "minItems": 1, "items": _TEXT},
                    {"type": "array", "minItems": 1, "items": _TOKEN},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "array", "minItems": 1, "items": _TOKEN},
                    },
                ]
            },
            "encoding_format": {"type": "string", "enum": ["float", "base64"]},
            "dimensions": {"type": "integer"},
            "user": {"type": "string"},
        },
    },
    {"model": "minilm", "input": ["hello world"]},
    [TIMEOUT],
    OPENAI_ERROR,
)

KNOWN_MODEL = {"responses": errors(ERROR, 401, 404)}  # of routes about one model

# Errors of routes about one model in OpenAI's API.
OPENAI_KNOWN_MODEL = {"responses": errors(OPENAI_ERROR, 401, 404)}
