"""The name that pymultiworld 0.2 gave to ``multiworld.world_manager``."""

from __future__ import annotations

from multiworld.world_manager import BrokenWorldException, WorldManager

__all__ = ["BrokenWorldException", "WorldManager"]
