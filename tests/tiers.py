"""Choice of interchangeable test parameters: ``make test`` runs only the first ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def some(values: Sequence[Any], count: int) -> list[Any]:
    """Return parameters: the first ``count``, and the others in the heavy tier."""
    return [*values[:count], *map(_heavy, values[count:])]


def _heavy(value: Any) -> Any:
    given = value if isinstance(value, tuple) else (value,)
    return pytest.param(*given, marks=pytest.mark.heavy)
