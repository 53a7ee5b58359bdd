"""Members of a world and their addresses. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Identity of a host: two processes share a host if both fields are equal.

    Attributes:
        boot: The kernel's boot id.
        netns: Inode number of the network namespace.
    """

    boot: str
    netns: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a manager's listener: TCP for other hosts, a Unix socket for its own.

    A manager with port 0 and no Unix name can be reached only within its own process
    (the ``memory`` backend).

    Attributes:
        host: Host name or IP address; empty for the ``memory`` backend.
        port: TCP port.
        unix: Abstract name of the Unix socket.
        boot: Boot id of the host, as in ``HostIdentity``.
        netns: Network namespace, as in ``HostIdentity``.
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
        pid: Its process ID, for messages to people.
        address: Address of its manager's listener.
    """

    rank: int
    uid: str
    pid: int
    address: Address

    def __str__(self) -> str:
        where = self.address.host or "this process"
        return f"rank {self.rank} (process {self.pid} on {where})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """One incarnation of a world, as the store admitted it.

    Attributes:
        world: The world's name.
        epoch: The incarnation's epoch.
        nonce: 63 random bits that identify the incarnation in frames and links.
        members: The members, by rank.
    """

    world: str
    epoch: int
    nonce: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        """World size."""
        return len(self.members)


class MemberUnreachableError(ConnectionError):
    """An admitted member could not be reached."""

    def __init__(self, rank: int, why: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} could not be reached: {why}")
