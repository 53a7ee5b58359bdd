"""Backends, which move tensors between the members of a world: ``direct`` (our own
sockets), ``memory`` (inside one process), or any that is registered with torch."""

from __future__ import annotations

from multiworld.backends.base import Backend, Bundle, WorldView
from multiworld.backends.direct.backend import DirectBackend

__all__ = ["Backend", "Bundle", "make_backend"]


def make_backend(name: str, view: WorldView) -> Backend:
    """Return a new backend for one incarnation of a world; the caller opens it."""
    if name == "direct":
        return DirectBackend(view)
    if name == "memory":
        from multiworld.backends.memory import MemoryBackend

        return MemoryBackend(view)
    from multiworld.backends.c10d.backend import C10dBackend

    return C10dBackend(view, name)
