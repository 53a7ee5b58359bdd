"""Elastic, fault-tolerant worlds (process groups) for PyTorch.

One process can be a member of many independent worlds at once. A fault breaks only the
worlds that the lost process was a member of. The survivors of those worlds learn which
member was lost; all other worlds continue.

::

    async with multiworld.WorldManager() as manager:
        world = await manager.join("w", rank=0, size=2, store="tcp://10.0.0.1:29500")
        x = await world.recv(src=1)

Importing this package has no side effect and does not import torch: names that need it
are resolved when a program first uses them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from multiworld import errors as _errors
from multiworld.errors import *  # noqa: F403
from multiworld.incarnation import events as _events
from multiworld.incarnation.events import *  # noqa: F403

if TYPE_CHECKING:
    from multiworld.backends.base import Bundle
    from multiworld.config import WorldConfig
    from multiworld.liveness.watchdog import WatchDog
    from multiworld.net.security import Security, Tls
    from multiworld.world.communicator import WorldCommunicator
    from multiworld.world.manager import WorldManager
    from multiworld.world.world import World, WorldStatistics

__version__ = "0.1.0"

# Modules of the names that are resolved lazily; most of them import torch.
_HOME_OF = {
    "Bundle": "multiworld.backends.base",
    "Security": "multiworld.net.security",
    "Tls": "multiworld.net.security",
    "WatchDog": "multiworld.liveness.watchdog",
    "World": "multiworld.world.world",
    "WorldCommunicator": "multiworld.world.communicator",
    "WorldConfig": "multiworld.config",
    "WorldManager": "multiworld.world.manager",
    "WorldStatistics": "multiworld.world.world",
}

__all__ = [
    "Bundle",
    "Security",
    "Tls",
    "WatchDog",
    "World",
    "WorldCommunicator",
    "WorldConfig",
    "WorldManager",
    "WorldStatistics",
]
__all__ += _errors.__all__
__all__ += _events.__all__


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
