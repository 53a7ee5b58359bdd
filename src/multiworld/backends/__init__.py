"""Backends, which move tensors between the members of a world: ``direct`` (our own
sockets), ``memory`` (inside one process), or any backend registered with torch."""

from __future__ import annotations

from multiworld.backends.base import Bundle, WorldView
from multiworld.backends.direct.backend import DirectBackend
from multiworld.backends.message_backend import MessageBackend

__all__ = ["Bundle", "make_backend"]


def make_backend(name: str, view: WorldView) -> MessageBackend:
    """Return a new backend for one incarnation of a world; the caller opens it."""
    if name == "direct":
        return DirectBackend(view)
    if name == "memory":
        from multiworld.backends.memory import MemoryBackend

        return MemoryBackend(view)
    from multiworld.backends.c10d.backend import C10dBackend

    return C10dBackend(view, name)
