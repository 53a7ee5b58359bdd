"""The page of the spec has every field, as the code describes it."""

from __future__ import annotations

from pathlib import Path

from multiworld.serve.loading import schema

PAGE = Path(__file__).parents[2] / "docs" / "serve" / "spec.md"


def test_every_field_is_on_the_page_with_its_meaning() -> None:
    """Fields and texts come from the same place as the schema."""
    text = PAGE.read_text()
    found = schema()
    for described in (found, *found["$defs"].values()):
        for name, field in described.get("properties", {}).items():
            meaning = " ".join(field.get("description", "").split())
            assert f"| `{name}` |" in text, name
            assert meaning in text, (name, meaning)


def test_page_has_no_field_that_there_is_not() -> None:
    """Nothing is promised that the code does not read."""
    found = schema()
    known = {
        name
        for described in (found, *found["$defs"].values())
        for name in described.get("properties", {})
    }
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert {row.split("`")[1] for row in rows} == known
