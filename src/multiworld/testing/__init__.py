"""Test tools for programs that use multiworld.

- ``arena`` makes all members of a world inside one process.
- ``clock`` is a fake clock.
- ``fleet`` starts real processes quickly, to be killed or stopped.
- ``hosts`` emulates several hosts and their network on one machine.
- ``leaks`` checks that nothing stays open.
"""

from __future__ import annotations

from multiworld.testing.arena import Arena
from multiworld.testing.clock import FakeClock
from multiworld.testing.fleet import Child, ChildFailedError, ProcessFleet, Role
from multiworld.testing.leaks import Leak, LeakError, no_leaks

__all__ = [
    "Arena",
    "Child",
    "ChildFailedError",
    "FakeClock",
    "Leak",
    "LeakError",
    "ProcessFleet",
    "Role",
    "no_leaks",
]
