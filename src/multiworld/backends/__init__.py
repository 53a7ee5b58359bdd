"""Ways of moving tensors: ``direct``, ``memory``, and whatever c10d knows.

``make_backend`` finds one by name: ``direct`` (our sockets), ``memory`` (inside one
process), or any backend registered with ``torch.distributed``.
"""

from __future__ import annotations

from multiworld.backends.base import Backend, Bundle, WorldView
from multiworld.backends.direct.backend import DirectBackend

__all__ = ["Backend", "Bundle", "make_backend"]


def make_backend(name: str, view: WorldView) -> Backend:
    """Return the backend ``name`` for one incarnation, not yet open."""
    if name == "direct":
        return DirectBackend(view)
    if name == "memory":
        from multiworld.backends.memory import MemoryBackend

        return MemoryBackend(view)
    from multiworld.backends.c10d.backend import C10dBackend

    return C10dBackend(view, name)
