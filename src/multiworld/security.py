"""A shared secret and TLS: alias of ``multiworld.net.security``."""

from __future__ import annotations

from multiworld.net.security import Security, Tls

__all__ = ["Security", "Tls"]
