"""Protection against control tokens that users write in a chat.

If a message contains the characters of a control token (``<|im_end|>``), they must
become ordinary tokens; otherwise the message could end its turn and begin a system
turn. This module marks the characters before the template is rendered. Afterwards it
encodes them in two pieces, neither of which matches a control token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Iterator
from typing import Any

from multiworld.errors import InvalidRequestError

PART = 2**16  # characters to search at once
DIGITS = 18  # digits of a mark; templates leave digits unchanged, even in JSON
REFUSED = "the messages have a control token of this model; write it in another way"


class ControlTokens:
    """Finds and marks the characters of control tokens in users' messages."""

    def __init__(self, tokens: Collection[str]) -> None:
        # Also match tokens without their brackets, because a template may add brackets.
        cores = {t[1:-1] for t in tokens if len(t) > 2 and not t[1:-1].isalnum()}
        whole, inner = _either({*filter(None, tokens)}), _either(cores)
        self._finder = _Finder(whole, inner, max(map(len, tokens), default=0))
        self._inside = f"{whole}|{inner}"
        self._tokens = re.compile(whole)

    def check(self, text: str, made: int) -> None:
        """Raise InvalidRequestError if ``text`` has fewer than ``made`` control tokens.

        ``made`` is the number of control tokens in the encoded ``text``. If it is
        larger, the tokenizer has turned other characters into control tokens.
        """
        if made > len(self._tokens.findall(text)):
            raise InvalidRequestError(REFUSED, param="messages", code="invalid_value")

    def marks(self) -> Marks:
        """Return random marks for one chat, so that its sender cannot guess them."""
        begin, end = (
            str(secrets.randbelow(9 * 10 ** (DIGITS - 1)) + 10 ** (DIGITS - 1))
            for _ in range(2)
        )
        return Marks(self._finder, self._inside, begin, end)

    def marks_like(self, other: Marks) -> Marks:
        """Return marks with the digits of ``other``, for another part of its chat."""
        return Marks(self._finder, self._inside, other.begin, other.end)


def _either(strings: Collection[str]) -> str:
    """Return a regular expression for any of ``strings``, the longest first."""
    found = map(re.escape, sorted(strings, key=len, reverse=True))
    return f"(?:{'|'.join(found) or '(?!)'})"


class _Finder:
    """Finds control tokens in a text; at the text's ends, even without brackets.

    A regular expression search holds the GIL, so long texts are searched in parts.
    """

    def __init__(self, whole: str, inner: str, longest: int) -> None:
        self._longest = longest
        self._whole = re.compile(whole)
        # A template may strip whitespace from a text before it adds brackets.
        self._head = re.compile(rf"\s*{inner}")
        self._tail = re.compile(rf"{inner}\s*\Z")

    def find(self, text: str) -> Iterator[re.Match[str]]:
        """Yield all matches from left to right; none overlaps another."""
        at, tail = 0, self._at_end(text, 0)
        if not self._whole.match(text) and (head := self._head.match(text)):
            yield head
            at = head.end()
        while True:
            if tail is not None and tail.start() < at:
                tail = self._at_end(text, at)
            found = self._next(text, at)
            if found is None or (tail is not None and tail.start() < found.start()):
                break
            yield found
            at = max(found.end(), at + 1)
        if tail is not None:
            yield tail

    def _next(self, text: str, at: int) -> re.Match[str] | None:
        while at < len(text):
            end = at + PART
            found = self._whole.search(text, at, end + self._longest)
            if found is not None and found.start() < end:
                return found
            at = end
        return None

    def _at_end(self, text: str, at: int) -> re.Match[str] | None:
        end = len(text.rstrip())
        starts = range(max(at, end - self._longest), end)
        found = (self._tail.match(text, start) for start in starts)
        return next(filter(None, found), None)


class Marks:
    """The marks of one chat, which are put before and after each control token."""

    def __init__(self, finder: _Finder, inside: str, begin: str, end: str) -> None:
        # ``inside``: regular expression of the characters between two marks.
        self._finder, self.begin, self.end = finder, begin, end
        self._split = re.compile(f"{begin}({inside}){end}|{begin}|{end}", re.IGNORECASE)
        self.is_used = False

    def put(self, value: Any) -> Any:
        """Return plain data with marks around the control tokens in its strings."""
        if isinstance(value, str):
            parts, at = list[str](), 0
            for found in self._finder.find(value):
                parts += value[at : found.start()], self._marked(found)
                at = found.end()
            return "".join([*parts, value[at:]]) if parts else value
        if isinstance(value, dict):
            return {self.put(k): self.put(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.put(each) for each in value]
        return value

    def _marked(self, found: re.Match[str]) -> str:
        self.is_used = True
        text, inner = found[0], found[0].strip()
        if not inner:  # a control token that consists of spaces
            return self.begin + text + self.end
        lead, _, trail = text.partition(inner)
        return f"{lead}{self.begin}{inner}{self.end}{trail}"

    def encoded(
        self,
        text: str,
        encode: Callable[[list[str]], list[list[int]]],
        controls: Any,
        check: Callable[[str, int], None] | None,  # checks the unmarked parts
    ) -> list[int]:
        """Return the tokens of a rendered text; marked parts become ordinary tokens."""
        pieces: list[str] = []
        are_marked: list[bool] = []
        for number, part in enumerate(self._split.split(text)):
            if not part:
                continue
            # Split off one character, so that no piece is a whole control token.
            both = (part[:1], part[1:]) if number % 2 else (part,)
            pieces += filter(None, both)
            are_marked += [bool(number % 2)] * (len(pieces) - len(are_marked))
        found: list[int] = []
        made = 0
        for ids, is_marked in zip(encode(pieces), are_marked, strict=True):
            if is_marked and not controls.isdisjoint(ids):
                raise InvalidRequestError(
                    REFUSED, param="messages", code="invalid_value"
                )
            made += 0 if is_marked else sum(token in controls for token in ids)
            found += ids
        if check is not None:
            pairs = zip(pieces, are_marked, strict=True)
            check("\0".join(p for p, is_marked in pairs if not is_marked), made)
        return found
