"""The kernel's counts of a connection, while its peer goes on."""

from __future__ import annotations

import socket
from typing import Any

from multiworld.serve.keeper import counters


class Watched(socket.socket):
    """A socket whose peer closes before the third look at it."""

    looks = 0
    peer: socket.socket

    def getsockopt(self, *args: Any) -> Any:
        self.looks += 1
        if self.looks == 3:
            self.peer.close()
        return super().getsockopt(*args)


def test_end_of_the_peer_between_two_looks_is_not_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with peer, Watched(fileno=accepted.detach()) as sock:
        sock.peer = peer
        peer.sendall(b"abc")
        assert sock.recv(3, socket.MSG_PEEK | socket.MSG_WAITALL) == b"abc"
        assert counters.read(sock) == 0
        sock.recv(3)
        sock.looks = 0
        assert counters.read(sock) == 3
        peer.close()
        sock.settimeout(20.0)
        assert sock.recv(10) == b""
        assert counters.read(sock) == 3
