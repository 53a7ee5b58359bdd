"""Messages of a chat: validation, and conversion for chat templates. Pure."""

from __future__ import annotations

import functools
import reprlib
from typing import Any

import msgspec

from multiworld.errors import wrong_field
from multiworld.serve.gateway.http.json_limits import NOT_JSON, count_outside_strings

# Roles of messages in OpenAI's API.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Maximum number of values in the arguments of all tool calls of a chat, estimated from
# commas and opening brackets. Decoding this many values takes about 10 ms.
MAX_ARGUMENTS = 50_000

_wrong = functools.partial(wrong_field, "messages")


def for_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Validate the messages of a chat, and convert them for chat templates."""
    found = [_message(message) for message in messages]
    calls = [call for message in found for call in message.get("tool_calls", ())]
    texts = [call["function"]["arguments"] for call in calls]
    values = sum(count_outside_strings(text.encode(), b",[{") for text in texts)
    if values > MAX_ARGUMENTS:
        raise _wrong(f"has tool calls with {values} values, more than {MAX_ARGUMENTS}")
    for call in calls:
        function = call["function"]
        function["arguments"] = _decoded(function["arguments"])
    return found


def _message(given: dict[str, Any]) -> dict[str, Any]:
    # Templates expect text as one string, and no null fields.
    message = {name: value for name, value in given.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise _wrong(f"has role {reprlib.repr(role)}; use one of {known}")
    is_answer = role == "assistant"
    # An assistant's message that only calls tools has no content.
    message["content"] = _content(message.get("content", "" if is_answer else None))
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought and is_answer:
        if not isinstance(thought, str):
            raise _wrong("has reasoning that is not a string")
        # Some templates read ``reasoning_content``, others ``reasoning``.
        message["reasoning_content"] = message["reasoning"] = thought
    calls = message.pop("tool_calls", [])
    if not isinstance(calls, list) or (calls and not is_answer):
        raise _wrong('may have "tool_calls" only as a list in assistant messages')
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _content(given: Any) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _wrong("must have content that is a string or a list of text parts")
    return "\n".join(map(_text, given))  # as vLLM does


def _text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get(kind) if kind in ("text", "refusal") else None
    if not isinstance(text, str):
        raise _wrong("has a content part that is not text")
    return text


def _call(given: Any) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) else None
    if (
        not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
        or not isinstance(function.get("arguments"), str | None)
        or given.get("type", "function") != "function"
    ):
        raise _wrong(
            'must give each tool call the type "function", a name, and arguments as a '
            "string"
        )
    arguments = function.get("arguments") or "{}"
    return {**given, "function": {**function, "arguments": arguments}}


def _decoded(arguments: str) -> Any:
    try:
        found = msgspec.json.decode(arguments)
    except NOT_JSON:  # not JSON, for example because the answer was truncated
        return arguments
    return found if isinstance(found, dict) else arguments
