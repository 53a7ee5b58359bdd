"""What changes of the facts, as it is sent and put together again."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.dashboard.patches import patch_of

LEAVES = st.integers(0, 3) | st.text(max_size=2) | st.lists(st.integers(0, 3))
VALUES = st.recursive(
    LEAVES, lambda each: st.dictionaries(st.sampled_from("abcd"), each), max_leaves=12
)
OBJECTS = st.dictionaries(st.sampled_from("abcd"), VALUES)


def patched(before: Any, patch: Any) -> Any:
    """Return what the page makes of a patch: RFC 7396, section 2."""
    if not isinstance(patch, dict):
        return patch
    found = dict(before) if isinstance(before, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = patched(found.get(key), value)
    return found


@given(OBJECTS, OBJECTS)
def test_patch_makes_one_of_the_other(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert patched(before, patch_of(before, after)) == after


@given(OBJECTS)
def test_nothing_changes_nothing(facts: dict[str, Any]) -> None:
    assert patch_of(facts, facts) == {}


def test_patch_has_only_what_changed() -> None:
    before = {"a": {"x": 1, "y": 2}, "b": 3, "c": 4}
    assert patch_of(before, {"a": {"x": 1, "y": 5}, "b": 3}) == {
        "a": {"y": 5},
        "c": None,
    }
