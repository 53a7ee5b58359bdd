"""Text and tokens: tokenizer, chat template, and text that grows by tokens. Shell."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from multiworld.errors import InvalidRequestError


class Tokenizer:
    """The tokenizer and the chat template in a Hugging Face folder.

    Args:
        folder: The folder, with ``tokenizer.json``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        self.fast.no_padding()
        self.fast.no_truncation()

    @functools.cached_property
    def _slow(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._folder, local_files_only=True)

    def encode(self, text: str, *, has_special: bool = True) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: The text.
            has_special: Whether to add the tokens that begin and end a text.
        """
        found: list[int] = self.fast.encode(text, add_special_tokens=has_special).ids
        return found

    def decode(self, tokens: Sequence[int], *, skips_special: bool = True) -> str:
        """Return the text of tokens.

        Args:
            tokens: Token ids.
            skips_special: Whether to leave special tokens out.
        """
        return str(self.fast.decode(list(tokens), skip_special_tokens=skips_special))

    def piece(self, token: int) -> str:
        """Return the text of one token, special or not."""
        return self.decode([token], skips_special=False)

    def chat(
        self,
        messages: list[dict[str, Any]],
        template: str | None = None,
        *,
        begins_answer: bool = True,
    ) -> list[int]:
        """Return the tokens of a chat.

        Args:
            messages: The messages, as OpenAI's API has them.
            template: Chat template (Jinja); None: the model's own.
            begins_answer: Whether the assistant's answer is to follow.

        Raises:
            InvalidRequestError: The model has no chat template, or the template refuses
                the messages.
        """
        if template is None and self._slow.chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions",
                param="messages",
            )
        try:
            text = self._slow.apply_chat_template(
                messages,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=begins_answer,
            )
        except Exception as error:  # of the template
            raise InvalidRequestError(
                f"the chat template refuses the messages: {error}", param="messages"
            ) from error
        return self.encode(str(text), has_special=False)


class GrowingText:
    """Text that grows token by token, up to a stop string.

    No character is cut, and what may be the beginning of a stop string is held back.

    Args:
        tokenizer: Tokenizer of the model.
        stop: Texts that end it; they are not part of it.
        skips_special: Whether to leave special tokens out.

    Attributes:
        text: The text so far that was given out.
        is_stopped: True once a stop string was found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skips_special: bool = True,
    ) -> None:
        self._fast = tokenizer.fast
        self._stream = DecodeStream(skip_special_tokens=skips_special)
        self._stop = tuple(filter(None, stop))
        self._held = ""
        self.text = ""
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Add a token; return the text that can be given out now."""
        if self.is_stopped:
            return ""
        self._held += self._stream.step(self._fast, token) or ""
        return self._give_out(is_end=False)

    def end(self) -> str:
        """Return what was held back, at the end of the text."""
        return "" if self.is_stopped else self._give_out(is_end=True)

    def _give_out(self, *, is_end: bool) -> str:
        at = min(
            (place for s in self._stop if (place := self._held.find(s)) >= 0),
            default=-1,
        )
        if at >= 0:
            self.is_stopped = True
            given, self._held = self._held[:at], ""
        else:
            keep = 0 if is_end else _held_back(self._held, self._stop)
            cut = len(self._held) - keep
            given, self._held = self._held[:cut], self._held[cut:]
        self.text += given
        return given


def _held_back(text: str, stop: Sequence[str]) -> int:
    """Return how many last characters may begin a stop string."""
    return max(
        (
            length
            for each in stop
            for length in range(1, min(len(each), len(text) + 1))
            if text.endswith(each[:length])
        ),
        default=0,
    )
