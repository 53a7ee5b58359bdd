"""Limits on the values of a JSON body, whatever their type."""

from __future__ import annotations

import json

import pytest

from multiworld.errors import InvalidRequestError
from multiworld.serve.gateway.http.json_limits import (
    CHECKED_BYTES,
    MAX_LISTS,
    MAX_OBJECTS,
    MAX_PARTS,
    MAX_STRINGS,
    MAX_VALUES,
    check_objects,
    check_values,
)

HARMLESS = ['[{,"', "\\", '\\"', '\\\\"', '"', "\\[", "ä\n[", "\\u0022["]


@pytest.mark.parametrize("text", HARMLESS)
def test_what_is_in_a_string_does_not_count(text: str) -> None:
    many = text * (2 * MAX_VALUES)
    check_values(json.dumps({"prompt": many, "a": [1, 2], text: text}).encode())


@pytest.mark.parametrize("escape", [b"\\\\", b'\\"', b"\\u0022", b"a\\"])
@pytest.mark.parametrize("before", range(4))
def test_pieces_do_not_cut_an_escape(before: int, escape: bytes) -> None:
    """Bodies are scanned in pieces, and an escape may lie on a border."""
    many = b"[" * before + b'"' + escape * CHECKED_BYTES
    check_values(many)
    with pytest.raises(InvalidRequestError, match="lists"):
        check_values(many.rstrip(b"\\") + b'",' + b"[" * (MAX_LISTS + 1))


@pytest.mark.parametrize("text", HARMLESS)
@pytest.mark.parametrize(
    ("value", "most", "said"),
    [
        ([], MAX_LISTS, "lists"),
        ({}, MAX_PARTS, "objects"),
        (1, MAX_VALUES, "values"),
        ("", MAX_STRINGS, "strings"),
    ],
)
def test_too_many_of_a_kind_are_refused(
    value: object, most: int, said: str, text: str
) -> None:
    whole = json.dumps([text, *[value] * (most + 1), text])
    with pytest.raises(InvalidRequestError, match=f"more than {most} {said}"):
        check_values(whole.encode())
    check_values(json.dumps([text, *[value] * (most - 4)]).encode())


def test_braces_within_strings_are_no_objects() -> None:
    """A source file to embed is one string."""
    check_objects(json.dumps({"input": "{" * (2 * MAX_OBJECTS)}).encode())
    with pytest.raises(InvalidRequestError, match="objects"):
        check_objects(json.dumps([{}] * (MAX_OBJECTS + 1)).encode())
