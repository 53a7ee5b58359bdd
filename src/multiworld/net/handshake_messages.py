"""Base of all control messages, and the messages of the handshake. Pure.

Messages are encoded in one place, ``frames``.
"""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag_field="op", tag=True):
    """One message; the name of its type is its tag."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The dialer's first message; subclasses add the purpose of the connection.

    Attributes:
        multiworld: Version of the protocol.
        fresh: Random value of the dialer.
        sealed: Whether the dialer has a secret.
    """

    multiworld: int = 0
    fresh: str = ""
    sealed: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the acceptor.

    Attributes:
        multiworld: Version of the protocol; 0 if it sent none.
        ok: True in the last message to a dialer that is accepted.
        challenge: Random value that the dialer must prove its secret over; or empty.
        proof: The acceptor's own proof; empty without a secret.
        error: Reason for a refusal.
        kind: Kind of the refusal, as in ``HandshakeError``; empty if it needs none.
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
