"""Members of a world and their addresses. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a listener; without port and Unix name, valid in its process only."""

    host: str
    port: int
    unix: str
    # The kernel's boot ID, and the inode of the network namespace: two members with
    # equal values are on the same host.
    boot: str
    netns: str

    def is_on(self, host: tuple[str, str]) -> bool:
        return (self.boot, self.netns) == host


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One member of one incarnation; ``uid`` is its manager's globally unique name."""

    rank: int
    uid: str
    pid: int
    address: Address

    def __str__(self) -> str:
        where = self.address.host or "this process"
        return f"rank {self.rank} (process {self.pid} on {where})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """One admitted incarnation; its ``nonce`` of 63 random bits identifies it."""

    world: str
    epoch: int
    nonce: int
    members: tuple[Member, ...]

    @property
    def size(self) -> int:
        return len(self.members)


class MemberUnreachableError(ConnectionError):
    def __init__(self, rank: int, why: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank} could not be reached: {why}")
