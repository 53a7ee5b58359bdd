"""The name that pymultiworld 0.2 gave to ``multiworld.world_communicator``."""

from __future__ import annotations

from multiworld.world_communicator import BrokenWorldException, WorldCommunicator

__all__ = ["BrokenWorldException", "WorldCommunicator"]
