"""Alias of ``multiworld.world.manager``, under the prototype's name."""

from __future__ import annotations

from multiworld.world.manager import BrokenWorldException, WorldManager

__all__ = ["BrokenWorldException", "WorldManager"]
