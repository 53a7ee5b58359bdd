"""What programs that use multiworld can test themselves with.

``fleet`` starts real processes quickly and breaks them on purpose, ``arena`` makes the
members of a world inside one process, ``contract`` is the suite that every backend
passes, ``leaks`` checks that nothing was left behind, ``clock`` is time that stands
still.
"""

from __future__ import annotations

from multiworld.testing.arena import Arena
from multiworld.testing.clock import FakeClock
from multiworld.testing.contract import CHECKS, Check
from multiworld.testing.fleet import Child, ProcessFleet, Role
from multiworld.testing.leaks import Leak, LeakError, no_leaks

__all__ = [
    "CHECKS",
    "Arena",
    "Check",
    "Child",
    "FakeClock",
    "Leak",
    "LeakError",
    "ProcessFleet",
    "Role",
    "no_leaks",
]
