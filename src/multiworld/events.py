"""Events of worlds: alias of ``multiworld.incarnation.events``. Pure."""

from __future__ import annotations

from multiworld.incarnation import events as _events
from multiworld.incarnation.events import *  # noqa: F403

__all__: list[str] = []
__all__ += _events.__all__
