"""Worlds: joining, operations, resizing, and rejoining after a fault."""

from __future__ import annotations

from multiworld.world.world import Bundle, World, WorldStatistics

__all__ = ["Bundle", "World", "WorldStatistics"]
