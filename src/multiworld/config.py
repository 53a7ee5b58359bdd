"""How a world behaves: one frozen value, checked when it is made. Pure."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from multiworld.errors import ConfigError

__all__ = ["WorldConfig"]

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """Settings of one world; every member should use the same ones.

    Raises:
        ConfigError: A value is outside what its field allows.
    """

    join_s: float = 30.0
    """Seconds to wait for all members before ``JoinTimeoutError``; 30 as in the
    prototype, whose programs rely on it."""

    silence_s: float = 2.0
    """Seconds that a member may give no sign of life, or the network be away; it is
    declared lost within half a second after. The helper process that beats was never
    more than 0.112 s late on a busy machine; 2 s leaves room for an overloaded one and
    for a network that drops packets or switches over. See ``docs/detection.md``."""

    stall_s: float = 2.0
    """Seconds that a member's event loop may give no sign before ``MemberStalled`` is
    published. Stalled is not lost: its helper says that the process runs."""

    stalled_limit_s: float = math.inf
    """Seconds after which a stalled member counts as lost. Never, by default: a long
    call (loading weights, a collection of garbage) is no fault. Set it where a hung
    process must be replaced like a dead one."""

    close_s: float = 5.0
    """Most seconds that ``close`` waits for data already sent to leave this process."""

    heartbeat: Literal["process", "thread"] = "process"
    """Who beats for this process. A helper process beats on while one C call holds the
    GIL (20 s were measured for an unpickle) and tells when this process is stopped; a
    thread costs no process, but can do neither. One beats for all worlds of a manager,
    so this is taken from the manager's settings, not from a single join's."""

    embed_store: bool = True
    """Whether rank 0 serves the store if nobody else does and its address is one of
    this host's. False where the store is a service of its own that is started again:
    who embeds one in its place, would take its memory away with it."""

    eager_bytes: int = 64 * KIB
    """Messages up to this size are sent without waiting for the receiver."""

    shared_memory_bytes: int = 4 * MIB
    """Shared memory for large messages between two processes of one host: of each
    ``direct`` connection and direction that carries one, from the first one on. 0: all
    goes through sockets."""

    unexpected_bytes: int = 64 * MIB
    """Most bytes held per pair for messages that nobody asked for yet; then reading
    stops, and with it, in time, the sender."""

    max_message_bytes: int = 1 << 40
    """A header that announces more than this is taken for garbage and breaks the world
    before anything is allocated."""

    payload_checksum: bool = False
    """Check every payload with CRC-32. Headers are always checked; payloads cross
    memory or a checksummed TCP stream already, and a second sum costs most of the rate
    at large sizes."""

    host_p2p: Literal["direct", "backend"] = "direct"
    """What carries send and recv of host tensors on a c10d world: our data path, which
    can be cancelled and carries shapes, or the backend's own."""

    operation_s: float = 1800.0
    """Deadline that a c10d backend gets for its own operations; torch's default.
    Liveness does not depend on it."""

    def __post_init__(self) -> None:
        """Check every field."""
        for name in (
            "join_s",
            "silence_s",
            "stall_s",
            "stalled_limit_s",
            "close_s",
            "operation_s",
        ):
            value = getattr(self, name)
            if not _is_number(value) or not value > 0:
                raise ConfigError(name, value, "seconds, more than 0")
        for name in (
            "eager_bytes",
            "shared_memory_bytes",
            "unexpected_bytes",
            "max_message_bytes",
        ):
            value = getattr(self, name)
            if not _is_number(value, int) or value < 0:
                raise ConfigError(name, value, "bytes, 0 or more")
        for name in ("payload_checksum", "embed_store"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "a bool")
        if self.heartbeat not in ("process", "thread"):
            raise ConfigError("heartbeat", self.heartbeat, "'process' or 'thread'")
        if self.host_p2p not in ("direct", "backend"):
            raise ConfigError("host_p2p", self.host_p2p, "'direct' or 'backend'")

    def replace(self, **changes: Any) -> WorldConfig:
        """Return a copy with ``changes`` applied, checked again."""
        return dataclasses.replace(self, **changes)


def _is_number(value: object, *kinds: type) -> bool:
    """Return whether it is one; a bool is none, and "not a number" is greater than
    nothing."""
    return isinstance(value, kinds or (int, float)) and not isinstance(value, bool)
