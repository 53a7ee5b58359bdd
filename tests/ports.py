"""Free ports, chosen by the system."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a TCP port of loopback that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
