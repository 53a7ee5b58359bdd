"""Base of all control messages, and the messages of the handshake. Pure."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, tag_field="op", tag=True):
    """Base of control messages; a message's type name is its tag."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The dialer's first message; subclasses add the purpose of the connection."""

    multiworld: int = 0
    fresh: str = ""  # random value that the acceptor's proof must cover
    sealed: bool = False  # True if the dialer has a secret


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message of the acceptor."""

    multiworld: int = 0  # version of the protocol; 0 if the peer sent none
    ok: bool = False  # True only in the last message to a dialer that is accepted
    challenge: str = ""  # random value that the dialer's proof must cover
    proof: str = ""  # the acceptor's proof; empty without a secret
    error: str = "the peer gave no reason"
    kind: str = ""  # kind of the refusal, as in ``HandshakeError``


class Proof(msgspec.Struct, frozen=True):
    """The dialer's answer to a challenge."""

    proof: str = ""
