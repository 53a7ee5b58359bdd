"""The chat template of a Hugging Face folder, and its control tokens.

The template turns a chat into the text that the model sees. Control tokens must come
only from the template, never from users' messages.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from multiworld.errors import InvalidRequestError
from multiworld.serve.text.control_tokens import ControlTokens, Marks
from multiworld.serve.text.template_tokens import tokens_of
from multiworld.serve.text.tokenizer_files import ends_of


class Controls(NamedTuple):
    """The control tokens of a chat."""

    tokens: ControlTokens
    # The same for the assistant's messages, without the tokens that the template
    # searches for there.
    in_answers: ControlTokens
    ids: frozenset[int]


class ChatTemplate:
    """The chat templates of a folder, which transformers' tokenizer renders."""

    def __init__(self, folder: Path, theirs: Any, added: Mapping[str, int]) -> None:
        # ``added``: tokens that the tokenizer recognises in any text, and their ids.
        self._folder, self._theirs, self._added = folder, theirs, added

    @property
    def exists(self) -> bool:
        return self._theirs.chat_template is not None

    def check_exists(self) -> None:
        if not self.exists:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )

    @functools.cached_property
    def controls(self) -> Controls:
        """Tokens that a template can write, special tokens, and end tokens."""
        # Special tokens alone do not suffice: a folder's flag ``special`` determines
        # only whether a token is shown, and some folders do not set it for tokens that
        # mark turns.
        theirs = self._theirs
        written = inspected = frozenset[str]()
        if theirs.chat_template is not None:
            render = functools.partial(theirs.apply_chat_template, tokenize=False)
            tokens = tokens_of(self.texts, self._added, render)
            written, inspected = tokens.written, tokens.inspected
        decoder = theirs.backend_tokenizer.get_added_tokens_decoder()
        special = {token.content for token in decoder.values() if token.special}
        known = (v for v in theirs.special_tokens_map.values() if isinstance(v, str))
        ends = (decoder[end].content for end in ends_of(self._folder) if end in decoder)
        special |= {*known, *ends} & self._added.keys()
        found = written | special
        return Controls(
            ControlTokens(found),
            ControlTokens(found - (inspected - special)),
            frozenset(self._added[token] for token in found),
        )

    @functools.cached_property
    def texts(self) -> list[str]:
        """The chat templates."""
        given = self._theirs.chat_template
        return [*given.values()] if isinstance(given, dict) else [given or ""]

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the chat template reads."""
        from jinja2 import meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        found: set[str] = set()
        for text in self.texts:
            environment = _compile_jinja_template(text).environment
            found |= meta.find_undeclared_variables(environment.parse(text))
        return frozenset(found)

    def render(
        self,
        # As in OpenAI's API, with parsed arguments of tool calls.
        messages: list[dict[str, Any]],
        *,
        begins_answer: bool = True,  # whether the assistant's answer follows
        tools: Sequence[dict[str, Any]] = (),  # tools that the model may call
        options: Mapping[str, Any],  # variables of the template
        # Variable ``reasoning_effort``, if the template reads it.
        effort: str | None = None,
        # Marks to put around control tokens: the first in all messages but the
        # assistant's, the second in the assistant's; None: messages may have control
        # tokens.
        marks: tuple[Marks, Marks] | None = None,
    ) -> str:
        """Return a chat's text; raises InvalidRequestError if it cannot be rendered."""
        self.check_exists()
        self._check_options(options)
        if tools and "tools" not in self.variables:
            raise InvalidRequestError(
                "the chat template of this model does not support tools; leave tools "
                "out, or use another model",
                param="tools",
                code="unsupported_value",
            )
        if effort is not None and "reasoning_effort" in self.variables:
            options = {"reasoning_effort": effort, **options}
        try:
            shown, shown_tools = self._known_roles(messages), list(tools)
            shown_options = dict(options)
            if marks is not None:
                usual, in_answers = marks
                shown = [
                    (in_answers if m.get("role") == "assistant" else usual).put(m)
                    for m in shown
                ]
                shown_tools, shown_options = usual.put(shown_tools), usual.put(options)
            text = self._theirs.apply_chat_template(
                shown,
                tools=shown_tools or None,
                tokenize=False,
                add_generation_prompt=begins_answer,
                **shown_options,
            )
        except Exception as error:  # templates may raise anything
            raise InvalidRequestError(
                f"the chat template refuses the messages: {error}", param="messages"
            ) from error
        return str(text)

    def _known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if "developer" in str(self._theirs.chat_template):
            return messages
        # Older templates have no role ``developer``.
        return [
            {**m, "role": "system"} if m["role"] == "developer" else m for m in messages
        ]

    def _check_options(self, options: Mapping[str, Any]) -> None:
        taken = {"messages", *signature(self._theirs.apply_chat_template).parameters}
        words = set(re.findall(r"\w+", str(self._theirs.chat_template)))
        for name in options:
            if name in taken or name not in words:
                raise InvalidRequestError(
                    f"the chat template has no variable {reprlib.repr(name)}",
                    param="chat_template_kwargs",
                    code="invalid_value",
                )
