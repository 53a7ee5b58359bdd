"""The page of the spec is up to date."""

from __future__ import annotations

from tests.meta.spec_page import PAGE, page


def test_page_is_what_the_code_says() -> None:
    """The page equals the one made from the schema."""
    assert PAGE.read_text() == page(), "run: python -m tests.meta.spec_page"
