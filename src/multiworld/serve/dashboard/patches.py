"""Differences between two JSON values, as merge patches (RFC 7396). Pure."""

from __future__ import annotations

from typing import Any


def patch_of(before: Any, after: Any) -> Any:
    """Return the merge patch that turns ``before`` into ``after``.

    A null in a merge patch removes the key, so a value that becomes null is removed.
    Readers of the dashboard's facts treat null and absent values alike.
    """
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return after
    found: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for key, value in after.items():
        if key not in before:
            found[key] = value
        elif before[key] != value:
            found[key] = patch_of(before[key], value)
    return found
