"""Base of all control messages, and the messages of the handshake. Pure.

``frames`` encodes every message.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag_field="op", tag=True):
    """Base of control messages; a message's type name is its tag."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The dialer's first message; subclasses add the purpose of the connection.
    ``fresh`` is a random value; ``sealed`` is True if the dialer has a secret."""

    multiworld: int = 0
    fresh: str = ""
    sealed: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the acceptor.

    Attributes:
        multiworld: Version of the protocol; 0 if the peer sent none.
        ok: True in the last message to an accepted dialer.
        challenge: Random value that the dialer's proof must cover; or empty.
        proof: The acceptor's own proof; empty without a secret.
        kind: Kind of the refusal, as in ``HandshakeError``; or empty.
    """

    multiworld: int = 0
    ok: bool = False
    challenge: str = ""
    proof: str = ""
    error: str = "the peer gave no reason"
    kind: str = ""


class Proof(msgspec.Struct, frozen=True):
    """The dialer's answer to a challenge."""

    proof: str = ""
