"""An owner of sessions, and stores that misbehave."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from multiworld.net import frames
from multiworld.net.handshake_messages import Answer
from multiworld.rendezvous.membership import Address, Member
from multiworld.rendezvous.store_address import StoreAddresses, parse_store
from multiworld.rendezvous.store_messages import (
    Announce,
    Claim,
    MemberGaveUp,
    NewcomerWaits,
    SealedMember,
    SurvivorClaim,
)

WELCOME = frames.encode(Answer(multiworld=frames.PROTOCOL_VERSION, ok=True))
"""A store's side of the handshake, without a secret."""


class Owner:
    """Owner of a session that holds what the test says, and records its notices."""

    def __init__(self, *held: tuple[str, int, int]) -> None:
        self.held = list(held)
        self.notes: list[NewcomerWaits | MemberGaveUp] = []

    def holds(self, world: str, epoch: int, rank: int) -> bool:
        return (world, epoch, rank) in self.held

    def holdings(self, where: StoreAddresses) -> list[Announce]:
        return [Announce(world, epoch, rank, "me") for world, epoch, rank in self.held]

    def noticed(self, notice: NewcomerWaits | MemberGaveUp) -> None:
        self.notes.append(notice)


def member_of(rank: int, uid: str = "") -> Member:
    """Return the record of a member that can be reached in its process only."""
    address = Address(host="", port=0, unix="", boot="b", netns="n")
    return Member(rank=rank, uid=uid or f"m{rank}", pid=1, address=address)


def sealed_of(rank: int, uid: str = "") -> SealedMember:
    """Return the record of a member as it travels where there is no secret."""
    return SealedMember(member_of(rank, uid))


def claim_of(
    request: int, rank: int, size: int, uid: str = "m", **fields: Any
) -> Claim:
    ordinary = Claim(
        request=request,
        world="w",
        rank=rank,
        size=size,
        terms="backend memory",
        uid=uid,
        seen=0,
        deadline_s=10.0,
        member=sealed_of(rank, uid),
        place=(0, 1),
    )
    return msgspec.structs.replace(ordinary, **fields)


def survivor_of(
    request: int, rank: int, size: int, uid: str = "m", **fields: Any
) -> SurvivorClaim:
    ordinary = SurvivorClaim(
        request=request,
        world="w",
        epoch=1,
        rank=rank,
        size=size,
        lost=frozenset(),
        terms="backend memory",
        uid=uid,
        deadline_s=10.0,
        member=sealed_of(rank, uid),
        place=(0, 1),
    )
    return msgspec.structs.replace(ordinary, **fields)


def raw(value: object) -> bytes:
    """Return a frame with any JSON in it, or with these bytes."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(body).to_bytes(4, "big") + body


def values_of(message: msgspec.Struct, **fields: object) -> dict[str, Any]:
    """Return a message as JSON values, with some fields changed to anything."""
    return {**json.loads(frames.encode(message)[4:]), **fields}


class Impostor:
    """A server at a store's address that handles each connection as scripted."""

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
        for sock in (self._listening, *self.accepted):
            if sock.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(sock.fileno())
            sock.close()


def is_silent(sock: socket.socket) -> None:
    """Keep a connection and say nothing, as a stopped process does."""


def hangs_up(sock: socket.socket) -> None:
    sock.close()


def says(data: bytes) -> Callable[[socket.socket], None]:
    """Return an action that sends these bytes, whatever it was asked."""
    return lambda sock: sock.sendall(data)


def answers(data: bytes) -> Callable[[socket.socket], None]:
    """Return an action that welcomes a member, then sends ``data`` for each request.

    Each frame of a member must come in one piece, as short ones do on loopback.
    """

    def act(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        replies = itertools.chain([WELCOME], itertools.repeat(data))

        def on_readable() -> None:
            try:
                heard = sock.recv(1 << 16)
            except OSError:
                heard = b""
            if heard:
                sock.sendall(next(replies))
            else:
                loop.remove_reader(sock.fileno())

        loop.add_reader(sock.fileno(), on_readable)

    return act
