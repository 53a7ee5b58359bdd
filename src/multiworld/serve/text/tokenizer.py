"""Tokenizer and chat template."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from multiworld.errors import InvalidRequestError
from multiworld.serve.text.control_tokens import ControlTokens
from multiworld.serve.text.grammar import import_grammars
from multiworld.serve.text.template_tokens import tokens_of
from multiworld.serve.text.tokenizer_files import chat_tokenizer, ends_of

logger = logging.getLogger("multiworld.serve")

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # of one byte, in SentencePiece models


def _letters() -> dict[str, int]:
    """Return the byte of each letter in byte-level tokens, as GPT-2 writes them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    found = {chr(byte): byte for byte in plain}
    return found | {chr(256 + nth): byte for nth, byte in enumerate(others)}


BYTE_OF = _letters()


def bytes_of(value: Any) -> int:
    """Return the size of all strings in plain data, in UTF-8."""
    size, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            is_ascii = part.isascii()
            size += (
                len(part) if is_ascii else len(part.encode("utf-8", "surrogatepass"))
            )
        elif isinstance(part, dict):
            left += (*part.keys(), *part.values())
        elif isinstance(part, list | tuple):
            left += part
    return size


class Controls(NamedTuple):
    """The control tokens of a chat."""

    tokens: ControlTokens
    # Without those that the chat template looks for in an assistant's message.
    in_answers: ControlTokens
    ids: frozenset[int]


