"""The page of the spec has every field, as the code describes it."""

from __future__ import annotations

from tests.meta.spec_page import PAGE, page


def test_page_is_what_the_code_says() -> None:
    """Fields, types, defaults and meanings come from the schema."""
    assert PAGE.read_text() == page(), "run: python -m tests.meta.spec_page"
