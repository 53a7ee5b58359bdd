"""OpenAPI descriptions of the routes for text.

Request schemas are generated from the types that parse requests, with the same bounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from multiworld.serve.gateway.http.openapi import OPENAI_ERROR, body_of
from multiworld.serve.gateway.openai.chat_messages import ROLES
from multiworld.serve.gateway.openai.kept_streams import DIGITS
from multiworld.serve.gateway.openai.request_fields import (
    EFFORTS,
    MAX_KEY,
    MAX_METADATA,
    MAX_SESSION,
    MAX_STOP,
    MAX_STOPS,
    MAX_VALUE,
    NOT_IN_CHATS,
    RANGES,
    UNSUPPORTED,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
)

Schema = dict[str, Any]

PLACE = "#/components/schemas/{name}"

MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": list(ROLES)},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {
                            "type": {"const": "text"},
                            "text": {"type": "string"},
                        },
                    },
                },
            ]
        },
        "name": {"type": "string"},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
        "tool_call_id": {"type": "string"},
    },
}

# Schemas that are more exact than those from the fields' types, by field.
EXACT: dict[str, Schema] = {
    "model": {"type": "string", "minLength": 1},
    "messages": {"type": "array", "minItems": 1, "items": MESSAGE},
    "reasoning_effort": {"enum": [*EFFORTS, None]},
    "prompt_cache_key": {"type": ["string", "null"], "maxLength": MAX_SESSION},
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP},
            {
                "type": "array",
                "maxItems": MAX_STOPS,
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP},
            },
            {"type": "null"},
        ]
    },
    "metadata": {
        "anyOf": [
            {
                "type": "object",
                "maxProperties": MAX_METADATA,
                "propertyNames": {"maxLength": MAX_KEY},
                "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
            },
            {"type": "null"},
        ]
    },
    "prompt": {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": {"type": "string"}},
            {"type": "array", "minItems": 1, "items": {"type": "integer"}},
            {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "array",
                    "minItems": 1,
                    "items": {"type": "integer"},
                },
            },
        ]
    },
}


def schemas() -> dict[str, Schema]:
    """Return the schema components of the OpenAPI document, by name."""
    bodies = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, GenerateBody)
    _, found = msgspec.json.schema_components(bodies, ref_template=PLACE)
    for name, schema in found.items():
        hidden = UNSUPPORTED + (NOT_IN_CHATS if name == "ChatBody" else ())
        is_body = name in ("ChatBody", "CompletionBody")
        properties = schema.get("properties", {})
        if is_body:  # unknown fields are ignored, and so are some unsupported ones
            schema.pop("additionalProperties", None)
        for field in list(properties):
            if is_body and field in hidden:
                del properties[field]
            elif is_body and field in EXACT:
                properties[field] = EXACT[field]
            elif is_body and field in RANGES:
                low, high = RANGES[field]
                for choice in properties[field].get("anyOf", []):
                    number = choice.get("additionalProperties", choice)
                    if number.get("type") in ("integer", "number"):
                        number |= {"minimum": low, "maximum": high}
            elif field == "model":
                properties[field] = EXACT["model"]
    found["TokenizeBody"]["properties"]["messages"] = {
        "anyOf": [EXACT["messages"], {"type": "null"}]
    }
    found["Usage"] = _object(
        {name: {"type": "integer"} for name in USAGE}, required=list(USAGE)
    )
    return found


USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
FINISHES: Schema = {"enum": ["stop", "length", "tool_calls", None]}


def _object(properties: dict[str, Schema], required: Sequence[str] = ()) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _answer(kind: str, choice: Schema) -> Schema:
    properties: dict[str, Schema] = {
        "id": {"type": "string"},
        "object": {"const": kind},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": choice},
        "usage": {"$ref": PLACE.format(name="Usage")},
    }
    return _object(properties, list(properties))


_CHOICE: dict[str, Schema] = {"index": {"type": "integer"}, "finish_reason": FINISHES}
_SAID = _object(
    {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "reasoning": {"type": ["string", "null"]},
        "tool_calls": {"type": "array", "items": {"type": "object"}},
    },
    ["role", "content"],
)
CHAT_ANSWER = _answer(
    "chat.completion",
    _object({**_CHOICE, "message": _SAID}, [*_CHOICE, "message"]),
)
COMPLETION_ANSWER = _answer(
    "text_completion",
    _object({**_CHOICE, "text": {"type": "string"}}, [*_CHOICE, "text"]),
)
TOKENIZE_ANSWER = _object(
    {
        "count": {"type": "integer"},
        "max_model_len": {"type": "integer"},
        "tokens": {"type": "array", "items": {"type": "integer"}},
        "token_strs": {"type": "array", "items": {"type": "string"}},
    },
    ["count", "max_model_len", "tokens"],
)
DETOKENIZE_ANSWER = _object({"prompt": {"type": "string"}}, ["prompt"])
GENERATE_ANSWER = _object({"text_output": {"type": "string"}}, ["text_output"])


STREAM: dict[str, Any] = {
    "parameters": [
        {
            "name": "starting_after",
            "in": "query",
            "schema": {"type": "integer", "minimum": 0, "maximum": 10**DIGITS - 1},
        }
    ],
    "responses": {
        "200": {
            "description": "The events.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
        "400": {
            "description": "The number of an event is not valid.",
            "content": {"application/json": {"schema": OPENAI_ERROR}},
        },
    },
}


def described(
    body: str, example: Any, answer: Schema | None, *, is_streamed: bool = False
) -> dict[str, Any]:
    """Describe a route: its body, a name in ``schemas``, and answer (None: events)."""
    content: dict[str, Any] = {}
    if answer is not None:
        content["application/json"] = {"schema": answer}
    if is_streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        **body_of({"$ref": PLACE.format(name=body)}, example),
        "responses": {"200": {"description": "The answer.", "content": content}},
    }


CHAT = described(
    "ChatBody",
    {"model": "smollm2", "messages": [{"role": "user", "content": "Hello"}]},
    CHAT_ANSWER,
    is_streamed=True,
)
COMPLETION = described(
    "CompletionBody",
    {"model": "smollm2", "prompt": "Once upon a time"},
    COMPLETION_ANSWER,
    is_streamed=True,
)
TOKENIZE = described(
    "TokenizeBody", {"model": "smollm2", "prompt": "Hello"}, TOKENIZE_ANSWER
)
DETOKENIZE = described(
    "DetokenizeBody", {"model": "smollm2", "tokens": [1, 2]}, DETOKENIZE_ANSWER
)
GENERATE = described("GenerateBody", {"text_input": "Once"}, GENERATE_ANSWER)
GENERATE_STREAM = described(
    "GenerateBody", {"text_input": "Once"}, None, is_streamed=True
)

_TEXT = {"type": "string", "minLength": 1}
_TOKEN = {"type": "integer", "minimum": 0}

EMBEDDINGS = body_of(
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
)
