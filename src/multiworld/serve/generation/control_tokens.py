"""Control tokens in a chat: of the template only, not of what users write.

A chat template writes control tokens, such as ``<|im_end|>``, around what messages say.
If a message has the same characters, they must become ordinary tokens, or it could end
its turn and begin one of the system. So such characters are put between marks before
the template is rendered, and encoded in two pieces afterwards, which no control token
matches.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection
from typing import Any

from multiworld.errors import InvalidRequestError

DIGITS = 18
"""Digits of a mark. Templates leave digits as they are, also in JSON."""


REFUSED = "the messages have a control token of this model; write it in another way"


class ControlTokens:
    """Finds and marks control tokens in what users write.

    Args:
        tokens: Texts of the control tokens.
    """

    def __init__(self, tokens: Collection[str]) -> None:
        # Cores as well: a template may write the brackets around a name.
        cores = {t[1:-1] for t in tokens if len(t) > 2 and not t[1:-1].isalnum()}
        found = sorted({*filter(None, tokens), *cores}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, found)) or r"(?!)")
        self._tokens = re.compile(
            "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)"
        )

    def check(self, text: str, made: int) -> None:
        """Check that a tokenizer made no control tokens of other characters.

        Args:
            text: The rendered text.
            made: Number of control tokens that were made of it.

        Raises:
            InvalidRequestError: There are more than the text has.
        """
        if made > len(self._tokens.findall(text)):
            raise InvalidRequestError(REFUSED, param="messages", code="invalid_value")

    def marks(self) -> Marks:
        """Return marks for one chat, which nobody can guess."""
        begin, end = (
            str(secrets.randbelow(9 * 10 ** (DIGITS - 1)) + 10 ** (DIGITS - 1))
            for _ in range(2)
        )
        return Marks(self._pattern, begin, end)


class Marks:
    """The marks of one chat.

    Args:
        pattern: What is marked.
        begin: Mark before it.
        end: Mark after it.

    Attributes:
        is_used: Whether anything was marked.
    """

    def __init__(self, pattern: re.Pattern[str], begin: str, end: str) -> None:
        self._pattern, self._begin, self._end = pattern, begin, end
        inside = pattern.pattern
        self._split = re.compile(f"{begin}({inside}){end}|{begin}|{end}", re.IGNORECASE)
        self.is_used = False

    def put(self, value: Any) -> Any:
        """Return plain data with marks in all of its texts.

        Raises:
            RecursionError: It is nested too deeply.
        """
        if isinstance(value, str):
            return self._pattern.sub(self._marked, value)
        if isinstance(value, dict):
            return {self.put(k): self.put(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.put(each) for each in value]
        return value

    def _marked(self, found: re.Match[str]) -> str:
        self.is_used = True
        return self._begin + found[0] + self._end

    def encoded(
        self, text: str, encode: Callable[[list[str]], list[list[int]]], controls: Any
    ) -> list[int]:
        """Return the tokens of a rendered text, in which marked parts are ordinary.

        Args:
            text: The text.
            encode: Returns the tokens of each of some texts.
            controls: Ids of the control tokens.

        Raises:
            InvalidRequestError: The tokenizer makes a control token of a part all the
                same.
        """
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
        for ids, is_marked in zip(encode(pieces), are_marked, strict=True):
            if is_marked and not controls.isdisjoint(ids):
                raise InvalidRequestError(
                    REFUSED, param="messages", code="invalid_value"
                )
            found += ids
        return found
