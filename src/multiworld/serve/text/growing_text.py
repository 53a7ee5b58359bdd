"""The text of a stream, which grows token by token."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence

from multiworld.serve.text.tokenizer import Tokenizer

CONTEXT = 8  # number of last prompt tokens to decode together with the text
PENDING = 16  # number of tokens without text above which ``_split`` is tried
CONTINUED = re.compile(rb"[\x80-\xbf]")  # a UTF-8 byte that continues a character
PARTIAL = "\ufffd"  # shown for the bytes of an incomplete character


class GrowingText:
    """Text that grows token by token in whole characters, up to a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        skips_special: bool = True,
        shown: Collection[int] = (),  # special tokens to show nevertheless
        min_tokens: int = 0,
        before: Sequence[int] = (),  # the prompt, if the text continues it
    ) -> None:
        hidden = tokenizer.special if skips_special else frozenset[int]()
        hidden = hidden.difference(shown) if shown else hidden
        self._window = _Window(tokenizer, before[-CONTEXT:], hidden)
        self._min_tokens = min_tokens
        self._count = 0
        self._stop = sorted(filter(None, stop))
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._length = 0
        self.is_stopped = False

    @property
    def offset(self) -> int:
        """Characters before the next token: those emitted and those held back."""
        return self._length + len(self._held)

    def add(self, token: int) -> str:
        """Add a token; return the text that can be emitted now."""
        if self.is_stopped:
            return ""
        self._count += 1
        return self._emit(self._window.add(token), is_end=False)

    def end(self) -> str:
        """Return the text held back; an incomplete character becomes U+FFFD."""
        if self.is_stopped:
            return ""
        return self._emit(self._window.rest(), is_end=True)

    def _emit(self, new: str, *, is_end: bool) -> str:
        before, text = len(self._held), self._held + new
        places = [
            place
            # A stop string that ends before ``new`` does not count, but one that starts
            # before ``new`` and ends in it does.
            for stop in (self._stop if self._count >= self._min_tokens else ())
            if (place := text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if places:
            self.is_stopped = True
            given, self._held = text[: min(places)], ""
        else:
            cut = len(text) - (0 if is_end else self._begun(text))
            given, self._held = text[:cut], text[cut:]
        self._length += len(given)
        return given

    def _begun(self, text: str) -> int:
        """Return how many of the last characters may be the start of a stop string."""
        # Each length that fails here shortens the text that is held back, so there is
        # about one search for each character of the stream.
        for length in range(min(len(text), self._longest - 1), 0, -1):
            start = text[-length:]
            # In sorted order, the strings that begin with ``start`` follow it.
            at = bisect_right(self._stop, start)
            if at < len(self._stop) and self._stop[at].startswith(start):
                return length
        return 0


class _Window:
    """The latest tokens, which are decoded together.

    The text of a token depends on the tokens before it: for example, some decoders drop
    a space at the start of a text.
    """

    def __init__(
        self, tokenizer: Tokenizer, before: Sequence[int], hidden: frozenset[int]
    ) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._tokens = [token for token in before if token not in hidden]
        text = self._decoded(self._tokens)
        while text.startswith(PARTIAL) and CONTINUED.match(
            tokenizer.raw(self._tokens[0])
        ):
            del self._tokens[0]  # the rest of a character whose start is missing
            text = self._decoded(self._tokens)
        self._settled = len(self._tokens)  # number of tokens whose text was returned
        self._shown = len(text)  # characters of that text
        self._limit = PENDING
        # Text of a prompt that ends within a character; the output may complete that
        # character.
        self._unfinished = text if self._ends_within_character() else ""
        while self._ends_within_character():
            self._settled -= 1
            self._shown = len(self._decoded(self._tokens[: self._settled]))

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skips_special=False)

    def add(self, token: int) -> str:
        """Add a token; return the text that no later token changes."""
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        text = self._decoded(self._tokens)
        found = self._new(text)
        if found and not text.endswith(PARTIAL):
            self._advance()
            return found
        if len(self._tokens) - self._settled > self._limit:
            return self._split(text)
        return ""

    def rest(self) -> str:
        """Return the remaining text; an incomplete character becomes U+FFFD."""
        return self._new(self._decoded(self._tokens))

    def _new(self, text: str) -> str:
        """Return the part of ``text`` (of all tokens) that was not returned yet."""
        is_as_before = self._unfinished and text.startswith(self._unfinished)
        return text[len(self._unfinished) if is_as_before else self._shown :]

    def _ends_within_character(self) -> bool:
        settled = self._tokens[: self._settled]
        if not self._decoded(settled).endswith(PARTIAL):
            return False
        raw = b"".join(self._tokenizer.raw(token) for token in settled)
        # A U+FFFD that the prompt itself has is a whole character.
        return not raw.endswith(PARTIAL.encode())

    def _advance(self) -> None:
        """Mark all text as returned; keep the latest tokens as context."""
        del self._tokens[: self._settled]
        self._settled, self._limit, self._unfinished = len(self._tokens), PENDING, ""
        self._shown = len(self._decoded(self._tokens))

    def _split(self, text: str) -> str:
        """Return the text of all tokens except the last ones, which are incomplete.

        Otherwise, while tokens do not form a character, each further token would decode
        all of them again.
        """
        for cut in range(len(self._tokens) - 1, self._settled, -1):
            first = self._decoded(self._tokens[:cut])
            if first + self._decoded(self._tokens[cut:]) == text:
                found = self._new(first)
                del self._tokens[:cut]
                self._settled, self._shown, self._unfinished = 0, 0, ""
                self._limit = PENDING
                return found
        self._limit *= 2
        return ""
