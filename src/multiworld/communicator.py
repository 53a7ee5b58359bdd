"""Alias of ``multiworld.world.communicator``, the name that pymultiworld 0.2 uses. Shell."""

from __future__ import annotations

from multiworld.world.communicator import BrokenWorldException, WorldCommunicator

__all__ = ["BrokenWorldException", "WorldCommunicator"]
