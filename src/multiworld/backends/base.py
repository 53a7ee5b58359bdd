"""Interfaces of a backend, and of the world that it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from multiworld.config import WorldConfig
from multiworld.incarnation.lifecycle import Happening
from multiworld.liveness.manager_messages import BackendMessage
from multiworld.net.security import Security
from multiworld.net.streams import Stream
from multiworld.rendezvous.membership import Incarnation
from multiworld.rendezvous.store_address import StoreAddress

ErrorMaker = Callable[[], Exception]
Meta = Mapping[str, Any]

# Receives the tensors of one source and tag as they arrive; never raises.
Handler = Callable[[Tensor], None]

# Receives the bytes of a uint8 tensor; never raises. The bytes are valid only during
# the call, and only until the called function receives something in the same world.
Peek = Callable[[memoryview], None]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Named tensors and metadata that arrived as one message.

    Attributes:
        tensors: Tensors by name, in the order they were sent, of any dtypes and shapes.
            All tensors share one storage.
        meta: JSON data: str, int, float, bool, None, lists and dicts.
        source: Rank of the sender.
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    source: int = -1


class Lingering(Protocol):
    """A connection that closes by itself, or earlier on request."""

    def close_nowait(self) -> None:
        """Close the connection now."""

    def fileno(self) -> int:
        """Return the file descriptor, or -1 once closed."""

    async def wait_closed(self) -> None:
        """Wait until the connection is closed."""


class WorldView(Protocol):
    """A world as its backend sees it; ``device`` is the device of a c10d backend's
    tensors."""

    incarnation: Incarnation
    rank: int
    config: WorldConfig
    device: torch.device
    store: StoreAddress
    security: Security

    async def lane(self, rank: int, channel: str) -> Stream:
        """Open a data connection with a member; ``channel`` is its purpose. Raises
        ``MemberUnreachableError``. Cancelling leaves nothing open."""

    def has_lane(self, rank: int, channel: str) -> bool:
        """Return whether the member has opened a connection that is not in use yet."""

    def dials(self, rank: int) -> bool:
        """Return True if this member dials ``rank``, False if ``rank`` dials."""

    def report(self, happening: Happening) -> None:
        """Report an event to the world, which decides what follows."""

    def trouble(self, rank: int | None, evidence: str) -> None:
        """Report that a data connection (to ``rank``, if known) failed. The control
        link should soon report the lost member. If it does not, the world breaks
        without naming a member."""

    async def wait_gone(self, rank: int) -> None:
        """Wait until a member has left, or the world has ended. Cancellation: Safe."""

    async def wait_incomplete(self) -> None:
        """Wait until the world is broken or closed, or a member has left."""

    @property
    def is_broken(self) -> bool:
        """True once the world is broken."""

    @property
    def left(self) -> frozenset[int]:
        """Ranks that have left gracefully."""

    def linger(self, connection: Lingering) -> None:
        """Keep a connection that closes by itself later."""

    def has_left(self, rank: int) -> bool:
        """Return whether a member has left gracefully."""

    def notify(self, rank: int, message: BackendMessage) -> None:
        """Send a control message to a member's backend."""

    def broken_error(self) -> Exception:
        """Return a new error for operations on a broken or closed world."""

    def left_error(self, rank: int) -> Exception:
        """Return a new error for an operation that needs a member that has left."""


class Received(NamedTuple):
    """A tensor and the rank of its sender."""

    tensor: Tensor
    source: int
