"""Control links: JSON messages between two managers. Shell.

A ``SocketLink`` joins two processes (or two managers of one process) over a socket; a
``LocalLink`` joins two managers of one process without one, for the ``memory`` backend.
Both report the end exactly once. ``say_bye`` before ``close`` makes the end a polite
one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from multiworld.net.framed_connection import ENDED, FramedConnection
from multiworld.net.streams import Stream

Message = dict[str, Any]

BYE: Message = {"op": "bye"}


@dataclass(frozen=True, slots=True)
class LinkKey:
    """One link for each peer manager and pair of addresses."""

    peer: str
    local_host: str
    remote_host: str


class LinkOwner(Protocol):
    """Who hears of a link."""

    def link_message(self, link: Link, message: Message) -> None:
        """A message arrived."""

    def link_ended(self, link: Link, reason: str, evidence: str) -> None:
        """The link is over. Called once, never from ``close``."""


class Link(Protocol):
    """A control connection to one peer manager."""

    key: LinkKey

    def send(self, message: Message) -> None:
        """Queue a message; never waits, never fails."""

    def say_bye(self) -> None:
        """Tell the peer that the end which follows is meant."""

    def close(self) -> None:
        """Hang up without a word to our owner; safe to repeat."""

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""


class SocketLink:
    """A link over a connected, non-blocking socket."""

    def __init__(self, key: LinkKey, stream: Stream, owner: LinkOwner) -> None:
        self.key = key
        self._owner = owner
        self._said_bye = False
        self._framed = FramedConnection(stream, self._received, self._ended)

    def send(self, message: Message) -> None:
        """Queue a message and send what the socket takes at once."""
        self._framed.send(message)

    def say_bye(self) -> None:
        """Tell the peer that the end which follows is meant."""
        self.send(BYE)

    def close(self) -> None:
        """Hang up."""
        self._framed.close()

    def filenos(self) -> list[int]:
        """Return the descriptor that a forked child must close."""
        fd = self._framed.fileno()
        return [] if fd < 0 else [fd]

    def _received(self, message: Message) -> None:
        if message.get("op") == "bye":
            self._said_bye = True
        else:
            self._owner.link_message(self, message)

    def _ended(self, evidence: str, is_broken: bool) -> None:
        reason = "its process ended"
        if is_broken:
            reason = "it broke the protocol on its control link"
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
        """Return two connected ends."""
        one, other = LocalLink(key, owner), LocalLink(other_key, other_owner)
        one._other, other._other = other, one
        return one, other

    def send(self, message: Message) -> None:
        """Hand ``message`` over on the next turn of the loop."""
        if self._other is not None:
            self._call_soon(self._other._receive, message)

    def _receive(self, message: Message) -> None:
        if self._other is not None:
            self._owner.link_message(self, message)

    def say_bye(self) -> None:
        """Tell the peer that the end which follows is meant."""
        if self._other is not None:
            self._other._said_bye = True

    def close(self) -> None:
        """Hang up."""
        other, self._other = self._other, None
        if other is not None:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                self._call_soon(other._ended)

    def filenos(self) -> list[int]:
        """Return nothing: there is no descriptor."""
        return []

    def _ended(self) -> None:
        if self._other is None:
            return
        self._other = None
        reason = "it closed its manager" if self._said_bye else "its manager ended"
        self._owner.link_ended(self, reason, "the link inside this process closed")
