"""Messages between two managers: hellos of connections, and control messages. Pure."""

from __future__ import annotations

import msgspec

from multiworld.net.handshake_messages import Hello, Message


class LinkHello(Hello, frozen=True, tag_field="kind", tag="link"):
    """Opens a control link; the key of its heartbeats is derived from ``seal``."""

    uid: str
    to_uid: str
    host: str
    to_host: str
    seal: str


class HeartbeatHello(Hello, frozen=True, tag_field="kind", tag="beat"):
    """Opens heartbeat connection ``number`` (from 1) of a control link."""

    uid: str
    to_uid: str
    host: str
    to_host: str
    number: int


class ProbeHello(Hello, frozen=True, tag_field="kind", tag="probe"):
    """Asks whether a manager is alive; the connection is closed at once."""

    to_uid: str


class LaneHello(Hello, frozen=True, tag_field="kind", tag="lane"):
    """Opens a data connection; ``rank`` is the dialing member's."""

    to_uid: str
    nonce: int
    rank: int
    channel: str


ManagerHello = LinkHello | HeartbeatHello | ProbeHello | LaneHello


# About the link itself.


class Bye(Message, frozen=True, tag="Bye"):
    """Announces that the following end of the link is intended."""


class DatagramsAt(Message, frozen=True, tag="DatagramsAt"):
    """The sender's UDP port that belongs to heartbeat connection ``number``."""

    port: int
    number: int


# About an incarnation.


class AboutWorld(Message, frozen=True, tag="AboutWorld"):
    """A message between two members of the incarnation ``nonce``."""

    nonce: int


class Ready(AboutWorld, frozen=True, tag="Ready"):
    """The sender is connected to every other member."""


class Left(AboutWorld, frozen=True, tag="Left"):
    """The sender has left; ``is_broken`` if its world was broken."""

    is_broken: bool


class Broken(AboutWorld, frozen=True, tag="Broken"):
    """The sender's world is broken; ``rank`` is the lost member, if one is known."""

    rank: int | None
    reason: str
    evidence: str
    silent_s: float
    has_ended: bool = False  # True: the connection ended; False: ``rank`` was silent


class OpenLane(AboutWorld, frozen=True, tag="OpenLane"):
    """Asks the member that dials to open the lane for collectives."""


class EndCollectives(AboutWorld, frozen=True, tag="EndCollectives"):
    """Collective ``number`` and later ones fail, because member ``left`` has left."""

    number: int
    left: int


BackendMessage = OpenLane | EndCollectives
WorldMessage = Ready | Left | Broken | BackendMessage
ControlMessage = Bye | DatagramsAt | WorldMessage

control_messages: msgspec.json.Decoder[ControlMessage]
control_messages = msgspec.json.Decoder(ControlMessage)
