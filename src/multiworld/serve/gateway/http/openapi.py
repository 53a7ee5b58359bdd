"""The OpenAPI description of a gateway's routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import multiworld
from multiworld.serve.gateway.http.route import Needs, Route, Tag, pattern_of

_ERRORS = {
    401: "The key is missing or not valid.",
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
    501: "The server does not support structured output.",
    503: "A stage had no replica before the deadline; see Retry-After.",
    504: "The request missed its deadline.",
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


def _errors_of(route: Route) -> dict[str, Any]:
    statuses: set[int] = set()
    if route.needs is Needs.BODY:
        statuses = {*_ERRORS}
    elif route.needs is not Needs.NOTHING:
        statuses = {401, 404} if "{" in route.path else {401}
    schema = OPENAI_ERROR if route.tag is Tag.OPENAI else ERROR
    content = {"application/json": {"schema": schema}}
    return {
        str(status): {"description": _ERRORS[status], "content": content}
        for status in sorted(statuses)
    }


def body_of(schema: Mapping[str, Any], example: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


METRICS = {
    "responses": {
        "200": {
            "description": "The metrics.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    }
}


def document_of(
    routes: Sequence[Route], schemas: Mapping[str, Any], description: str
) -> dict[str, Any]:
    """Return the whole OpenAPI document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        for path in route.paths if route.is_shown else ():
            operation = _operation_of(route, path)
            paths.setdefault(path, {})[route.method.lower()] = operation
    about = {"title": "multiworld", "version": multiworld.__version__}
    return {
        "openapi": "3.1.0",
        "info": {**about, "description": description},
        "paths": paths,
        "components": {"schemas": dict(schemas)},
    }


def _operation_of(route: Route, path: str) -> dict[str, Any]:
    summary, description = route.summary_and_description
    more = dict(route.operation)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in pattern_of(path).groupindex
    ]
    parameters += [TIMEOUT] if route.needs is Needs.BODY else []
    parameters += more.pop("parameters", [])
    version = "_version" if "version" in pattern_of(path).groupindex else ""
    found = {
        "tags": [route.tag.value],
        "summary": summary,
        "operationId": f"{route.tag.value}_{route.handler.__name__}{version}",
        "responses": {
            "200": _ANSWER,
            **more.pop("responses", {}),
            **_errors_of(route),
        },
        **more,
    }
    if description:
        found["description"] = description
    if parameters:
        found["parameters"] = parameters
    return found


_ANSWER = {
    "description": "The answer.",
    "content": {"application/json": {"schema": {}}},
}
