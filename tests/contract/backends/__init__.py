"""The contract of the backends of worlds: checks that run on any of them.

Each check is an ``async`` function of an ``Arena``. A backend is complete when all of
``CHECKS`` pass on it. A check of an operation that a backend documents as unsupported
returns at once.
"""

from __future__ import annotations

from tests.contract.backends import collective_checks, endings, point_to_point
from tests.contract.backends.harness import CHECKS, Check

__all__ = ["CHECKS", "Check", "collective_checks", "endings", "point_to_point"]
