"""Incarnations that a manager takes part in, and the routing of their messages.
Messages for an unknown incarnation wait; messages for an ended one are refused."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from multiworld.liveness.control_link import LinkKey
from multiworld.liveness.failure_detector import Finding
from multiworld.liveness.manager_messages import WorldMessage
from multiworld.liveness.pending_lanes import PendingLanes

# Maximum number of ended incarnations to remember, so that their data is refused.
RETIRED_LIMIT = 4096

# Maximum pending lanes of an incarnation: for each linked member, and together for all
# members without a known link. A member opens two or three lanes.
MEMBER_LANES, SPARE_LANES = 8, 1024

# Approximate maximum bytes of early messages of one link, so that a misbehaving peer
# takes no space from the others.
LIMIT_BYTES = 1024 * 1024
MESSAGE_BYTES = 256  # approximate bytes of a message, without its strings
KEPT_S = 60.0  # seconds that early messages are kept


class WorldPort(Protocol):
    """The methods of a world that the watchdog calls."""

    def on_message(self, rank: int, message: WorldMessage) -> None:
        """Handle a control message of a member."""

    def on_finding(self, rank: int, finding: Finding) -> None:
        """Handle a finding about a member's process."""


@dataclass(slots=True)
class Attached:
    """An incarnation of a world, with the link to each other member by rank."""

    port: WorldPort
    links: dict[int, LinkKey] = field(default_factory=dict)


@dataclass(slots=True)
class _Box:
    since: float
    messages: list[tuple[LinkKey, WorldMessage, int]] = field(default_factory=list)


class EarlyMessages:
    """Messages about incarnations that this process does not know yet. Members learn of
    a new incarnation one after the other."""

    def __init__(self) -> None:
        self._boxes: dict[int, _Box] = {}
        self._kept: Counter[LinkKey] = Counter()

    def keep(self, key: LinkKey, message: WorldMessage, now: float) -> None:
        """Keep a message, unless too many bytes from its link are kept already."""
        values = msgspec.structs.astuple(message)
        texts = sum(len(value) for value in values if isinstance(value, str))
        cost = MESSAGE_BYTES + texts
        if self._kept[key] + cost <= LIMIT_BYTES:
            box = self._boxes.setdefault(message.nonce, _Box(now))
            box.messages.append((key, message, cost))
            self._kept[key] += cost

    def take(self, nonce: int, key: LinkKey) -> list[WorldMessage]:
        """Remove and return the messages of one incarnation and link, in order."""
        box = self._boxes.get(nonce)
        if box is None:
            return []
        due = [entry for entry in box.messages if entry[0] == key]
        box.messages = [entry for entry in box.messages if entry[0] != key]
        self._forget(due)
        return [message for _, message, _ in due]

    def drop(self, nonce: int) -> None:
        box = self._boxes.pop(nonce, None)
        if box is not None:
            self._forget(box.messages)

    def _forget(self, entries: list[tuple[LinkKey, WorldMessage, int]]) -> None:
        for key, _, cost in entries:
            self._kept[key] -= cost
            if not self._kept[key]:
                del self._kept[key]

    def purge(self, now: float) -> None:
        """Drop the messages of incarnations first heard of over ``KEPT_S`` ago."""
        for nonce, box in list(self._boxes.items()):
            if now - box.since > KEPT_S:
                self.drop(nonce)


class WorldTable:
    def __init__(self) -> None:
        self._attached: dict[int, Attached] = {}
        self._ranks: dict[LinkKey, dict[int, int]] = {}
        self.early = EarlyMessages()
        self._retired: deque[int] = deque(maxlen=RETIRED_LIMIT)
        self.lanes = PendingLanes()

    def open(self, nonce: int, port: WorldPort) -> None:
        self._attached[nonce] = Attached(port)

    def add(self, nonce: int, rank: int, key: LinkKey) -> None:
        """Record that a member of an incarnation is at the other end of a link."""
        if nonce in self._attached:
            self._attached[nonce].links[rank] = key
            self._ranks.setdefault(key, {})[nonce] = rank

    def remove(self, nonce: int) -> list[LinkKey]:
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
        self.early.drop(nonce)
        self.lanes.drop(nonce)

    def ranks(self, nonce: int) -> frozenset[int]:
        """Return the ranks of an incarnation that have a link."""
        attached = self._attached.get(nonce)
        return frozenset() if attached is None else frozenset(attached.links)

    def link_of(self, nonce: int, rank: int) -> LinkKey | None:
        attached = self._attached.get(nonce)
        return None if attached is None else attached.links.get(rank)

    def uses(self, key: LinkKey) -> bool:
        return bool(self._ranks.get(key))

    def forget_link(self, key: LinkKey) -> None:
        """Forget an ended link; findings notify its incarnations."""
        self._ranks.pop(key, None)

    # Messages and findings.

    def message(self, key: LinkKey, message: WorldMessage, now: float) -> None:
        """Deliver a message to its world, or keep it until the world is known."""
        nonce = message.nonce
        rank = self._ranks.get(key, {}).get(nonce)
        if rank is not None and nonce in self._attached:
            self._attached[nonce].port.on_message(rank, message)
        elif nonce not in self._retired:
            self.early.keep(key, message, now)

    def finding(self, finding: Finding, key: LinkKey) -> None:
        """Pass a finding about a link's peer to the incarnation that is named in it."""
        attached = self._attached.get(finding.world)
        if attached is None:
            return
        for rank, link in attached.links.items():
            if link == key:
                attached.port.on_finding(rank, finding)

    # Data connections.

    def lane_refusal(self, nonce: int, rank: int) -> str | None:
        if nonce not in self._attached and self.lanes.is_full:
            return "too many pending connections for unknown epochs"
        if nonce in self._retired:
            return "that epoch of the world has ended"
        if (attached := self._attached.get(nonce)) is not None:
            most = SPARE_LANES + MEMBER_LANES * len(attached.links)
            if self.lanes.count_of(nonce, rank) >= MEMBER_LANES:
                return "too many pending connections of that member"
            if self.lanes.count(nonce) >= most:
                return "too many pending connections for that epoch"
        return None

    def purge(self, now: float) -> None:
        self.early.purge(now)
        self.lanes.purge(self._attached, now)
