"""A message that arrives, and a receive that waits for one."""

from __future__ import annotations

import math
from asyncio import Future
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from multiworld.backends.base import Handler
from multiworld.backends.dtypes import DTYPES, flat, memory_of
from multiworld.backends.tensor_pool import RECYCLED_BYTES, recycler

# Approximate memory of a held message besides its payload, in bytes: for the message
# (if no other held message has its tag), and for each dimension of its shape.
MESSAGE_BYTES, DIMENSION_BYTES = 1664, 28


class Description(NamedTuple):
    """A message, as its first header describes it."""

    kind: int  # a kind of message, as in ``header``
    dtype: int  # wire code
    # For a collective's message: number of the collective, number of elements.
    shape: tuple[int, ...]
    size: int  # bytes of the payload
    tag: int
    # For a bundle: bytes of its manifest; for a collective: ``Operation.label``.
    label: int


# Returns the error for a receive that refuses this source and message, or None.
Check = Callable[[int, Description], Exception | None]
# Returns the tensor to receive into, or None for new memory.
Place = Callable[[Description], Tensor | None]
# Returns the tensor of a message in memory that its sender lends.
Lent = Callable[[Description], Tensor]
# Merges a part of a payload into a tensor, from this byte offset on.
Merge = Callable[[int, memoryview], None]


@dataclass(slots=True, eq=False)
class Arrival:
    """A message that has begun to arrive. Its tensor is the receive's ``out``
    (``is_borrowed``), lies in memory of the sender (``is_lent``), or is a new one."""

    number: int  # position among all messages and receives of the mailbox
    source: int
    description: Description
    tensor: Tensor
    is_borrowed: bool = False
    is_lent: bool = False
    received: int = 0
    is_complete: bool = False
    merge: Merge | None = None
    is_merged: bool = False
    receive: Receive | None = None
    handler: Handler | None = None
    on_taken: Callable[[], object] | None = None
    key: tuple[int, int] = field(init=False)  # source and tag
    memory: memoryview = field(init=False)  # the bytes of ``tensor``

    def __post_init__(self) -> None:
        self.key = self.source, self.description.tag
        self.memory = memory_of(self.tensor)

    def own(self) -> None:
        """Move the received bytes out of the caller's tensor, into a new one."""
        if not self.is_borrowed:
            return
        tensor = allocate(self.description)
        source = flat(self.tensor).view(torch.uint8)[: self.received]
        # Copy with torch: a copy through a memoryview would hold the GIL.
        flat(tensor).view(torch.uint8)[: self.received].copy_(source)
        self.tensor, self.memory = tensor, memory_of(tensor)
        self.is_borrowed = False

    def detach(self) -> None:
        """Forget the receive, which has failed; the rest arrives in other memory.

        The caller may use its tensor again, and the connection may stay open.
        """
        if self.receive is not None:
            self.receive.arrival = None
            self.receive = None
        self.merge = None
        if self.is_borrowed and not self.is_complete:
            self.tensor = allocate(self.description)
            self.memory, self.is_borrowed = memory_of(self.tensor), False


def allocate(description: Description) -> Tensor:
    dtype, shape, count = form_of(description)
    if description.size < RECYCLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return recycler.empty(count, dtype).view(shape)


def form_of(description: Description) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Return dtype, shape and number of elements of a message's tensor."""
    dtype, shape = DTYPES[description.dtype], description.shape
    count = math.prod(shape)
    if description.size != count * dtype.itemsize:
        # A bundle or an object: its elements are bytes.
        return torch.uint8, (description.size,), description.size
    return dtype, shape, count


@dataclass(slots=True, eq=False)
class Receive:
    """A posted receive."""

    source: int | None
    tag: int
    check: Check
    place: Place
    future: Future[Arrival]
    # Called with each part of a payload in shared memory, so that it is merged instead
    # of copied. Such a receive cannot be cancelled once its message has begun.
    merge: Merge | None = None
    number: int = 0
    arrival: Arrival | None = None
    error: Exception | None = None
    settled: Future[None] | None = None

    def fail(self, error: Exception) -> None:
        self.error = error
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # mark it as retrieved
