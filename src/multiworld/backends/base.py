"""Interfaces of a backend, and of the world that it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from multiworld.backends.collective import Collectives
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
        """Return whether this member dials the other one, not the reverse."""

    def report(self, happening: Happening) -> None:
        """Report an event to the world, which decides what follows."""

    def trouble(self, rank: int | None, evidence: str) -> None:
        """Report that a data connection (to ``rank``, if known) failed. The control
        link should soon report the lost member. If it does not, the world breaks
        without naming a member."""

    async def wait_gone(self, rank: int) -> None:
        """Wait until a member has left, or the world is over. Cancellation: Safe."""

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


class Backend(Protocol):
    """Data transfer of one world.

    The caller has checked the ranks. Every operation raises ``TensorMismatchError`` for
    a tensor or message that it cannot take, and ``WorldView.broken_error`` once
    ``abort`` was called. A receive takes from any member if ``src`` is None; a message
    of the wrong kind or size stays first in its queue. Cancelling a send withdraws the
    rest of the message, and cancelling a receive loses no message. A backend that
    cannot do this breaks the world instead.
    """

    async def open(self) -> None:
        """Connect to the other members; after a cancellation, call ``close_nowait``."""

    async def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Send a tensor of any shape and strides, of a dtype in ``backends.dtypes``."""

    async def recv(self, out: Tensor | None, src: int | None, tag: int) -> Received:
        """Receive into ``out``, or into a new tensor if it is None. ``out`` has any
        shape and strides, and the sent dtype and number of elements. Cancelling leaves
        its content undefined."""

    async def send_bundle(
        self, tensors: Mapping[str, Tensor], meta: Meta, dst: int, tag: int
    ) -> None:
        """Send named host tensors and JSON metadata as one message."""

    async def recv_bundle(self, src: int | None, tag: int) -> Bundle:
        """Receive a bundle."""

    async def send_object(self, obj: Any, dst: int, tag: int) -> None:
        """Send JSON data."""

    async def recv_object(self, src: int | None, tag: int) -> Any:
        """Receive JSON data."""

    def handle(
        self, src: int, tag: int, handler: Handler, peek: Peek | None = None
    ) -> None:
        """Pass each tensor from ``src`` with this tag to ``handler`` as it arrives.
        ``peek`` may receive the bytes of a uint8 tensor in place of ``handler``. Raises
        ``UnsupportedOperationError`` if the backend cannot do this."""

    @property
    def collectives(self) -> Collectives:
        """The world's collective operations."""

    def on_message(self, rank: int, message: BackendMessage) -> None:
        """Handle a control message from another member's backend."""

    def has_message(self, src: int | None, tag: int) -> bool:
        """Return whether a complete message waits, even in a broken world."""

    def drop_messages(self) -> None:
        """Drop what has arrived and was not received: the world is closed."""

    def member_left(self, rank: int) -> None:
        """Fail the operations that need a member that has left."""

    def member_ended(self, rank: int) -> None:
        """Fail receives from a member that has left, once nothing more can arrive."""

    def is_arriving(self, rank: int) -> bool:
        """Return whether data from a member that has ended may still arrive."""

    def abort(self) -> None:
        """Fail all operations and free everything, without waiting."""

    def begin_close(self) -> None:
        """Queue a final frame after the sent data, without waiting."""

    async def close(self) -> None:
        """Wait until sent data has left this process, then free all resources. The
        caller limits the time, and calls ``close_nowait`` after a cancellation."""

    def close_nowait(self) -> None:
        """Free all resources at once."""

    def filenos(self) -> list[int]:
        """Return the file descriptors that a forked child must close."""

    @property
    def process_group(self) -> ProcessGroup:
        """The c10d group; raises ``UnsupportedOperationError`` if there is none."""


class Received(NamedTuple):
    """A tensor and the rank of its sender."""

    tensor: Tensor
    source: int
