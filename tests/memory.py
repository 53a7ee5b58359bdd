"""Number of objects that an object keeps alive, for tests of bounded memory."""

from __future__ import annotations

import gc
import logging
from types import BuiltinFunctionType, FunctionType, ModuleType

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, logging.Logger)
"""Kinds of objects that an object refers to and does not own."""


def objects_in(*roots: object) -> int:
    """Return how many objects are reachable from some, through those they own."""
    seen: dict[int, object] = {}
    found = list(roots)
    while found:
        each = found.pop()
        if id(each) not in seen and not isinstance(each, _SHARED):
            seen[id(each)] = each
            found += gc.get_referents(each)
            if isinstance(each, dict):
                found += each  # the garbage collector skips keys that are strings
    return len(seen)
