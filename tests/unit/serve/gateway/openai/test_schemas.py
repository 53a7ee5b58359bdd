"""The OpenAPI description: completeness, and the same bounds as the parsers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.openai.completion_requests import chat_of, completion_of
from multiworld.serve.gateway.openai.request_fields import RANGES
from multiworld.serve.gateway.openai.schemas import schemas
from tests.unit.serve.gateway.fakes import Fake

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "m", "prompt": "Hi"}
INTEGERS = {"n", "top_k", "min_tokens", "max_tokens", "max_completion_tokens"}


def document() -> dict[str, Any]:
    found: dict[str, Any] = Fake().app.rest.openapi()
    return found


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        yield from ([part["$ref"]] if isinstance(part.get("$ref"), str) else [])
        for value in part.values():
            yield from references(value)
    elif isinstance(part, list):
        for value in part:
            yield from references(value)


def test_every_body_answer_and_error_is_described() -> None:
    found = document()
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            has_no_body = path in ("/v2/repository/index", "/v1/streams/{id}/cancel")
            if method == "post" and not has_no_body:
                assert operation["requestBody"]["content"], path
                assert {"400", "404", "413", "429", "503"} <= answers.keys(), path
            assert answers["200"], path
    metrics = found["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    assert list(metrics) == ["text/plain"]


def test_every_reference_leads_somewhere() -> None:
    found = document()
    for place in set(references(found)):
        part: Any = found
        for name in place.removeprefix("#/").split("/"):
            part = part[name]
        assert part


def accepts(name: str, body: dict[str, Any]) -> bool:
    components = {"components": {"schemas": schemas()}}
    schema = {"$ref": f"#/components/schemas/{name}", **components}
    return jsonschema_rs.validator_for(schema).is_valid(body)


def parses(name: str, body: dict[str, Any]) -> bool:
    parse = chat_of if name == "ChatBody" else completion_of
    try:
        parse(json.dumps(body).encode())
    except InvalidRequestError:
        return False
    return True


@pytest.mark.parametrize("name", ["ChatBody", "CompletionBody"])
@pytest.mark.parametrize("field", sorted(RANGES))
def test_bounds_are_those_of_the_parser(name: str, field: str) -> None:
    body = CHAT if name == "ChatBody" else COMPLETION
    if field not in schemas()[name]["properties"]:
        return
    low, high = RANGES[field]
    is_integer = field in INTEGERS or field.endswith("logprobs")
    step = 1 if is_integer else 0.001
    if field in ("max_tokens", "max_completion_tokens", "min_tokens"):
        high = 4096
    for value in (low - step, low, high, high + step):
        given: Any = int(value) if is_integer else value
        more = {"logprobs": True} if field == "top_logprobs" else {}
        if field == "logprobs" and name == "ChatBody":
            continue  # a boolean there
        value_of = {"1": given} if field == "logit_bias" else given
        asked = {**body, **more, field: value_of}
        assert accepts(name, asked) == parses(name, asked), (field, given)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("ChatBody", {"messages": []}),
        ("ChatBody", {"messages": [{"role": "nobody", "content": "x"}]}),
        ("ChatBody", {"reasoning_effort": "huge"}),
        ("ChatBody", {"stop": [""]}),
        ("ChatBody", {"stop": ["a"] * 17}),
        ("CompletionBody", {"prompt_cache_key": "k" * 257}),
        ("CompletionBody", {"metadata": {"k" * 65: "v"}}),
        ("CompletionBody", {"metadata": {"k": "v" * 513}}),
        ("CompletionBody", {"temperature": "hot"}),
    ],
)
def test_both_refuse(name: str, more: dict[str, Any]) -> None:
    body = {**(CHAT if name == "ChatBody" else COMPLETION), **more}
    assert not accepts(name, body)
    assert not parses(name, body)


def test_both_accept_a_chat_with_everything() -> None:
    body = {
        **CHAT,
        "max_tokens": 5,
        "stop": ["a", "b"],
        "logprobs": True,
        "top_logprobs": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"a": "b"},
        "seed": 4,
        "n": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
    }
    assert accepts("ChatBody", body)
    assert parses("ChatBody", body)
