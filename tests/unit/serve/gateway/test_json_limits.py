"""Limits on the values of a body, whatever their type."""

from __future__ import annotations

import json

import pytest

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.json_limits import (
    MAX_LISTS,
    MAX_OBJECTS,
    MAX_STRINGS,
    MAX_VALUES,
    check_values,
)

HARMLESS = ['[{,"', "\\", '\\"', '\\\\"', '"', "\\[", "ä\n[", "\\u0022["]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_in_a_string_does_not_count(text: str) -> None:
    """However it is escaped."""
    many = text * (2 * MAX_VALUES)
    check_values(json.dumps({"prompt": many, "a": [1, 2], text: text}).encode())


@pytest.mark.parametrize("text", HARMLESS)
@pytest.mark.parametrize(
    ("value", "most", "said"),
    [
        ([], MAX_LISTS, "lists"),
        ({}, MAX_OBJECTS, "objects"),
        (1, MAX_VALUES, "values"),
        ("", MAX_STRINGS, "strings"),
    ],
)
def test_too_many_of_a_kind_are_refused(
    value: object, most: int, said: str, text: str
) -> None:
    """Before and after a string with anything in it."""
    whole = json.dumps([text, *[value] * (most + 1), text])
    with pytest.raises(InvalidRequestError, match=f"{said}, more than {most}"):
        check_values(whole.encode())
    check_values(json.dumps([text, *[value] * (most - 4)]).encode())
