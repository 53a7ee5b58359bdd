"""A blocking connection to a store's values, for threads without an event loop. Shell.

c10d calls its store from C++ threads and waits inside the call. A lock makes sure that
one thread at a time uses a connection.
"""

from __future__ import annotations

import socket
import threading
from typing import Any

from multiworld.errors import StoreUnreachableError, WorldTimeoutError
from multiworld.net import frames
from multiworld.net.handshake import HandshakeError, dialing
from multiworld.net.security import Security
from multiworld.rendezvous.store_address import StoreAddress
from multiworld.rendezvous.store_session import refused_by

SLACK_S = 5.0
"""Seconds to wait for an answer beyond the store's own deadline."""


class BlockingValues:
    """Keys and values of a store, one request at a time.

    Args:
        address: The store.
        timeout_s: Seconds to wait for the connection and the handshake.
        security: Secret and TLS, as the store has them.

    Raises:
        StoreUnreachableError: The store cannot be reached.
        WrongSecretError: The store holds another secret.
        ProtocolVersionError: The store speaks another version of the protocol.
    """

    def __init__(
        self, address: StoreAddress, timeout_s: float, security: Security
    ) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._requests = 0
        try:
            self._sock = socket.create_connection(
                (address.host, address.port), timeout=timeout_s
            )
        except OSError as error:
            raise self._unreachable(error) from error
        self._sock.settimeout(timeout_s)
        try:
            if security.tls is not None:
                context = security.tls.context(is_server=False)
                self._sock = context.wrap_socket(self._sock)
            steps = dialing({"world": ""}, security)
            message = next(steps)
            while True:
                message = steps.send(self._exchange(message))
        except StopIteration:
            return
        except HandshakeError as error:
            self._sock.close()
            raise refused_by(address, error) from error
        except OSError as error:
            self._sock.close()
            raise self._unreachable(error) from error
        except BaseException:
            self._sock.close()
            raise

    def fileno(self) -> int:
        """Return the socket's descriptor, or -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the connection; a thread that waits for an answer gets an error."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    def request(self, op: str, **fields: Any) -> Any:
        """Send a request and return the store's result.

        Args:
            op: Name of the operation.
            fields: Arguments of the operation.

        Raises:
            WorldTimeoutError: The keys had no value before ``deadline_s`` had passed.
            StoreUnreachableError: The connection ended, or the store did not answer.
        """
        with self._lock:
            self._requests += 1
            self._sock.settimeout(float(fields.get("deadline_s", 0.0)) + SLACK_S)
            message = {"op": op, "request": self._requests, **fields}
            try:
                reply = self._exchange(message)
            except BaseException:
                # The answer may still arrive, and must not pass for that of the next
                # request.
                self._sock.close()
                raise
        if not reply.get("ok"):
            keys = fields.get("keys", [fields.get("key", "")])
            raise WorldTimeoutError(f"the store got no value for {keys} in time")
        return reply.get("result")

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            self._sock.sendall(frames.encode(message))
            length = frames.decode_length(self._read(4))
            return frames.decode_body(self._read(length))
        except (OSError, frames.FrameError) as error:
            raise self._unreachable(error) from error

    def _read(self, count: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < count:
            chunk = self._sock.recv(count - len(chunks))
            if not chunk:
                raise ConnectionResetError("the store closed the connection")
            chunks += chunk
        return bytes(chunks)

    def _unreachable(self, error: Exception) -> StoreUnreachableError:
        return StoreUnreachableError(
            f"cannot reach the store at {self._address}: {error}",
            address=str(self._address),
        )
