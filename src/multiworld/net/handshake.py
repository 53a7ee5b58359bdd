"""The handshake that begins every connection: hello, challenge, proof. Shell.

::

    dialer                                  acceptor
    hello (version, fresh value, purpose) ->
                                         <- challenge            (only with a secret)
    proof over hello and challenge ->
                                         <- ok, and the acceptor's own proof

Each side is a generator: it yields the frame to send and receives the frame that came
back. It does no I/O itself (it draws random numbers), so that streams, plain sockets
and threads can share it.

The proofs are HMACs (SHA-256) over the hello and the challenge. Both contain fresh
random values, so a recorded proof is worthless later. The acceptor proves itself last,
so that a stranger gets nothing from it to test guesses of the secret against.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from typing import Any

from multiworld.net import frames
from multiworld.net.security import Security

Message = dict[str, Any]

HELLO_BYTES = 16 * 1024
"""Bytes in a handshake frame, at most: the other side is not authenticated yet."""

HELLO_S = 5.0
"""Seconds that a handshake may take."""

MAX_GREETING = 256
"""Handshakes in progress at once, at most. One more closes the oldest, which is never
a connection that answers without delay."""


class HandshakeError(ConnectionRefusedError):
    """The handshake failed: wrong protocol, wrong secret, or refused.

    Attributes:
        kind: "version", "secret", "tls", "refused" or "malformed".
        theirs: Protocol version of the other side; 0 if it sent none.
        answer: Frame to send to the other side, if any.
    """

    def __init__(
        self, kind: str, why: str, *, theirs: int = 0, answer: Message | None = None
    ) -> None:
        self.kind, self.theirs, self.answer = kind, theirs, answer
        super().__init__(why)


def dialing(hello: Message, security: Security) -> Generator[Message, Message, Message]:
    """Yield the dialer's frames; return the acceptor's last frame.

    Args:
        hello: Purpose of the connection, as the acceptor expects it.
        security: The secret to prove, and to demand proof of.

    Raises:
        HandshakeError: The acceptor speaks another version, does not prove that it
            holds the secret, or refused the connection.
    """
    ours = frames.PROTOCOL_VERSION
    is_sealed = bool(security.secret)
    fresh = secrets.token_hex(16)
    greeting = {**hello, "multiworld": ours, "fresh": fresh, "sealed": is_sealed}
    answer = yield greeting
    theirs = answer.get("multiworld")
    if theirs != ours:
        number = theirs if isinstance(theirs, int) else 0
        raise HandshakeError(
            "version", f"the peer speaks protocol version {theirs}", theirs=number
        )
    if is_sealed and (answer.get("ok") or "challenge" in answer):
        challenge = answer.get("challenge")
        if not isinstance(challenge, str):
            raise HandshakeError(
                "secret", "the peer asks for no secret, but this process has one"
            )
        proof = security.proof("dialer", greeting, challenge)
        answer = yield {"proof": proof}
        if answer.get("ok") and not security.is_proof(
            answer.get("proof"), "acceptor", greeting, challenge
        ):
            raise HandshakeError("secret", "the peer does not hold our secret")
    elif "challenge" in answer:
        raise HandshakeError(
            "secret", "the peer asks for a secret, but this process has none"
        )
    if not answer.get("ok"):
        kind = "secret" if answer.get("kind") == "secret" else "refused"
        raise HandshakeError(kind, str(answer.get("error", "the peer gave no reason")))
    return answer


def accepting(
    greeting: Message, security: Security
) -> Generator[Message, Message, Message]:
    """Yield the acceptor's frames; return its last one, which says "ok".

    The caller sends the returned frame once it has decided to keep the connection.

    Args:
        greeting: The dialer's first frame.
        security: The secret that the dialer must prove.

    Raises:
        HandshakeError: The dialer speaks another version, or does not prove that it
            holds the secret.
    """
    ours = frames.PROTOCOL_VERSION
    theirs = greeting.get("multiworld")
    if theirs != ours:
        number = theirs if isinstance(theirs, int) else 0
        why = f"the acceptor speaks protocol version {ours}, the dialer {theirs}"
        raise _refused("version", why, number)
    if bool(greeting.get("sealed")) != bool(security.secret):
        if security.secret:
            raise _refused("secret", "the acceptor has a secret, the dialer has none")
        raise _refused("secret", "the dialer has a secret, the acceptor has none")
    if not security.secret:
        return {"multiworld": ours, "ok": True}
    challenge = secrets.token_hex(16)
    answer = yield {"multiworld": ours, "challenge": challenge}
    if not security.is_proof(answer.get("proof"), "dialer", greeting, challenge):
        raise _refused("secret", "the dialer holds another secret than the acceptor")
    proof = security.proof("acceptor", greeting, challenge)
    return {"multiworld": ours, "ok": True, "proof": proof}


def refusal(why: str) -> Message:
    """Return the last frame for an authenticated peer whose connection is unwanted."""
    return {"multiworld": frames.PROTOCOL_VERSION, "ok": False, "error": why}


def _refused(kind: str, why: str, theirs: int = 0) -> HandshakeError:
    answer = {**refusal(why), "kind": kind}
    return HandshakeError(kind, why, theirs=theirs, answer=answer)
