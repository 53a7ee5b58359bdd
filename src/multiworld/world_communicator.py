"""Alias of ``multiworld.world.communicator``, under the prototype's name."""

from __future__ import annotations

from multiworld.world.communicator import BrokenWorldException, WorldCommunicator

__all__ = ["BrokenWorldException", "WorldCommunicator"]
