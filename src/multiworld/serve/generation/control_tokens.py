"""Control tokens in a chat: from the template only, not from what users write.

In a message, the characters of a control token (``<|im_end|>``) must become ordinary
tokens, or the message could end its turn and begin a system turn. So they are marked
before the template is rendered, and encoded in two pieces afterwards, which no control
token matches.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection
from typing import Any

from multiworld.errors import InvalidRequestError

DIGITS = 18  # of a mark. Templates leave digits as they are, also in JSON
REFUSED = "the messages have a control token of this model; write it in another way"


class ControlTokens:
    """Finds and marks the texts of control tokens in what users write."""

    def __init__(self, tokens: Collection[str]) -> None:
        # Also match names without brackets, where a template may add those.
        cores = {t[1:-1] for t in tokens if len(t) > 2 and not t[1:-1].isalnum()}
        whole, inner = _either({*filter(None, tokens)}), _either(cores)
        # Templates may trim what they put into brackets.
        self._pattern = re.compile(rf"{whole}|\A\s*{inner}|{inner}\s*\Z")
        self._inside = f"{whole}|{inner}"
        self._tokens = re.compile(whole)

    def check(self, text: str, made: int) -> None:
        """Raise InvalidRequestError if ``made`` exceeds the text's control tokens."""
        if made > len(self._tokens.findall(text)):
            raise InvalidRequestError(REFUSED, param="messages", code="invalid_value")

    def marks(self) -> Marks:
        """Return unguessable marks for one chat."""
        begin, end = (
            str(secrets.randbelow(9 * 10 ** (DIGITS - 1)) + 10 ** (DIGITS - 1))
            for _ in range(2)
        )
        return Marks(self._pattern, self._inside, begin, end)


def _either(strings: Collection[str]) -> str:
    """Return an expression of any of some strings, of the longest that fits."""
    found = map(re.escape, sorted(strings, key=len, reverse=True))
    return f"(?:{'|'.join(found) or '(?!)'})"


class Marks:
    """The marks of one chat, put before and after each match of ``pattern``."""

    def __init__(
        self, pattern: re.Pattern[str], inside: str, begin: str, end: str
    ) -> None:
        # ``inside``: an expression of what stands between marks.
        self._pattern, self._begin, self._end = pattern, begin, end
        self._split = re.compile(f"{begin}({inside}){end}|{begin}|{end}", re.IGNORECASE)
        self.is_used = False

    def put(self, value: Any) -> Any:
        """Return plain data with marks in all of its strings."""
        if isinstance(value, str):
            return self._pattern.sub(self._marked, value)
        if isinstance(value, dict):
            return {self.put(k): self.put(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.put(each) for each in value]
        return value

    def _marked(self, found: re.Match[str]) -> str:
        self.is_used = True
        text, inner = found[0], found[0].strip()
        if not inner:  # a control token of spaces
            return self._begin + text + self._end
        lead, _, trail = text.partition(inner)
        return f"{lead}{self._begin}{inner}{self._end}{trail}"

    def encoded(
        self,
        text: str,
        encode: Callable[[list[str]], list[list[int]]],
        controls: Any,
        check: Callable[[str, int], None] | None,  # of the other parts; None: trusted
    ) -> list[int]:
        """Return the tokens of a rendered text: ordinary ones for marked parts."""
        pieces: list[str] = []
        are_marked: list[bool] = []
        for number, part in enumerate(self._split.split(text)):
            if not part:
                continue
            # A control token is longer than a character, so neither piece is one.
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
