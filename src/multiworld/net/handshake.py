"""The handshake that starts every connection: hello, challenge, proof.

::

    dialer                                  acceptor
    hello (version, fresh value, purpose) ->
                                         <- challenge            (only with a secret)
    proof over hello and challenge ->
                                         <- ok, and the acceptor's own proof

Each side is a generator without I/O: it yields messages and receives replies. The
proofs are HMACs (SHA-256) over the hello and the challenge, which contain fresh random
values. The acceptor proves itself last: an untrusted peer receives nothing against
which it could test guesses of the secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from typing import Any

import msgspec

from multiworld.net import frames
from multiworld.net.frames import FrameError
from multiworld.net.handshake_messages import Answer, Hello, Proof
from multiworld.net.security import Security

HELLO_BYTES = 16 * 1024  # maximum bytes of a frame before the peer is authenticated
HELLO_S = 5.0  # maximum seconds of a handshake
# Maximum number of handshakes in progress. A further one closes the oldest one, so that
# peers that answer quickly are not affected.
MAX_GREETING = 256


class _Version(msgspec.Struct, frozen=True):
    """The part of a hello that every version has."""

    multiworld: int = 0


_answers = msgspec.json.Decoder(Answer)
_proofs = msgspec.json.Decoder(Proof)
_versions = msgspec.json.Decoder(_Version)


class HandshakeError(ConnectionRefusedError):
    """The handshake failed: wrong protocol, wrong secret, or refused."""

    def __init__(
        self, kind: str, why: str, *, theirs: int = 0, answer: Answer | None = None
    ) -> None:
        # ``kind``: "version", "secret", "tls", "refused" or "malformed". ``theirs``:
        # the peer's version, or 0. ``answer``: a message for the peer, or None.
        self.kind, self.theirs, self.answer = kind, theirs, answer
        super().__init__(why)


def dialing(hello: Hello, security: Security) -> Generator[bytes, bytes, None]:
    """Yield the dialer's frames; receive the bodies of the acceptor's."""
    ours = frames.PROTOCOL_VERSION
    is_sealed = bool(security.secret)
    greeting = msgspec.structs.replace(
        hello, multiworld=ours, fresh=secrets.token_hex(16), sealed=is_sealed
    )
    body = yield frames.encode(greeting)
    try:
        answer = frames.decode_body(body, _answers)
    except FrameError:  # a peer of another protocol version may answer in another form
        version = frames.decode_body(body, _versions)
        if version.multiworld in (0, ours):
            raise
        answer = Answer(multiworld=version.multiworld)
    if answer.multiworld != ours:
        raise HandshakeError(
            "version",
            f"the peer speaks protocol version {answer.multiworld or 'unknown'}",
            theirs=answer.multiworld,
        )
    if is_sealed and (answer.ok or answer.challenge):
        challenge = answer.challenge
        if not challenge:
            raise HandshakeError(
                "secret", "the peer asks for no secret, but this process has one"
            )
        proof = Proof(security.proof("dialer", _values(greeting), challenge))
        answer = frames.decode_body((yield frames.encode(proof)), _answers)
        if answer.ok and not security.is_proof(
            answer.proof, "acceptor", _values(greeting), challenge
        ):
            raise HandshakeError("secret", "the peer does not hold our secret")
    elif answer.challenge:
        raise HandshakeError(
            "secret", "the peer asks for a secret, but this process has none"
        )
    if not answer.ok:
        kind = "secret" if answer.kind == "secret" else "refused"
        raise HandshakeError(kind, answer.error)


def accepting(greeting: Hello, security: Security) -> Generator[bytes, bytes, Answer]:
    """Yield the acceptor's frames; return its "ok", for the caller to send."""
    ours = frames.PROTOCOL_VERSION
    if greeting.multiworld != ours:
        raise _other_version(greeting.multiworld)
    if greeting.sealed != bool(security.secret):
        if security.secret:
            raise _refused("secret", "the acceptor has a secret, the dialer has none")
        raise _refused("secret", "the dialer has a secret, the acceptor has none")
    if not security.secret:
        return Answer(multiworld=ours, ok=True)
    challenge = secrets.token_hex(16)
    asked = frames.encode(Answer(multiworld=ours, challenge=challenge))
    answer = frames.decode_body((yield asked), _proofs)
    values = _values(greeting)
    if not security.is_proof(answer.proof, "dialer", values, challenge):
        raise _refused("secret", "the dialer and the acceptor hold different secrets")
    proof = security.proof("acceptor", values, challenge)
    return Answer(multiworld=ours, ok=True, proof=proof)


def decode_hello(body: bytes, decoder: msgspec.json.Decoder[Hello]) -> Hello:
    """Return a first frame's hello; ``HandshakeError`` if its version differs."""
    try:
        return frames.decode_body(body, decoder)
    except FrameError:
        theirs = frames.decode_body(body, _versions).multiworld
        if theirs != frames.PROTOCOL_VERSION:
            raise _other_version(theirs) from None
        raise


def refusal(why: str, kind: str = "") -> Answer:
    """Return the last message to a peer whose connection is refused."""
    ours = frames.PROTOCOL_VERSION
    return Answer(multiworld=ours, error=why, kind=kind)


def _values(greeting: Hello) -> Any:
    return msgspec.to_builtins(greeting)


def _other_version(theirs: int) -> HandshakeError:
    ours = frames.PROTOCOL_VERSION
    why = f"the acceptor speaks protocol version {ours}, the dialer {theirs}"
    return _refused("version", why, theirs)


def _refused(kind: str, why: str, theirs: int = 0) -> HandshakeError:
    return HandshakeError(kind, why, theirs=theirs, answer=refusal(why, kind))
