"""A message that arrives, and a receive that waits for one."""

from __future__ import annotations

import math
from asyncio import Future
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from multiworld.backends.base import Handler
from multiworld.backends.dtypes import DTYPES, memory_of
from multiworld.backends.tensor_pool import RECYCLED_BYTES, recycler

MESSAGE_BYTES = 512
"""Approximate bytes that a message costs beside its payload."""


class Description(NamedTuple):
    """Description of a message, from its first header.

    ``kind`` is one of ``direct.header``, ``dtype`` a wire code, ``size`` in bytes, and
    ``label`` the bytes of a bundle's manifest. A collective has its number and elements
    in ``shape``, and ``Operation.label`` in ``label``.
    """

    kind: int
    dtype: int
    shape: tuple[int, ...]
    size: int
    tag: int
    label: int


Check = Callable[[int, Description], Exception | None]
"""Returns the error of a receive that refuses this source and message, or None."""

Place = Callable[[Description], Tensor | None]
"""Returns the tensor to receive into, or None for new memory."""

Lent = Callable[[Description], Tensor]
"""Returns the tensor of a message in memory that its sender lends."""

Merge = Callable[[int, memoryview], None]
"""Merges a part of a payload, from this byte on, into a tensor."""


class Arrival:
    """A message that has begun to arrive, and its memory. ``number`` is its position
    among all messages and receives of the mailbox. The memory is ``place`` (the
    caller's tensor), ``lent`` (the sender's), or its own."""

    __slots__ = (
        "description",
        "handler",
        "is_borrowed",
        "is_complete",
        "is_lent",
        "is_merged",
        "memory",
        "merge",
        "number",
        "on_taken",
        "receive",
        "received",
        "source",
        "tensor",
    )

    def __init__(
        self,
        number: int,
        source: int,
        description: Description,
        place: Tensor | None,
        lent: Tensor | None = None,
    ) -> None:
        self.number, self.source, self.description = number, source, description
        self.is_borrowed, self.is_lent = place is not None, lent is not None
        if place is None:
            place = allocate(description) if lent is None else lent
        self.tensor = place
        self.memory = memory_of(self.tensor)
        self.received = 0
        self.is_complete = False
        self.merge: Merge | None = None
        self.is_merged = False
        self.receive: Receive | None = None
        self.handler: Handler | None = None
        self.on_taken: Callable[[], object] | None = None

    def own(self) -> None:
        """Move the bytes that have arrived from the caller's tensor to a new one."""
        if not self.is_borrowed:
            return
        tensor = allocate(self.description)
        source = self.tensor.view(-1).view(torch.uint8)[: self.received]
        # With torch: a memoryview would hold the GIL during the copy.
        tensor.view(-1).view(torch.uint8)[: self.received].copy_(source)
        self.tensor, self.memory = tensor, memory_of(tensor)
        self.is_borrowed = False


def allocate(description: Description) -> Tensor:
    """Return an uninitialised tensor for a message; see ``form_of``."""
    dtype, shape, count = form_of(description)
    if description.size < RECYCLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return recycler.empty(count, dtype).view(shape)


def form_of(description: Description) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Return dtype, shape and number of elements of a message's tensor. They are the
    message's own if they match its size, as a tensor's do. Otherwise, for a bundle or
    an object, the tensor is flat, of uint8."""
    dtype, shape = DTYPES[description.dtype], description.shape
    count = math.prod(shape)
    if description.size != count * dtype.itemsize:
        return torch.uint8, (description.size,), description.size
    return dtype, shape, count


class Receive:
    """A posted receive. If ``merge`` is set, it is called with each part of a payload
    in shared memory, which is then not copied (``Arrival.is_merged``). Such a receive
    cannot be cancelled once its message has begun."""

    __slots__ = (
        "arrival",
        "check",
        "error",
        "future",
        "merge",
        "number",
        "place",
        "settled",
        "source",
        "tag",
    )

    def __init__(
        self,
        source: int | None,
        tag: int,
        check: Check,
        place: Place,
        future: Future[Arrival],
        merge: Merge | None = None,
    ) -> None:
        self.source, self.tag = source, tag
        self.check, self.place, self.future = check, place, future
        self.merge = merge
        self.number = 0
        self.arrival: Arrival | None = None
        self.error: Exception | None = None
        self.settled: Future[None] | None = None

    def fail(self, error: Exception) -> None:
        """End the wait with ``error``, and mark the error as retrieved."""
        self.error = error
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()
