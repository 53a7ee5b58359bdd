"""Events of worlds: alias of ``multiworld.incarnation.events``. Pure."""

from __future__ import annotations

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

__all__ = [
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
]
