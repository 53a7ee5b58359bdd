"""Who is in a world and where it can be reached. Pure, but for ``this_host``."""

from __future__ import annotations

import functools
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from multiworld.errors import RendezvousError


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Two processes share a host if boot and network namespace are both equal."""

    boot: str
    netns: str


@functools.cache
def this_host() -> HostIdentity:
    """Return this process's host identity, from ``/proc``."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return HostIdentity(boot=boot, netns=str(os.stat("/proc/self/ns/net").st_ino))


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a manager listens: TCP for other hosts, an abstract Unix name for its own.

    ``port`` 0 and no ``unix`` name mean a member that can only be reached inside its
    own process (the ``memory`` backend).
    """

    host: str
    port: int
    unix: str
    boot: str
    netns: str

    def is_on(self, host: HostIdentity) -> bool:
        """Tell whether this address is on ``host``."""
        return (self.boot, self.netns) == (host.boot, host.netns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of one incarnation.

    Attributes:
        rank: Its rank in the world.
        uid: Random name of its manager, unique for ever.
        pid: Its process, for messages to people.
        address: Where its manager listens.
    """

    rank: int
    uid: str
    pid: int
    address: Address

    def to_json(self) -> dict[str, Any]:
        """Return the record that the store keeps."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Member:
        """Read a record back.

        Raises:
            RendezvousError: The record does not have the fields of a member.
        """
        try:
            address = Address(**record["address"])
            return cls(
                rank=int(record["rank"]),
                uid=str(record["uid"]),
                pid=int(record["pid"]),
                address=address,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RendezvousError(
                f"the store returned a member record that cannot be read: {record!r}"
            ) from error

    def __str__(self) -> str:
        where = self.address.host or "this process"
        return f"rank {self.rank} (process {self.pid} on {where})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """One epoch of a world's name, as the store admitted it."""

    world: str
    epoch: int
    nonce: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        """World size."""
        return len(self.members)


class MemberUnreachableError(ConnectionError):
    """A member that was admitted could not be connected to."""

    def __init__(self, rank: int, why: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} could not be reached: {why}")
