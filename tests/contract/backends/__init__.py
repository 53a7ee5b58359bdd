"""Contract of the backends of worlds; a complete backend passes every check."""

from __future__ import annotations

from tests.contract.backends import collective_checks, endings, point_to_point
from tests.contract.backends.harness import CHECKS, Check

__all__ = ["CHECKS", "Check", "collective_checks", "endings", "point_to_point"]
