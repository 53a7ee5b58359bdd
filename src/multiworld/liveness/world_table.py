"""Incarnations that a manager takes part in, and where their messages go.

Messages and data connections may arrive before their incarnation is known here, or
after it has ended. The early ones wait for a while; the late ones are refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from multiworld.liveness.control_link import LinkKey
from multiworld.liveness.early_messages import EarlyMessages
from multiworld.liveness.failure_detector import Finding
from multiworld.liveness.manager_messages import WorldMessage
from multiworld.liveness.pending_lanes import PendingLanes
from multiworld.net.streams import Stream

RETIRED_LIMIT = 4096
"""Ended incarnations that are remembered, so that their data is refused."""


class WorldPort(Protocol):
    """The interface through which the watchdog talks to a world."""

    def on_message(self, rank: int, message: WorldMessage) -> None:
        """Handle a control message of a member."""

    def on_finding(self, rank: int, finding: Finding) -> None:
        """Handle a finding about a member's process."""


@dataclass(slots=True)
class Attached:
    """An incarnation of a world.

    Attributes:
        port: The world.
        links: The link to each other member, by rank.
    """

    port: WorldPort
    links: dict[int, LinkKey] = field(default_factory=dict)


class WorldTable:
    """The incarnations of one manager, by their nonces."""

    def __init__(self) -> None:
        self._attached: dict[int, Attached] = {}
        self._ranks: dict[LinkKey, dict[int, int]] = {}
        self._early = EarlyMessages[LinkKey, WorldMessage]()
        self._retired: deque[int] = deque(maxlen=RETIRED_LIMIT)
        self.lanes = PendingLanes()

    def open(self, nonce: int, port: WorldPort) -> None:
        """Add an incarnation, with no member connected yet."""
        self._attached[nonce] = Attached(port)

    def add(self, nonce: int, rank: int, key: LinkKey) -> None:
        """Note that a member of an incarnation is at the other end of a link.

        Args:
            nonce: The incarnation.
            rank: Rank of the member.
            key: The link.
        """
        if nonce in self._attached:
            self._attached[nonce].links[rank] = key
            self._ranks.setdefault(key, {})[nonce] = rank

    def remove(self, nonce: int) -> list[LinkKey]:
        """Remove an incarnation; return the links that it used."""
        attached = self._attached.pop(nonce, None)
        self.retire(nonce)
        keys = [] if attached is None else list(attached.links.values())
        for key in keys:
            self._ranks.get(key, {}).pop(nonce, None)
        return keys

    def retire(self, nonce: int) -> None:
        """Refuse data for an incarnation from now on; its messages still arrive."""
        if nonce not in self._retired:
            self._retired.append(nonce)
        self._early.drop(nonce)
        self.lanes.drop(nonce)

    def ranks(self, nonce: int) -> frozenset[int]:
        """Return the ranks of an incarnation that there is a link to."""
        attached = self._attached.get(nonce)
        return frozenset() if attached is None else frozenset(attached.links)

    def link_of(self, nonce: int, rank: int) -> LinkKey | None:
        """Return the link to a member of an incarnation, or None."""
        attached = self._attached.get(nonce)
        return None if attached is None else attached.links.get(rank)

    def uses(self, key: LinkKey) -> bool:
        """Return True if an incarnation needs a link."""
        return bool(self._ranks.get(key))

    def forget_link(self, key: LinkKey) -> None:
        """Forget a link that has ended; its incarnations are told by findings."""
        self._ranks.pop(key, None)

    # Messages and findings.

    def message(self, key: LinkKey, message: WorldMessage, now: float) -> None:
        """Deliver a message to its world, or keep it until that is known.

        Args:
            key: The link that it came by.
            message: The message.
            now: Current time, in seconds.
        """
        nonce = message.nonce
        rank = self._ranks.get(key, {}).get(nonce)
        if rank is not None and nonce in self._attached:
            self._attached[nonce].port.on_message(rank, message)
        elif nonce not in self._retired:
            values = msgspec.structs.astuple(message)
            texts = sum(len(value) for value in values if isinstance(value, str))
            self._early.keep(nonce, key, message, now, texts)

    def early(self, nonce: int, key: LinkKey) -> Iterator[WorldMessage]:
        """Take the messages that came by a link before its incarnation was known."""
        yield from self._early.take(nonce, key)

    def finding(self, finding: Finding, key: LinkKey) -> None:
        """Pass a finding about the peer of a link to the incarnation it names."""
        attached = self._attached.get(finding.world)
        if attached is None:
            return
        for rank, link in attached.links.items():
            if link == key:
                attached.port.on_finding(rank, finding)

    # Data connections.

    def lane_refusal(self, nonce: int) -> str | None:
        """Return why a data connection for an incarnation is unwanted, or None."""
        if nonce not in self._attached and self.lanes.is_full:
            return "too many pending connections for unknown epochs"
        if nonce in self._retired:
            return "that epoch of the world is over"
        return None

    def lane_arrived(self, nonce: int, rank: int, channel: str, sock: Stream) -> None:
        """Keep a data connection until its world takes it.

        Args:
            nonce: The incarnation.
            rank: Rank of the member that opened it.
            channel: Purpose of the connection.
            sock: The connection.
        """
        self.lanes.put((nonce, rank, channel), sock)

    def purge(self, now: float) -> None:
        """Drop what has waited too long for its incarnation."""
        self._early.purge(now)
        self.lanes.purge(self._attached, now)
