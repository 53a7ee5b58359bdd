"""The tokenizer of a Hugging Face folder, for prompts, chats and completions."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from multiworld.errors import InvalidRequestError
from multiworld.serve.text.chat_template import ChatTemplate
from multiworld.serve.text.grammar import import_grammars
from multiworld.serve.text.tokenizer_files import chat_tokenizer

logger = logging.getLogger("multiworld.serve")

CACHED = 16_384  # maximum number of tokens whose texts are kept

# A token of one byte, in SentencePiece models.
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _letters() -> dict[str, int]:
    """Return the byte that each character of GPT-2's byte-level tokens stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    found = {chr(byte): byte for byte in plain}
    return found | {chr(256 + nth): byte for nth, byte in enumerate(others)}


BYTE_OF = _letters()


def bytes_of(value: Any) -> int:
    """Return the total bytes of all strings in plain data, in UTF-8."""
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


class Tokenizer:
    """The tokenizer in a Hugging Face folder, and its chat template.

    transformers' tokenizer renders, encodes and decodes, because it merges the files of
    the folder. Its ``__call__`` is not used, because it sets truncation and padding.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._theirs = folder, chat_tokenizer(folder)
        self.fast: Any = self._theirs.backend_tokenizer
        self.fast.no_padding()
        self.fast.no_truncation()

    @functools.cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self._folder, self._theirs, self.added)

    @functools.cached_property
    def added(self) -> dict[str, int]:
        """Tokens that the tokenizer recognises in any text, such as control tokens."""
        found = self.fast.get_added_tokens_decoder()
        return {token.content: number for number, token in found.items()}

    @functools.cached_property
    def special(self) -> frozenset[int]:
        """Ids of tokens that are not shown unless a request asks for them."""
        found = self.fast.get_added_tokens_decoder()
        return frozenset(number for number, t in found.items() if t.special)

    def prepare(self) -> None:
        """Load everything that chats need, so that the first chat does not wait."""
        if self.longest and self.template.exists:
            try:
                self.chat([{"role": "user", "content": "."}], 2**31)
                assert self.template.variables is not None
            except Exception:  # the template may refuse this message
                logger.info(
                    "the chat template rejected the test message of the model's load",
                    exc_info=True,
                )
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
        """Refuse a text that is too long for ``tokens`` tokens, before it is encoded.

        ``size``: the text's bytes; a token has at most ``longest`` bytes.
        """
        if size > tokens * self.longest:
            raise InvalidRequestError(
                f"This model's maximum context length is {tokens} tokens. However, the "
                f"text has {size} bytes",
                param=param,
                code="context_length_exceeded",
            )

    def encode(self, text: str, *, has_special: bool = True) -> list[int]:
        """Return a text's tokens; ``has_special``: add special tokens around them."""
        # Encode a batch of one, because batches run without the GIL.
        (made,) = self.fast.encode_batch([text], add_special_tokens=has_special)
        found: list[int] = made.ids
        return found

    def decode(self, tokens: Sequence[int], *, skips_special: bool = True) -> str:
        return str(self.fast.decode(list(tokens), skip_special_tokens=skips_special))

    @functools.cached_property
    def _anchor(self) -> tuple[list[int], int]:
        # A token to decode before another token, and the length of the anchor's text.
        # Without it, some decoders drop the space at the start of the other token.
        tokens = self.encode("a", has_special=False)[-1:]
        return tokens, len(self.decode(tokens, skips_special=False))

    @functools.cached_property
    def _text_of(self) -> Callable[[int], str]:
        # Log probabilities need the texts of up to 21 tokens for each token.
        return functools.lru_cache(CACHED)(self._read_text)

    def _read_text(self, token: int) -> str:
        before, length = self._anchor
        return self.decode([*before, token], skips_special=False)[length:]

    def piece(self, token: int) -> str:
        """Return a token's text; like OpenAI, ``bytes:…`` for a partial character."""
        text = self._text_of(token)
        if "\ufffd" in text:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.raw(token))
        return text

    def raw(self, token: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
        return self._raw(token)

    @functools.cached_property
    def _raw(self) -> Callable[[int], bytes]:
        return functools.lru_cache(CACHED)(self._read_raw)

    def _read_raw(self, token: int) -> bytes:
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
        """Return the index of the character at which each token starts in ``text``.

        A token that starts within a character has that character's index.
        """
        found, at = [], 0
        for token in tokens:
            raw = b"" if skips_special and token in self.special else self.raw(token)
            found.append(at - (raw[:1] >= b"\x80" and raw[:1] < b"\xc0"))
            at += sum(byte & 0xC0 != 0x80 for byte in raw)
        # Some decoders drop the space at the start of a text, which shifts all indices.
        # What a tokenizer added at the end shifts none.
        for token in reversed(tokens):
            if token not in self.special or text.endswith(name := self.piece(token)):
                break
            at -= 0 if skips_special else len(name)
        dropped = max(0, at - len(text))
        return [max(0, place - dropped) for place in found]

    def chat(
        self,
        messages: list[dict[str, Any]],
        longest: int,
        *,
        begins_answer: bool = True,
        tools: Sequence[dict[str, Any]] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        effort: str | None = None,
        has_controls: bool = False,
    ) -> list[int]:
        """Return the tokens of a chat; see ``ChatTemplate.render``."""
        template = self.template
        template.check_exists()
        controls, in_answers, ids = template.controls
        marks = controls.marks()
        answers = in_answers.marks_like(marks)
        text = template.render(
            messages,
            begins_answer=begins_answer,
            tools=tools,
            options=options,
            effort=effort,
            marks=None if has_controls else (marks, answers),
        )
        self.check_length(bytes_of(text), longest, "messages")  # ``text`` has the tools
        # A normalizer may turn other characters into the characters of a control token.
        is_checked = self.fast.normalizer is not None and not has_controls
        if marks.is_used or answers.is_used:
            check = controls.check if is_checked else None
            return marks.encoded(text, self._encode_all, ids, check)
        found = self.encode(text, has_special=False)
        if is_checked:
            controls.check(text, sum(token in ids for token in found))
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
        # Some tokenizers add a space at the start of each text. They do not add one to
        # a part that follows this anchor.
        before, both, alone = (
            self.encode(text, has_special=False) for text in ("\n", "\na", "a")
        )
        is_same = both[: len(before)] == before and both[len(before) :] == alone
        return "" if is_same else "\n"
