"""Control links: messages between two managers, over a socket or (``memory``) inside
one process. After ``say_bye``, the peer does not treat the link's end as a loss."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from multiworld.liveness.manager_messages import Bye, ControlMessage, control_messages
from multiworld.net.framed_connection import ENDED, FramedConnection
from multiworld.net.streams import Stream


@dataclass(frozen=True, slots=True)
class LinkKey:
    """Identity of a link: the peer manager's uid and both listeners' addresses."""

    peer: str
    local_host: str
    remote_host: str


class LinkOwner(Protocol):
    """Receiver of a link's messages and of its end."""

    def link_message(self, link: Link, message: ControlMessage) -> None:
        """Handle a message that arrived."""

    def link_ended(self, link: Link, reason: str, evidence: str) -> None:
        """Handle the end of the link; ``reason`` says what happened to the peer."""


class Link(Protocol):
    """A control connection to one peer manager."""

    key: LinkKey

    def send(self, message: ControlMessage) -> None:
        """Queue a message; never wait and never fail."""

    def say_bye(self) -> None:
        """Announce that the following end of the link is intended."""

    def close(self) -> None:
        """Close the link without calling ``link_ended``; safe to repeat."""


class SocketLink(FramedConnection[ControlMessage]):
    def __init__(self, key: LinkKey, stream: Stream, owner: LinkOwner) -> None:
        self.key = key
        self._owner = owner
        self._said_bye = False
        super().__init__(stream, control_messages, self._received, self._ended)

    def say_bye(self) -> None:
        self.send(Bye())

    def _received(self, message: ControlMessage) -> None:
        if isinstance(message, Bye):
            self._said_bye = True
        else:
            self._owner.link_message(self, message)

    def _ended(self, evidence: str, is_broken: bool) -> None:
        reason = "its process ended"
        if is_broken:
            reason = "it violated the protocol on its control link"
        elif self._said_bye:
            reason = "it closed its manager"
            evidence = "it announced this on its control link"
        elif evidence != ENDED:
            reason = "its process ended or reset the connection"
        self._owner.link_ended(self, reason, evidence)


class LocalLink:
    def __init__(self, key: LinkKey, owner: LinkOwner) -> None:
        self.key = key
        self._owner = owner
        self._other: LocalLink | None = None
        self._call_soon: Callable[..., Any] = asyncio.get_running_loop().call_soon
        self._said_bye = False

    @staticmethod
    def pair(
        key: LinkKey, owner: LinkOwner, other_key: LinkKey, other_owner: LinkOwner
    ) -> tuple[LocalLink, LocalLink]:
        """Return the two connected ends of a new link."""
        one, other = LocalLink(key, owner), LocalLink(other_key, other_owner)
        one._other, other._other = other, one
        return one, other

    def send(self, message: ControlMessage) -> None:
        if self._other is not None:
            self._call_soon(self._other._receive, message)

    def _receive(self, message: ControlMessage) -> None:
        if self._other is not None:
            self._owner.link_message(self, message)

    def say_bye(self) -> None:
        if self._other is not None:
            self._other._said_bye = True

    def close(self) -> None:
        other, self._other = self._other, None
        if other is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                self._call_soon(other._ended)

    def _ended(self) -> None:
        if self._other is None:
            return
        self._other = None
        reason = "it closed its manager" if self._said_bye else "its manager ended"
        self._owner.link_ended(self, reason, "the link inside this process closed")
