"""Free ports for programs that need one as an argument."""

from __future__ import annotations

import itertools
import os
import socket

FIRST, COUNT = 16_000, 16_000
"""Below the ports that Linux gives to sockets that ask for any (32768 and above).

Thus nothing takes a port between this choice and its use.
"""

_numbers = itertools.count(os.getpid() * 127)  # tests may run in several processes


def free_port() -> int:
    """Return a TCP port of loopback that is free now, another one each time."""
    for number in itertools.islice(_numbers, COUNT):
        port = FIRST + number % COUNT
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port is free")
