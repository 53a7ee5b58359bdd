"""Checks of the port that clients connect to; needs no torch."""

from __future__ import annotations

import socket

from multiworld.errors import ServeError


def check_free(host: str, port: int) -> None:
    """Raise OSError if the port is in use, even by a socket with SO_REUSEPORT."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def cannot_listen(host: str, port: int, error: OSError) -> ServeError:
    return ServeError(
        f"cannot listen at {host}:{port}: {error.strerror}; give another gateway.host "
        "or gateway.port (--host, --port)"
    )
