"""Alias of ``multiworld.world.manager``, the name that pymultiworld 0.1 uses. Shell."""

from __future__ import annotations

from multiworld.world.manager import BrokenWorldException, WorldManager

__all__ = ["BrokenWorldException", "WorldManager"]
