"""Blocking connection to a store's values, for c10d, which waits in C++ threads without
an event loop. One thread at a time uses the connection."""

from __future__ import annotations

import socket
import threading
from typing import TypeVar

import msgspec

from multiworld.errors import StoreUnreachableError, WorldTimeoutError
from multiworld.net import frames
from multiworld.net.forks import closed_in_forks
from multiworld.net.handshake import HandshakeError, dialing
from multiworld.net.security import Security
from multiworld.rendezvous import store_messages
from multiworld.rendezvous.store_address import StoreAddress
from multiworld.rendezvous.store_messages import StoreHello, ValueRequest
from multiworld.rendezvous.store_session import refused_by

R = TypeVar("R")

# Seconds to wait for the store's reply after the deadline that the store observes.
SLACK_S = 5.0


class BlockingValues:
    """Keys and values of a store; ``timeout_s`` limits only connecting."""

    def __init__(
        self, address: StoreAddress, timeout_s: float, security: Security
    ) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._requests = 0
        try:
            self._sock = closed_in_forks(
                socket.create_connection(
                    (address.host, address.port), timeout=timeout_s
                )
            )
        except OSError as error:
            raise self._unreachable(error) from error
        self._sock.settimeout(timeout_s)
        try:
            if security.tls is not None:
                context = security.tls.context(is_server=False)
                self._sock = tls = closed_in_forks(
                    context.wrap_socket(self._sock, do_handshake_on_connect=False)
                )
                tls.do_handshake()
            steps = dialing(StoreHello(), security)
            frame = next(steps)
            while True:
                frame = steps.send(self._exchange(frame))
        except StopIteration:
            return
        except HandshakeError as error:
            self._sock.close()
            raise refused_by(address, error) from error
        except (OSError, frames.FrameError) as error:
            self._sock.close()
            raise self._unreachable(error) from error
        except BaseException:
            self._sock.close()
            raise

    def close(self) -> None:
        """Close the connection; a thread that waits for a reply gets an error."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()

    def request(self, message: ValueRequest, kind: type[R]) -> R:
        """Send a request, with its number set here, and return the store's result."""
        with self._lock:
            self._requests += 1
            message = msgspec.structs.replace(message, request=self._requests)
            waits_s = (
                message.deadline_s
                if isinstance(message, store_messages.GetValues)
                else 0.0
            )
            try:
                outcome = self._outcome(message, waits_s + SLACK_S)
            except BaseException:
                # Close the connection: the reply may still arrive, and the next request
                # would take it for its own.
                self._sock.close()
                raise
        if isinstance(outcome, store_messages.NoValue):
            raise WorldTimeoutError(
                f"the store received no value before the deadline of {message}"
            )
        if isinstance(outcome, store_messages.Full):
            raise StoreUnreachableError(
                f"the store at {self._address} holds the maximum of {outcome.limit} "
                "characters of keys and values; delete some, or use another store",
                address=str(self._address),
            )
        if not isinstance(outcome.value, kind):
            raise self._unreachable(frames.FrameError(f"unexpected answer {outcome}"))
        return outcome.value

    def _outcome(
        self, message: ValueRequest, timeout_s: float
    ) -> store_messages.Result | store_messages.NoValue | store_messages.Full:
        try:
            self._sock.settimeout(timeout_s)
            answer = self._exchange(frames.encode(message))
            reply = frames.decode_body(answer, store_messages.replies)
        except (OSError, frames.FrameError) as error:
            raise self._unreachable(error) from error
        if isinstance(reply, store_messages.Reply) and isinstance(
            reply.outcome,
            store_messages.Result | store_messages.NoValue | store_messages.Full,
        ):
            return reply.outcome
        raise self._unreachable(frames.FrameError(f"unexpected answer {reply}"))

    def _exchange(self, frame: bytes) -> bytes:
        self._sock.sendall(frame)
        return self._read(frames.decode_length(self._read(4)))

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
