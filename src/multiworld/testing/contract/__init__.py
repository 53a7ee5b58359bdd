"""Contract of the backends, as checks that run on any of them.

Each check is an ``async`` function of an ``Arena``. A backend is complete when all of
``CHECKS`` pass on it. A check of an operation that a backend documents as unsupported
returns at once.
"""

from __future__ import annotations

from multiworld.testing.contract import collective_checks, endings, point_to_point
from multiworld.testing.contract.harness import CHECKS, Check, check

__all__ = ["CHECKS", "Check", "check", "collective_checks", "endings", "point_to_point"]
