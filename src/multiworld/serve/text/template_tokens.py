"""Tokens that a chat template writes, and tokens that it searches for in messages."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

# String methods with which templates split or search messages.
INSPECTING = {
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "startswith",
    "endswith",
    "replace",
    "find",
    "index",
    "count",
    "strip",
    "lstrip",
    "rstrip",
}

_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}
_USER, _ANSWER, _SYSTEM = (
    {"role": role, "content": "7"} for role in ("user", "assistant", "system")
)
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "c12345678",
            "function": {"name": "f", "arguments": {"a": "1"}},
        }
    ],
}
_RESULT = {"role": "tool", "content": "7", "tool_call_id": "c12345678", "name": "f"}

# Chats whose rendering shows the tokens that a template composes from parts.
SAMPLES: list[list[dict[str, Any]]] = [
    [_USER],
    [_SYSTEM, _USER],
    [_USER, _ANSWER, _USER],
    [_SYSTEM, _USER, _ANSWER, _USER],
    [_USER, _CALL, _RESULT],
    [_USER, _CALL, _RESULT, _ANSWER, _USER],
    [_USER, {**_ANSWER, "reasoning_content": "7"}],
    [_USER, {**_CALL, "reasoning_content": "7"}, _RESULT],
]


@dataclass(frozen=True, slots=True)
class TemplateTokens:
    """A tokenizer's added tokens that occur in its chat templates."""

    written: frozenset[str]
    # The template may split an assistant's message at these, for example ``</think>``.
    inspected: frozenset[str]


def tokens_of(
    templates: Iterable[str],
    added: Collection[str],
    render: Callable[..., str],  # ``(chat, tools=, add_generation_prompt=)``
) -> TemplateTokens:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    trees = []
    for text in templates:
        with contextlib.suppress(Exception):  # rendering reports the error
            environment = _compile_jinja_template(text).environment
            trees.append(environment.parse(text))
    texts = [text for tree in trees for text in _constants(tree)]
    for chat, tools, begins in itertools.product(
        SAMPLES, (None, [_TOOL]), (True, False)
    ):
        with contextlib.suppress(Exception):  # templates may refuse any chat
            texts.append(render(chat, tools=tools, add_generation_prompt=begins))
    seen = [text for tree in trees for text in _inspected(tree)]
    return TemplateTokens(
        frozenset(t for t in added if any(t in text for text in texts)),
        frozenset(t for t in added if any(t in text for text in seen)),
    )


def _constants(tree: Any) -> Iterator[str]:
    from jinja2 import nodes

    for node in tree.find_all(nodes.TemplateData):
        yield node.data
    yield from _strings_in(tree)


def _strings_in(tree: Any) -> Iterator[str]:
    from jinja2 import nodes

    found = [tree] if isinstance(tree, nodes.Const) else tree.find_all(nodes.Const)
    for node in found:
        if isinstance(node.value, str):
            yield node.value


def _inspected(tree: Any) -> Iterator[str]:
    """Yield strings that a template compares with messages, or searches for in them."""
    from jinja2 import nodes

    for compare in tree.find_all(nodes.Compare):
        for part in (compare.expr, *(each.expr for each in compare.ops)):
            yield from _strings_in(part)
    for call in tree.find_all(nodes.Call):
        is_method = isinstance(call.node, nodes.Getattr)
        if is_method and call.node.attr in INSPECTING:
            for part in call.args:
                yield from _strings_in(part)
