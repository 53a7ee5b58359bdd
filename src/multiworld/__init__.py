"""Elastic, fault-tolerant worlds (process groups) for PyTorch.

One process can be a member of many independent worlds at once. A fault breaks only the
worlds that the lost process was a member of. The survivors of those worlds learn which
member was lost; all other worlds continue.

::

    async with multiworld.WorldManager() as manager:
        world = await manager.join("w", rank=0, size=2, store="tcp://10.0.0.1:29500")
        x = await world.recv(src=1)

Importing this package has no side effect and does not import torch: a name is resolved
when a program first uses it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiworld.backends.base import Bundle
    from multiworld.config import WorldConfig
    from multiworld.errors import (
        BackendError,
        BrokenWorldException,
        ConfigError,
        DeadlineExceededError,
        InternalError,
        InvalidRequestError,
        JoinMismatchError,
        JoinTimeoutError,
        LaunchError,
        MemberLeftError,
        MemberLostError,
        ModelFailedError,
        MultiWorldError,
        NoReplicaError,
        OverloadedError,
        PlacementError,
        ProtocolVersionError,
        QuarantinedError,
        RankTakenError,
        RendezvousError,
        RequestPoisonedError,
        ServeError,
        SpecError,
        StaleEpochError,
        StoreUnreachableError,
        TensorMismatchError,
        TorchVersionError,
        UnauthorizedError,
        UnknownModelError,
        UnknownWorldError,
        UnsupportedOperationError,
        UsedAfterForkError,
        WorldBrokenError,
        WorldClosedError,
        WorldError,
        WorldExistsError,
        WorldTimeoutError,
        WrongSecretError,
    )
    from multiworld.incarnation.events import (
        Event,
        EventsDropped,
        MemberLeft,
        MemberLost,
        MemberResumed,
        MemberStalled,
        MemberWaiting,
        WorldBroken,
        WorldClosed,
        WorldReady,
    )
    from multiworld.liveness.watchdog import WatchDog
    from multiworld.net.security import Security, Tls
    from multiworld.world.communicator import WorldCommunicator
    from multiworld.world.manager import WorldManager
    from multiworld.world.world import World, WorldStatistics

__version__ = "0.1.0"

_HOMES = {
    "multiworld.backends.base": ("Bundle",),
    "multiworld.config": ("WorldConfig",),
    "multiworld.errors": (
        "BackendError",
        "BrokenWorldException",
        "ConfigError",
        "DeadlineExceededError",
        "InternalError",
        "InvalidRequestError",
        "JoinMismatchError",
        "JoinTimeoutError",
        "LaunchError",
        "MemberLeftError",
        "MemberLostError",
        "ModelFailedError",
        "MultiWorldError",
        "NoReplicaError",
        "OverloadedError",
        "PlacementError",
        "ProtocolVersionError",
        "QuarantinedError",
        "RankTakenError",
        "RendezvousError",
        "RequestPoisonedError",
        "ServeError",
        "SpecError",
        "StaleEpochError",
        "StoreUnreachableError",
        "TensorMismatchError",
        "TorchVersionError",
        "UnauthorizedError",
        "UnknownModelError",
        "UnknownWorldError",
        "UnsupportedOperationError",
        "UsedAfterForkError",
        "WorldBrokenError",
        "WorldClosedError",
        "WorldError",
        "WorldExistsError",
        "WorldTimeoutError",
        "WrongSecretError",
    ),
    "multiworld.incarnation.events": (
        "Event",
        "EventsDropped",
        "MemberLeft",
        "MemberLost",
        "MemberResumed",
        "MemberStalled",
        "MemberWaiting",
        "WorldBroken",
        "WorldClosed",
        "WorldReady",
    ),
    "multiworld.net.security": ("Security", "Tls"),
    "multiworld.liveness.watchdog": ("WatchDog",),
    "multiworld.world.world": ("World", "WorldStatistics"),
    "multiworld.world.communicator": ("WorldCommunicator",),
    "multiworld.world.manager": ("WorldManager",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BackendError",
    "BrokenWorldException",
    "Bundle",
    "ConfigError",
    "DeadlineExceededError",
    "Event",
    "EventsDropped",
    "InternalError",
    "InvalidRequestError",
    "JoinMismatchError",
    "JoinTimeoutError",
    "LaunchError",
    "MemberLeft",
    "MemberLeftError",
    "MemberLost",
    "MemberLostError",
    "MemberResumed",
    "MemberStalled",
    "MemberWaiting",
    "ModelFailedError",
    "MultiWorldError",
    "NoReplicaError",
    "OverloadedError",
    "PlacementError",
    "ProtocolVersionError",
    "QuarantinedError",
    "RankTakenError",
    "RendezvousError",
    "RequestPoisonedError",
    "Security",
    "ServeError",
    "SpecError",
    "StaleEpochError",
    "StoreUnreachableError",
    "TensorMismatchError",
    "Tls",
    "TorchVersionError",
    "UnauthorizedError",
    "UnknownModelError",
    "UnknownWorldError",
    "UnsupportedOperationError",
    "UsedAfterForkError",
    "WatchDog",
    "World",
    "WorldBroken",
    "WorldBrokenError",
    "WorldClosed",
    "WorldClosedError",
    "WorldCommunicator",
    "WorldConfig",
    "WorldError",
    "WorldExistsError",
    "WorldManager",
    "WorldReady",
    "WorldStatistics",
    "WorldTimeoutError",
    "WrongSecretError",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
