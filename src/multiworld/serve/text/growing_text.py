"""The text of a stream, which grows token by token."""

from __future__ import annotations

import functools
import re
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
        self._stop = StopStrings(tuple(filter(None, stop)))
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
        before = len(self._held)
        self._held += new
        if self._stop.advance(new, is_early=self._count < self._min_tokens):
            self.is_stopped = True
            given, self._held = self._held[: self._stop.find(self._held, before)], ""
        else:
            # Hold back text that may be the start of a stop string.
            keep = 0 if is_end else self._stop.begun
            cut = len(self._held) - keep
            given, self._held = self._held[:cut], self._held[cut:]
        self._length += len(given)
        return given


class StopStrings:
    """Finds stop strings in growing text, in linear time (Knuth, Morris and Pratt)."""

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._strings = strings
        # For each stop string: length of its longest prefix that ends the text.
        self._begun = [0] * len(strings)

    @property
    def begun(self) -> int:
        """Length of the longest prefix of a stop string that ends the text."""
        return max(self._begun, default=0)

    def advance(self, new: str, *, is_early: bool = False) -> bool:
        """Read more text; return whether it completes a stop string.

        ``is_early``: a stop string that ends within ``new`` does not count, but one
        that only starts there may count later.
        """
        is_found = False
        for number, string in enumerate(self._strings):
            borders, length = _borders(string), self._begun[number]
            for character in new:
                while length and string[length] != character:
                    length = borders[length - 1]
                length += string[length] == character
                if length == len(string):
                    if is_early:
                        length = borders[-1]
                        continue
                    is_found = True
                    break
            self._begun[number] = length
        return is_found

    def find(self, text: str, before: int) -> int:
        """Return the start of the first stop string that ends after ``before``."""
        places = (
            text.find(string, max(0, before - len(string) + 1))
            for string in self._strings
        )
        return min(place for place in places if place >= 0)


@functools.lru_cache(maxsize=1024)
def _borders(string: str) -> tuple[int, ...]:
    """Return, for each prefix, the length of its longest border (prefix and suffix)."""
    found, length = [0] * len(string), 0
    for at in range(1, len(string)):
        while length and string[length] != string[at]:
            length = found[length - 1]
        length += string[length] == string[at]
        found[at] = length
    return tuple(found)


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

        If tokens never became a character, each further token would otherwise decode
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
