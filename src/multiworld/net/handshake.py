"""How every connection begins: hello, challenge, proof. Knows no sockets.

::

    dialer                                  acceptor
    hello (version, fresh value, purpose) ->
                                         <- challenge            (only with a secret)
    proof over hello and challenge ->
                                         <- ok, and the acceptor's own proof

Both sides are generators: they yield the frame to send and are sent the frame that
came back, so that streams, plain sockets and threads share them. The proofs are HMACs
over everything said so far with fresh random values from both sides: one that was
recorded proves nothing later. The acceptor proves itself last, so that a stranger gets
nothing from it that a secret could be guessed by.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from typing import Any

from multiworld.net import frames
from multiworld.net.security import Security

Message = dict[str, Any]

HELLO_BYTES = 16 * 1024
"""Most bytes of a frame before the other side has shown who it is."""

HELLO_S = 5.0
"""Seconds that a connection has for all of this."""

MAX_GREETING = 256
"""Most connections that may be saying hello at once; of more, the one that has taken
longest is hung up on, which is never one that speaks without delay."""


class HandshakeError(ConnectionRefusedError):
    """The other side is not one of ours, or does not want us.

    Attributes:
        kind: "version", "secret", "refused" or "malformed".
        theirs: The version that the other side speaks; 0 where it said none.
        answer: What to tell the other side, if anything.
    """

    def __init__(
        self, kind: str, why: str, *, theirs: int = 0, answer: Message | None = None
    ) -> None:
        self.kind, self.theirs, self.answer = kind, theirs, answer
        super().__init__(why)


def dialing(hello: Message, security: Security) -> Generator[Message, Message, Message]:
    """Yield what the dialer says; return the acceptor's last word.

    Raises:
        HandshakeError: It is not one of ours, or refused.
    """
    ours = frames.PROTOCOL_VERSION
    is_sealed = bool(security.secret)
    fresh = secrets.token_hex(16)
    greeting = {**hello, "multiworld": ours, "fresh": fresh, "sealed": is_sealed}
    answer = yield greeting
    theirs = answer.get("multiworld")
    if theirs != ours:
        number = theirs if isinstance(theirs, int) else 0
        raise HandshakeError("version", f"it speaks version {theirs}", theirs=number)
    if is_sealed and (answer.get("ok") or "challenge" in answer):
        challenge = answer.get("challenge")
        if not isinstance(challenge, str):
            raise HandshakeError("secret", "it asks for no secret, and we have one")
        proof = security.proof("dialer", greeting, challenge)
        answer = yield {"proof": proof}
        if answer.get("ok") and not security.is_proof(
            answer.get("proof"), "acceptor", greeting, challenge
        ):
            raise HandshakeError("secret", "it does not hold our secret")
    elif "challenge" in answer:
        raise HandshakeError("secret", "it asks for a secret, and we have none")
    if not answer.get("ok"):
        kind = "secret" if answer.get("kind") == "secret" else "refused"
        raise HandshakeError(kind, str(answer.get("error", "it gave no reason")))
    return answer


def accepting(
    greeting: Message, security: Security
) -> Generator[Message, Message, Message]:
    """Yield what the acceptor asks; return what belongs into its "ok".

    Args:
        greeting: The dialer's first frame.
        security: What it must show.

    Raises:
        HandshakeError: It is not one of ours.
    """
    ours = frames.PROTOCOL_VERSION
    theirs = greeting.get("multiworld")
    if theirs != ours:
        number = theirs if isinstance(theirs, int) else 0
        why = f"we speak protocol version {ours}, you {theirs}"
        raise _refused("version", why, number)
    if bool(greeting.get("sealed")) != bool(security.secret):
        if security.secret:
            raise _refused("secret", "a secret is asked for there, and none was shown")
        raise _refused("secret", "there is no secret there, and one was shown")
    if not security.secret:
        return {"multiworld": ours, "ok": True}
    challenge = secrets.token_hex(16)
    answer = yield {"multiworld": ours, "challenge": challenge}
    if not security.is_proof(answer.get("proof"), "dialer", greeting, challenge):
        raise _refused("secret", "the secret that was shown is another one")
    proof = security.proof("acceptor", greeting, challenge)
    return {"multiworld": ours, "ok": True, "proof": proof}


def refusal(why: str) -> Message:
    """Return the last word to one who is ours but not wanted."""
    return {"multiworld": frames.PROTOCOL_VERSION, "ok": False, "error": why}


def _refused(kind: str, why: str, theirs: int = 0) -> HandshakeError:
    answer = {**refusal(why), "kind": kind}
    return HandshakeError(kind, why, theirs=theirs, answer=answer)
