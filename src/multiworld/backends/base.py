"""What a backend is, and what it may ask of the world it serves."""

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
from multiworld.net.security import Security
from multiworld.net.streams import Stream
from multiworld.rendezvous.membership import Incarnation
from multiworld.rendezvous.store_address import StoreAddress

ErrorMaker = Callable[[], Exception]
Meta = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Several named tensors and a little metadata that travelled as one message.

    Attributes:
        tensors: By name, in the order they were sent. They share one piece of memory.
        meta: What JSON can say: str, int, float, bool, None, lists and dicts.
        source: The rank it came from.
    """

    tensors: dict[str, Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    source: int = -1


class Lingering(Protocol):
    """Something that will close itself, unless it is told to do so earlier."""

    def close_nowait(self) -> None:
        """Close now."""

    def fileno(self) -> int:
        """Return the descriptor, or -1 once closed."""

    async def wait_closed(self) -> None:
        """Wait until it has closed."""


class WorldView(Protocol):
    """What a backend sees of its world."""

    incarnation: Incarnation
    rank: int
    config: WorldConfig
    device: torch.device
    store: StoreAddress
    security: Security

    async def lane(self, rank: int, channel: str) -> Stream:
        """Return a new connection with a member, for data."""

    def has_lane(self, rank: int, channel: str) -> bool:
        """Tell whether a connection that the member opened waits to be taken."""

    def dials(self, rank: int) -> bool:
        """Tell whether this member dials the other one, or waits for it."""

    def report(self, happening: Happening) -> None:
        """Tell the world what happened; it decides what follows."""

    def trouble(self, rank: int | None, evidence: str) -> None:
        """Note that a data connection (to ``rank``, if known) failed.

        The control link should tell soon whose fault it is; if it does not, the world
        breaks without a member to blame.
        """

    async def wait_over(self) -> None:
        """Wait until the world is broken or closed."""

    async def wait_incomplete(self) -> None:
        """Wait until the world is over, or a member has left."""

    @property
    def is_broken(self) -> bool:
        """True once something outside has ended it."""

    @property
    def left(self) -> frozenset[int]:
        """Ranks that have left politely."""

    def linger(self, connection: Lingering) -> None:
        """Keep a connection that closes itself later."""

    def has_left(self, rank: int) -> bool:
        """Tell whether a member has left politely."""

    def tell(self, rank: int, message: dict[str, Any]) -> None:
        """Send a control message to the member's backend."""

    def broken_error(self) -> Exception:
        """Return a fresh error for an operation that cannot be."""

    def left_error(self, rank: int) -> Exception:
        """Return a fresh error for an operation that needs a member that left."""


class Backend(Protocol):
    """One world's way of moving tensors.

    Ranks were checked by the caller. Every operation raises ``TensorMismatchError`` on
    a message it cannot take, and whatever ``abort`` was given once that was called.
    Unless its docstring says otherwise, cancelling an operation breaks the world.
    """

    async def open(self) -> None:
        """Connect to the other members."""

    async def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Send one tensor."""

    async def recv(self, out: Tensor | None, src: int | None, tag: int) -> Received:
        """Receive one tensor, from anybody if ``src`` is None."""

    async def send_bundle(
        self, tensors: Mapping[str, Tensor], meta: Meta, dst: int, tag: int
    ) -> None:
        """Send several tensors as one message."""

    async def recv_bundle(self, src: int | None, tag: int) -> Bundle:
        """Receive several tensors."""

    async def send_object(self, obj: Any, dst: int, tag: int) -> None:
        """Send plain data."""

    async def recv_object(self, src: int | None, tag: int) -> Any:
        """Receive plain data."""

    @property
    def collectives(self) -> Collectives:
        """The operations of all members together."""

    def on_message(self, rank: int, message: dict[str, Any]) -> None:
        """Take a control message of another member's backend."""

    def member_left(self, rank: int) -> None:
        """Fail what only this member could have completed."""

    def abort(self) -> None:
        """Fail everything with ``WorldView.broken_error`` and free all; at once."""

    def begin_close(self) -> None:
        """Announce our end behind what was sent; never waits."""

    async def close(self) -> None:
        """Wait until what was sent has left, then free all; the caller sets a limit."""

    def close_nowait(self) -> None:
        """Free all at once."""

    def filenos(self) -> list[int]:
        """Return the descriptors that a forked child must close."""

    @property
    def process_group(self) -> ProcessGroup:
        """The c10d group, where there is one."""


class Received(NamedTuple):
    """A tensor and the rank it came from."""

    tensor: Tensor
    source: int
