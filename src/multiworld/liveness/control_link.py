"""Control links: messages between two managers.

A ``SocketLink`` connects two processes (or two managers of one process) over a socket.
A ``LocalLink`` connects two managers of one process without a socket, for the
``memory`` backend. Both report the end exactly once. With ``say_bye`` before ``close``,
the peer sees an intended end instead of a lost process.
"""

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
    """Identity of a link: there is one for each peer manager and pair of addresses.

    Attributes:
        peer: Name (``uid``) of the peer manager.
        local_host: Address of this side's listener.
        remote_host: Address of the peer's listener.
    """

    peer: str
    local_host: str
    remote_host: str


class LinkOwner(Protocol):
    """Receiver of a link's messages and of its end."""

    def link_message(self, link: Link, message: ControlMessage) -> None:
        """Handle a message that arrived."""

    def link_ended(self, link: Link, reason: str, evidence: str) -> None:
        """Handle the end of the link. Called once, never from ``close``.

        Args:
            link: The link.
            reason: What happened to the peer, in words.
            evidence: The observation.
        """


class Link(Protocol):
    """A control connection to one peer manager."""

    key: LinkKey

    def send(self, message: ControlMessage) -> None:
        """Queue a message; never wait and never fail."""

    def say_bye(self) -> None:
        """Tell the peer that the end which follows is intended."""

    def close(self) -> None:
        """Close the link without calling the owner; safe to repeat."""

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""


class SocketLink:
    """A link over a connected, non-blocking socket."""

    def __init__(self, key: LinkKey, stream: Stream, owner: LinkOwner) -> None:
        self.key = key
        self._owner = owner
        self._said_bye = False
        self._framed = FramedConnection(
            stream, control_messages, self._received, self._ended
        )

    def send(self, message: ControlMessage) -> None:
        """Queue a message and write as much as the socket takes without waiting."""
        self._framed.send(message)

    def say_bye(self) -> None:
        """Tell the peer that the end which follows is intended."""
        self.send(Bye())

    def close(self) -> None:
        """Close the link; safe to repeat."""
        self._framed.close()

    def filenos(self) -> list[int]:
        """Return the descriptor that a forked child must close."""
        fd = self._framed.fileno()
        return [] if fd < 0 else [fd]

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
            reason, evidence = "it closed its manager", "it said so on its control link"
        elif evidence != ENDED:
            reason = "its process ended or reset the connection"
        self._owner.link_ended(self, reason, evidence)


class LocalLink:
    """One end of a link inside a process."""

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
        """Return the two connected ends of a new link.

        Args:
            key: Identity of the first end.
            owner: Owner of the first end.
            other_key: Identity of the second end.
            other_owner: Owner of the second end.
        """
        one, other = LocalLink(key, owner), LocalLink(other_key, other_owner)
        one._other, other._other = other, one
        return one, other

    def send(self, message: ControlMessage) -> None:
        """Deliver ``message`` in the next iteration of the event loop."""
        if self._other is not None:
            self._call_soon(self._other._receive, message)

    def _receive(self, message: ControlMessage) -> None:
        if self._other is not None:
            self._owner.link_message(self, message)

    def say_bye(self) -> None:
        """Tell the peer that the end which follows is intended."""
        if self._other is not None:
            self._other._said_bye = True

    def close(self) -> None:
        """Close the link; safe to repeat."""
        other, self._other = self._other, None
        if other is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                self._call_soon(other._ended)

    def filenos(self) -> list[int]:
        """Return an empty list: the link has no descriptor."""
        return []

    def _ended(self) -> None:
        if self._other is None:
            return
        self._other = None
        reason = "it closed its manager" if self._said_bye else "its manager ended"
        self._owner.link_ended(self, reason, "the link inside this process closed")
