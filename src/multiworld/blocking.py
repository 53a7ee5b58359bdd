"""Worlds without an event loop: alias of ``multiworld.world.blocking``."""

from __future__ import annotations

from multiworld.world.blocking import World, WorldManager

__all__ = ["World", "WorldManager"]
