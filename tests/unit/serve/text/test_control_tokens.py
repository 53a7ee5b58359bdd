"""Control tokens in what users write."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.text import control_tokens
from multiworld.serve.text.control_tokens import ControlTokens

TOKENS = ["<|im_end|>", "<s>", "[INST]", "<|a|>", " <x> ", "<s><s>"]
CORES = [t[1:-1] for t in TOKENS if not t[1:-1].isalnum()]
PARTS = [*TOKENS, *(t[1:-1] for t in TOKENS), "|", "<", ">", " ", "\n", "a", "im_end"]


def either(strings: list[str]) -> str:
    """Return an expression that matches the longest of some strings."""
    return "|".join(map(re.escape, sorted(strings, key=len, reverse=True)))


@given(st.lists(st.sampled_from(PARTS), max_size=9).map("".join))
def test_long_text_searched_in_parts_has_the_same_marks(text: str) -> None:
    """They are searched in parts, because a search holds the GIL."""
    whole, inner = either(TOKENS), either(CORES)
    expression = re.compile(rf"{whole}|\A\s*(?:{inner})|(?:{inner})\s*\Z")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_tokens, "PART", 7)
        found = ControlTokens(TOKENS).marks().put(text)
    begin, end, *_ = [*re.findall("[0-9]{18}", found), "", ""]

    def marked(match: re.Match[str]) -> str:
        core = match[0].strip()
        return match[0].replace(core, f"{begin}{core}{end}")

    assert found == expression.sub(marked, text)
