"""Alias of ``multiworld.liveness.watchdog``, the name that pymultiworld uses."""

from __future__ import annotations

from multiworld.liveness.watchdog import WatchDog

__all__ = ["WatchDog"]
