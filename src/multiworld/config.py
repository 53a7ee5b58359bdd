"""Settings of a world: one frozen value, checked on construction. Pure."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from multiworld.errors import ConfigError

__all__ = ["WorldConfig"]

KIB = 1024
MIB = 1024 * KIB

HEARTBEAT_S = 0.1  # default of ``WorldConfig.heartbeat_s``

# Maximum seconds between heartbeats of a service's processes; ``silence_s / 5`` if that
# is less. Heartbeats cost an idle process and its helper 0.4 % of a core.
SERVICE_HEARTBEAT_S = 0.2
MAX_WAIT_S = 30 * 86_400.0  # maximum seconds of any wait: 30 days


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldConfig:
    """Settings of one world; every member should use the same ones.

    Raises:
        ConfigError: The value of a field is not allowed.
    """

    join_s: float = 30.0
    """Seconds to wait for all members before ``JoinTimeoutError``. The default is
    pymultiworld's, which existing programs rely on."""

    silence_s: float = 2.0
    """Seconds of silence, or of a network outage, after which a member is declared
    lost; the verdict comes within another half second. On a busy machine the heartbeat
    helper was never more than 0.112 s late. The default of 2 s leaves room for an
    overloaded machine and for a network that drops packets or fails over. See
    ``docs/detection.md``."""

    stall_s: float = 2.0
    """Seconds without a sign from a member's event loop before ``MemberStalled`` is
    published. A stalled member is not lost: its helper reports that the process
    runs."""

    stalled_limit_s: float = math.inf
    """Seconds after which a stalled member counts as lost. The default is never,
    because a long call (loading weights, garbage collection) is no fault. Set it if a
    hung process must be replaced like a dead one."""

    close_s: float = 5.0
    """Maximum seconds that ``close`` waits for sent data to leave this process."""

    heartbeat_s: float = HEARTBEAT_S
    """Seconds between heartbeats; less than ``silence_s``. By default twenty fit into
    ``silence_s``, so a few lost or late heartbeats are harmless, and so is a network
    outage shorter than ``silence_s``. Like ``heartbeat``, this comes from the settings
    of the manager, and every manager should use the same value."""

    heartbeat: Literal["process", "thread"] = "process"
    """Sender of this process's heartbeats: a helper process or a thread. A helper
    process keeps sending while one C call holds the GIL (an unpickle held it for 20 s),
    and reports when this process is stopped. A thread needs no additional process but
    can do neither. All worlds of a manager share one sender, so the manager's settings
    decide, not those of a single join."""

    embed_store: bool = True
    """Serve the store from rank 0 if nobody else does and the address belongs to this
    host. Set it to False if the store is a service that is restarted after a failure:
    an embedded store in its place would lose its state with this process."""

    eager_bytes: int = 64 * KIB
    """Maximum size, in bytes, of a message that ``memory`` sends without waiting for
    its receive; 0 exposes programs whose sends wait for each other. Other backends
    return once the kernel or shared memory has the message."""

    shared_memory_bytes: int = 4 * MIB
    """Bytes of shared memory for large messages between two processes of one host. Each
    ``direct`` connection allocates this memory once for each direction, with the first
    large message. 0 sends everything through sockets."""

    unexpected_bytes: int = 64 * MIB
    """Maximum bytes of messages held, for each pair of members, until a receive asks
    for them. Beyond that, the receiver stops reading, which eventually blocks the
    sender."""

    max_message_bytes: int = 1 << 40
    """Maximum size, in bytes, that a message header may announce. A header that
    announces more counts as corrupt and breaks the world before any allocation."""

    payload_checksum: bool = False
    """Check every payload with CRC-32. Headers are always checked. Payloads already
    cross memory or a checksummed TCP stream, and a second checksum costs most of the
    throughput at large sizes."""

    host_p2p: Literal["direct", "backend"] = "direct"
    """Transport of send and recv for host tensors on a c10d world: ``direct``, which
    supports cancelling and carries shapes, or the backend's own operations."""

    operation_s: float = 1800.0
    """Timeout, in seconds, of a c10d backend's own operations. The default is torch's.
    Failure detection does not depend on it."""

    def __post_init__(self) -> None:
        for name in (
            "join_s",
            "silence_s",
            "heartbeat_s",
            "stall_s",
            "stalled_limit_s",
            "close_s",
            "operation_s",
        ):
            value = getattr(self, name)
            if not _is_number(value) or not value > 0:
                raise ConfigError(name, value, "give seconds, more than 0")
        for name in ("join_s", "close_s", "operation_s"):
            if getattr(self, name) > MAX_WAIT_S:
                rule = f"give seconds, at most {MAX_WAIT_S:g}"
                raise ConfigError(name, getattr(self, name), rule)
        if self.heartbeat_s >= self.silence_s:
            rule = f"give less than silence_s ({self.silence_s:g} s)"
            raise ConfigError("heartbeat_s", self.heartbeat_s, rule)
        for name in (
            "eager_bytes",
            "shared_memory_bytes",
            "unexpected_bytes",
            "max_message_bytes",
        ):
            value = getattr(self, name)
            if not is_int(value) or value < 0:
                raise ConfigError(name, value, "give bytes, 0 or more")
        for name in ("payload_checksum", "embed_store"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "give True or False")
        if self.heartbeat not in ("process", "thread"):
            rule = "use 'process' or 'thread'"
            raise ConfigError("heartbeat", self.heartbeat, rule)
        if self.host_p2p not in ("direct", "backend"):
            rule = "use 'direct' or 'backend'"
            raise ConfigError("host_p2p", self.host_p2p, rule)

    def replace(self, **changes: Any) -> WorldConfig:
        """Return a copy with some fields changed.

        Args:
            changes: New values, by field name.

        Raises:
            ConfigError: The new value of a field is not allowed.
        """
        return dataclasses.replace(self, **changes)


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text.

    Args:
        text: Any text; one with lone surrogates, as in odd file names, is not Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_int(value: object) -> bool:
    """Return whether a value is an int.

    Args:
        value: Any object; a bool is an int in Python, but not here.
    """
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return is_int(value) or isinstance(value, float)