class Tokenizer:
    """The tokenizer and the chat template in a Hugging Face folder.

    One object renders, encodes and decodes: transformers', which merges the files of
    the folder. Its ``__call__`` is not used, as that sets truncation and padding.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._theirs = folder, chat_tokenizer(folder)
        self.fast: Any = self._theirs.backend_tokenizer
        self.fast.no_padding()
        self.fast.no_truncation()

    @functools.cached_property
    def _controls(self) -> Controls:
        """Return what a template can write, and what ends a completion.

        Whether the folder calls a token special says only whether it is shown: the
        marks of turns are not special in some folders.
        """
        theirs = self._theirs
        written = inspected = frozenset[str]()
        if theirs.chat_template is not None:
            render = functools.partial(theirs.apply_chat_template, tokenize=False)
            tokens = tokens_of(self.templates, self.added, render)
            written, inspected = tokens.written, tokens.inspected
        decoder = self.fast.get_added_tokens_decoder()
        special = {token.content for token in decoder.values() if token.special}
        known = (v for v in theirs.special_tokens_map.values() if isinstance(v, str))
        ends = (decoder[end].content for end in ends_of(self._folder) if end in decoder)
        special |= {*known, *ends} & self.added.keys()
        found = written | special
        return Controls(
            ControlTokens(found),
            ControlTokens(found - (inspected - special)),
            frozenset(self.added[token] for token in found),
        )

    @functools.cached_property
    def added(self) -> dict[str, int]:
        """Tokens that are found in any text as a whole: control tokens and others."""
        found = self.fast.get_added_tokens_decoder()
        return {token.content: number for number, token in found.items()}

    @functools.cached_property
    def special(self) -> frozenset[int]:
        """Tokens that are not shown, unless a request asks for them."""
        found = self.fast.get_added_tokens_decoder()
        return frozenset(number for number, t in found.items() if t.special)

    @functools.cached_property
    def templates(self) -> list[str]:
        """The chat templates."""
        given = self._theirs.chat_template
        return [*given.values()] if isinstance(given, dict) else [given or ""]

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the chat template reads."""
        from jinja2 import meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        found: set[str] = set()
        for text in self.templates:
            environment = _compile_jinja_template(text).environment
            found |= meta.find_undeclared_variables(environment.parse(text))
        return frozenset(found)

    def prepare(self) -> None:
        """Load everything that chats need, so that the first one does not wait."""
        if self.longest and self._theirs.chat_template is not None:
            try:
                self.chat([{"role": "user", "content": "."}], 2**31)
                assert self.variables is not None
            except Exception:  # the template may require other messages
                logger.info("a chat template refuses a message", exc_info=True)
        import_grammars()

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the tokenizer's vocabulary and rules."""
        return hashlib.blake2b(self.fast.to_str().encode(), digest_size=16).hexdigest()

    @functools.cached_property
    def longest(self) -> int:
        """Bytes of the longest token, in UTF-8."""
        sizes = (len(token.encode()) for token in self.fast.get_vocab())
        return max(sizes, default=1)

    def check_length(self, size: int, tokens: int, param: str = "prompt") -> None:
        """Reject a text (of ``size`` bytes) that cannot fit, before it is encoded."""
        if size > tokens * self.longest:
            raise InvalidRequestError(
                f"This model's maximum context length is {tokens} tokens. However, the "
                f"text has {size} bytes",
                param=param,
                code="context_length_exceeded",
            )

    def encode(self, text: str, *, has_special: bool = True) -> list[int]:
        """Return the tokens of a text; ``has_special`` adds those that enclose it."""
        # A batch, because batches run without the GIL.
        (made,) = self.fast.encode_batch([text], add_special_tokens=has_special)
        found: list[int] = made.ids
        return found

    def decode(self, tokens: Sequence[int], *, skips_special: bool = True) -> str:
        return str(self.fast.decode(list(tokens), skip_special_tokens=skips_special))

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], int]:
        # A token to decode another behind, and the length of its text: some decoders
        # drop the space that a text begins with.
        tokens = self.encode("a", has_special=False)[-1:]
        return tokens, len(self.decode(tokens, skips_special=False))

    def _text_of(self, token: int) -> str:
        before, length = self._anchor
        return self.decode([*before, token], skips_special=False)[length:]

    def piece(self, token: int) -> str:
        """Return a token's text; of a partial character ``bytes:…``, as OpenAI."""
        text = self._text_of(token)
        if "\ufffd" in text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw(token))
        return text

    def raw(self, token: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
        name = self.fast.id_to_token(token) or ""
        byte = BYTE_TOKEN.fullmatch(name)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        text = self._text_of(token)
        if "\ufffd" in text and all(letter in BYTE_OF for letter in name):
            return bytes(BYTE_OF[letter] for letter in name)
        return text.encode()

    def offsets(
        self, tokens: Sequence[int], text: str, *, skips_special: bool = True
    ) -> list[int]:
        """Return where each token begins in the text of all, in characters.

        A token within a character begins where that does.
        """
        found, at = [], 0
        for token in tokens:
            raw = b"" if skips_special and token in self.special else self.raw(token)
            found.append(at - (raw[:1] >= b"\x80" and raw[:1] < b"\xc0"))
            at += sum(byte & 0xC0 != 0x80 for byte in raw)
        # Some decoders drop the space that a text begins with.
        dropped = max(0, at - len(text))
        return [max(0, place - dropped) for place in found]

    def chat(
        self,
        messages: list[dict[str, Any]],  # as in OpenAI's API, with parsed arguments
        longest: int,  # in tokens
        *,
        begins_answer: bool = True,  # the assistant's answer follows
        tools: Sequence[dict[str, Any]] = (),
        options: Mapping[str, Any] = MappingProxyType({}),  # of the template
        effort: str | None = None,  # if the template reads ``reasoning_effort``
        has_controls: bool = False,  # those in messages remain control tokens
    ) -> list[int]:
        """Return the tokens of a chat."""
        if self._theirs.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        self._check_options(options)
        if tools and "tools" not in self.variables:
            raise InvalidRequestError(
                "the chat template of this model shows it no tools, so it cannot call "
                "any; leave tools out, or use another model",
                param="tools",
                code="unsupported_value",
            )
        if effort is not None and "reasoning_effort" in self.variables:
            options = {"reasoning_effort": effort, **options}
        controls, in_answers, ids = self._controls
        marks = controls.marks()
        answers = in_answers.marks_like(marks)
        try:
            shown, shown_tools = self._known_roles(messages), list(tools)
            shown_options = dict(options)
            if not has_controls:
                shown = [
                    (answers if m.get("role") == "assistant" else marks).put(m)
                    for m in shown
                ]
                shown_tools, shown_options = marks.put(shown_tools), marks.put(options)
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
        self.check_length(bytes_of(str(text)), longest, "messages")  # including tools
        # A normalizer may make a control token of what is not like one.
        is_checked = self.fast.normalizer is not None and not has_controls
        if marks.is_used or answers.is_used:
            check = controls.check if is_checked else None
            return marks.encoded(str(text), self._encode_all, ids, check)
        found = self.encode(str(text), has_special=False)
        if is_checked:
            controls.check(str(text), sum(token in ids for token in found))
        return found

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of the parts of one text."""
        anchor = self._anchor_of_parts
        given = [*texts[:1], *(anchor + text for text in texts[1:])]
        made = self.fast.encode_batch(given, add_special_tokens=False)
        found = [each.ids for each in made]
        before = self.encode(anchor, has_special=False) if anchor else []
        for number in range(1, len(found) if anchor else 0):
            ids = found[number]
            if ids[: len(before)] == before:
                found[number] = ids[len(before) :]
            else:
                found[number] = self.encode(texts[number], has_special=False)
        return found

    @functools.cached_property
    def _anchor_of_parts(self) -> str:
        # Some tokenizers begin each text with a space; a part does not, behind this.
        before, both, alone = (
            self.encode(text, has_special=False) for text in ("\n", "\na", "a")
        )
        is_same = both[: len(before)] == before and both[len(before) :] == alone
        return "" if is_same else "\n"

    def _known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if "developer" in str(self._theirs.chat_template):
            return messages
        # Older templates know no ``developer``.
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
