"""Messages between two managers: hellos of connections, and control messages. Pure."""

from __future__ import annotations

import msgspec

from multiworld.net.handshake_messages import Hello, Message


class LinkHello(Hello, frozen=True, tag_field="kind", tag="link"):
    """Opens a control link.

    Attributes:
        uid: Name of the dialing manager.
        to_uid: Name of the manager that it wants to reach.
        host: Address of the dialer's listener.
        to_host: Address of the other manager's listener.
        seal: Random value from which the key of the link's heartbeats is made.
    """

    uid: str
    to_uid: str
    host: str
    to_host: str
    seal: str


class HeartbeatHello(Hello, frozen=True, tag_field="kind", tag="beat"):
    """Opens the heartbeat connection that goes with a control link.

    Attributes:
        uid: As for ``LinkHello``.
        to_uid: As for ``LinkHello``.
        host: As for ``LinkHello``.
        to_host: As for ``LinkHello``.
        number: Number of the heartbeat connection within the link, from 1.
    """

    uid: str
    to_uid: str
    host: str
    to_host: str
    number: int


class ProbeHello(Hello, frozen=True, tag_field="kind", tag="probe"):
    """Asks whether a manager is there; the connection is closed at once."""

    to_uid: str


class LaneHello(Hello, frozen=True, tag_field="kind", tag="lane"):
    """Opens a data connection.

    Attributes:
        nonce: The incarnation.
        rank: Rank of the dialing member.
        channel: Purpose of the connection.
    """

    nonce: int
    rank: int
    channel: str


ManagerHello = LinkHello | HeartbeatHello | ProbeHello | LaneHello


# About the link itself.


class Bye(Message, frozen=True):
    """The end of the link that follows is intended."""


class DatagramsAt(Message, frozen=True):
    """The UDP port on which the sender takes heartbeats.

    Attributes:
        port: The port.
        number: Number of the heartbeat connection that it goes with.
    """

    port: int
    number: int


# About an incarnation.


class AboutWorld(Message, frozen=True):
    """A message of one member of an incarnation to another; ``nonce`` names it."""

    nonce: int


class Ready(AboutWorld, frozen=True):
    """The member is connected to every other member."""


class Left(AboutWorld, frozen=True):
    """The member has left; ``is_broken`` if its world was broken."""

    is_broken: bool


class Broken(AboutWorld, frozen=True):
    """The member's world is broken.

    Attributes:
        rank: The member that was lost; None if no member is to blame.
        reason: What happened, in words.
        evidence: The observation.
        silent_s: Seconds of silence before that.
    """

    rank: int | None
    reason: str
    evidence: str
    silent_s: float


class OpenLane(AboutWorld, frozen=True):
    """Asks the member that dials to open the lane for collectives."""


class EndCollectives(AboutWorld, frozen=True):
    """Collective ``number`` and all later ones fail, as member ``left`` has left."""

    number: int
    left: int


BackendMessage = OpenLane | EndCollectives
WorldMessage = Ready | Left | Broken | BackendMessage
ControlMessage = Bye | DatagramsAt | WorldMessage

control_messages: msgspec.json.Decoder[ControlMessage]
control_messages = msgspec.json.Decoder(ControlMessage)
"""Decoder of what arrives on a control link."""
