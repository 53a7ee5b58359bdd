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

Handler = Callable[[Tensor], None]
"""Takes the tensors of one source and tag as they arrive; never raises."""

Peek = Callable[[memoryview], None]
"""Takes the bytes of a uint8 tensor; never raises.

They are valid during the call, as long as it receives nothing in the same world.
"""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Named tensors and metadata that arrived as one message.

    Attributes:
        tensors: Tensors by name, in the order they were sent, any dtypes and shapes.
            They share one storage.
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
        """Return the file descriptor, or -1 once the connection is closed."""

    async def wait_closed(self) -> None:
        """Wait until the connection is closed.

        Cancellation: Safe.
        """


class WorldView(Protocol):
    """A world as its backend sees it.

    Attributes:
        incarnation: The incarnation and its members.
        rank: This member's rank.
        config: The world's settings.
        device: Device of a c10d backend's tensors.
        store: Address of the store that admitted this member.
        security: Secret and TLS settings.
    """

    incarnation: Incarnation
    rank: int
    config: WorldConfig
    device: torch.device
    store: StoreAddress
    security: Security

    async def lane(self, rank: int, channel: str) -> Stream:
        """Open a data connection with a member, and return it.

        Args:
            rank: Rank of the member.
            channel: Purpose of the connection: messages or collectives.

        Raises:
            MemberUnreachableError: The member could not be reached.

        Cancellation: Safe. Nothing stays open.
        """

    def has_lane(self, rank: int, channel: str) -> bool:
        """Tell whether a connection that the member opened waits to be used."""

    def dials(self, rank: int) -> bool:
        """Tell whether this member dials the other one; otherwise the other dials."""

    def report(self, happening: Happening) -> None:
        """Report an event to the world, which decides what follows."""

    def trouble(self, rank: int | None, evidence: str) -> None:
        """Report that a data connection (to ``rank``, if known) failed.

        The control link should soon report the member that was lost. If it does not,
        the world breaks without naming a member.
        """

    async def wait_over(self) -> None:
        """Wait until the world is broken or closed.

        Cancellation: Safe.
        """

    async def wait_incomplete(self) -> None:
        """Wait until the world is broken or closed, or a member has left.

        Cancellation: Safe.
        """

    @property
    def is_broken(self) -> bool:
        """True once the world is broken."""

    @property
    def left(self) -> frozenset[int]:
        """Ranks that have left politely."""

    def linger(self, connection: Lingering) -> None:
        """Keep a connection that closes by itself later."""

    def has_left(self, rank: int) -> bool:
        """Tell whether a member has left politely."""

    def tell(self, rank: int, message: BackendMessage) -> None:
        """Send a control message to a member's backend."""

    def broken_error(self) -> Exception:
        """Return a new error for operations on a broken or closed world."""

    def left_error(self, rank: int) -> Exception:
        """Return a new error for an operation that needs a member that has left."""


class Backend(Protocol):
    """Data transfer of one world.

    The caller has checked the ranks. Every operation raises ``TensorMismatchError`` for
    a message that it cannot take, and ``WorldView.broken_error`` once ``abort`` was
    called. An implementation states for each operation what cancelling does; if it
    cannot withdraw the operation, cancelling breaks the world.
    """

    async def open(self) -> None:
        """Connect to the other members.

        Cancellation: Connections may stay open; call ``close_nowait`` afterwards.
        """

    async def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Send one tensor.

        Args:
            tensor: Any shape and strides, of a dtype in ``backends.dtypes``.
            dst: Rank of the receiver.
            tag: Tag of the message.

        Cancellation: Withdraws the message, or breaks the world.
        """

    async def recv(self, out: Tensor | None, src: int | None, tag: int) -> Received:
        """Receive one tensor.

        Args:
            out: Tensor to fill, of the sent dtype and number of elements. None: a new
                tensor of the sent dtype and shape.
            src: Rank of the sender; None: any member.
            tag: Tag of the message.

        Cancellation: Loses no message, or breaks the world.
        """

    async def send_bundle(
        self, tensors: Mapping[str, Tensor], meta: Meta, dst: int, tag: int
    ) -> None:
        """Send several named tensors and metadata as one message.

        Args:
            tensors: Tensors by name; any dtypes and shapes, on the host.
            meta: JSON data.
            dst: Rank of the receiver.
            tag: Tag of the message.

        Cancellation: Withdraws the message, or breaks the world.
        """

    async def recv_bundle(self, src: int | None, tag: int) -> Bundle:
        """Receive a bundle; from any member if ``src`` is None.

        Cancellation: Loses no message, or breaks the world.
        """

    async def send_object(self, obj: Any, dst: int, tag: int) -> None:
        """Send JSON data.

        Args:
            obj: The data.
            dst: Rank of the receiver.
            tag: Tag of the message.

        Cancellation: Withdraws the message, or breaks the world.
        """

    async def recv_object(self, src: int | None, tag: int) -> Any:
        """Receive JSON data; from any member if ``src`` is None.

        Cancellation: Loses no message, or breaks the world.
        """

    def handle(
        self, src: int, tag: int, handler: Handler, peek: Peek | None = None
    ) -> None:
        """Pass each tensor from ``src`` with this tag to ``handler`` as it arrives.

        Args:
            src: Rank of the sender.
            tag: Tag of the tensors.
            handler: Takes each tensor.
            peek: May take the bytes of a uint8 tensor in place of ``handler``.

        Raises:
            UnsupportedOperationError: The backend cannot.
        """

    @property
    def collectives(self) -> Collectives:
        """The world's collective operations."""

    def on_message(self, rank: int, message: BackendMessage) -> None:
        """Handle a control message from another member's backend."""

    def has_message(self, src: int | None, tag: int) -> bool:
        """Tell whether a complete message waits for a receive, in a broken world too.

        Args:
            src: Rank of the sender; None: any.
            tag: Tag of the message.
        """

    def drop_messages(self) -> None:
        """Drop what has arrived and was not received: the world is closed."""

    def member_left(self, rank: int) -> None:
        """Fail the operations that need a member that has left."""

    def abort(self) -> None:
        """Fail all operations with ``WorldView.broken_error`` and free everything.

        Does not wait.
        """

    def begin_close(self) -> None:
        """Queue a final frame behind the data that was sent. Does not wait."""

    async def close(self) -> None:
        """Wait until sent data has left this process, then free all resources.

        The caller limits the time.

        Cancellation: Data may stay unsent; call ``close_nowait`` afterwards.
        """

    def close_nowait(self) -> None:
        """Free all resources at once."""

    def filenos(self) -> list[int]:
        """Return the file descriptors that a forked child must close."""

    @property
    def process_group(self) -> ProcessGroup:
        """The c10d group.

        Raises:
            UnsupportedOperationError: The backend has none.
        """


class Received(NamedTuple):
    """A tensor and the rank of its sender."""

    tensor: Tensor
    source: int
