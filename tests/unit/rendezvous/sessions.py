"""An owner of sessions, and stores that misbehave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any

from multiworld.rendezvous.membership import Address, Member
from multiworld.rendezvous.store_address import StoreAddresses, parse_store

Message = dict[str, Any]


class Owner:
    """Owner of a session that holds what the test says, and keeps its notices."""

    def __init__(self, *held: tuple[str, int, int]) -> None:
        self.held = list(held)
        self.notes: list[Message] = []

    def holds(self, world: str, epoch: int, rank: int) -> bool:
        return (world, epoch, rank) in self.held

    def holdings(self, where: StoreAddresses) -> list[Message]:
        return [
            {"world": world, "epoch": epoch, "rank": rank, "uid": "me"}
            for world, epoch, rank in self.held
        ]

    def member_waits(self, note: Message) -> None:
        self.notes.append(note)

    def member_gave_up(self, note: Message) -> None:
        self.notes.append(note)


def member_of(rank: int, uid: str = "") -> Member:
    """Return the record of a member that can be reached in its process only."""
    address = Address(host="", port=0, unix="", boot="b", netns="n")
    return Member(rank=rank, uid=uid or f"m{rank}", pid=1, address=address)


class Impostor:
    """A server at a store's address that does with each connection what it is told."""

    def __init__(self, act: Callable[[socket.socket], None]) -> None:
        self._act = act
        self.accepted: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self.port = self._listening.getsockname()[1]
        self.address = parse_store(f"tcp://127.0.0.1:{self.port}")

    async def __aenter__(self) -> Impostor:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listening.fileno(), self._accept)
        return self

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        self.accepted.append(sock)
        self._act(sock)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._listening.fileno())
        for sock in (self._listening, *self.accepted):
            sock.close()


def is_silent(sock: socket.socket) -> None:
    """Keep a connection and say nothing, as a stopped process does."""


def hangs_up(sock: socket.socket) -> None:
    """Close a connection at once."""
    sock.close()


def says(data: bytes) -> Callable[[socket.socket], None]:
    """Return an action that sends these bytes, whatever it was asked."""
    return lambda sock: sock.sendall(data)
