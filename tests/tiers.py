"""Parameters of a test that ``make test`` runs, where one is as good as another."""

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
