"""Chat messages in the form that chat templates take."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.openai.chat_messages import MAX_ARGUMENTS, for_template


def call_of(arguments: Any, **more: Any) -> dict[str, Any]:
    """Return a tool call as OpenAI's clients send it back."""
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function, **more}


def answer_of(*arguments: str) -> dict[str, Any]:
    """Return an answer that calls a tool, as the client's ``model_dump()`` has it."""
    return {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": None,
        "tool_calls": [call_of(one) for one in arguments],
    }


def test_tool_calls_of_earlier_answers_reach_templates_as_objects() -> None:
    """Templates write arguments as JSON themselves, so these are objects."""
    (found,) = for_template([answer_of('{"city": "Köln", "days": [1, 2]}')])
    assert found == {
        "role": "assistant",
        "content": "",
        "tool_calls": [call_of({"city": "Köln", "days": [1, 2]})],
    }


@pytest.mark.parametrize("arguments", ["", None])
def test_no_arguments_are_an_object_without_any(arguments: str | None) -> None:
    """Some models write calls without arguments like this."""
    (found,) = for_template([{**answer_of("{}"), "tool_calls": [call_of(arguments)]}])
    assert found["tool_calls"] == [call_of({})]


@pytest.mark.parametrize("arguments", ['{"city": "Kö', "[1]", "7", '{"a": NaN}'])
def test_arguments_that_are_no_object_stay_as_they_are(arguments: str) -> None:
    """An answer that ``max_tokens`` cut can be sent back."""
    (found,) = for_template([answer_of(arguments)])
    assert found["tool_calls"] == [call_of(arguments)]


def test_given_messages_are_not_changed() -> None:
    given = [answer_of('{"a": 1}')]
    before = json.dumps(given)
    for_template(given)
    assert json.dumps(given) == before


def test_parts_are_joined_and_null_fields_are_dropped() -> None:
    parts = [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "will not"}]
    given: list[dict[str, Any]] = [
        {"role": "assistant", "content": parts, "tool_calls": []},
        {"role": "user", "content": "why", "name": None, "tool_calls": None},
    ]
    assert for_template(given) == [
        {"role": "assistant", "content": "I \nwill not"},
        {"role": "user", "content": "why"},
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "robot", "content": "hi"},
        {"role": ["user"], "content": "hi"},
        {"content": "hi"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "tool", "content": 7},
        {"role": "user", "content": [{"type": ["text"], "text": "hi"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": ["hi"]},
        {"role": "user", "content": "hi", "tool_calls": [call_of("{}")]},
        {"role": "assistant", "tool_calls": {"a": 1}},
        {"role": "assistant", "tool_calls": ["x"]},
        {"role": "assistant", "tool_calls": [{"function": "x"}]},
        {"role": "assistant", "tool_calls": [call_of({"city": "Köln"})]},
        {"role": "assistant", "tool_calls": [call_of("{}", type="custom")]},
    ],
)
def test_other_messages_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match='"messages"') as caught:
        for_template([message])
    assert caught.value.param == "messages"


def test_arguments_with_many_values_are_refused_before_they_are_decoded() -> None:
    """Megabytes of lists in strings must not block the event loop."""
    lists = '{"a": [' + "[]," * (MAX_ARGUMENTS // 4) + "[]]}"
    assert for_template([answer_of(lists)])
    began = time.monotonic()
    for given in ([answer_of(lists * 40)], [answer_of(*[lists] * 40)]):
        with pytest.raises(InvalidRequestError, match="values"):
            for_template(given)
    assert time.monotonic() - began < 1.0
    assert for_template([answer_of("[" * 20_000)])


def test_commas_within_the_strings_of_arguments_do_not_count() -> None:
    """A call may have written a long file."""
    arguments = json.dumps({"file": "1,2,[{" * 60_000})
    call = {"id": "a", "type": "function", "function": {"name": "write"}}
    call["function"]["arguments"] = arguments  # type: ignore[index]
    (message,) = for_template([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"]
