"""The mailbox, which matches messages with receives. Shell.

This module does no I/O and never waits. Messages of one source and tag are matched in
the order they were sent, receives in the order they were posted. A message without a
posted receive is held, up to a budget for each source. Beyond the budget ``begin``
returns None, and the source's lane stops reading until its ``on_room`` is called.

Cancelling a receive loses nothing: a message on its way into the caller's tensor moves
to memory of the mailbox and goes to the next receive. Receives that already have later
messages, and have not returned them, pass theirs on in the same way.
"""

from __future__ import annotations

import itertools
from asyncio import Future
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from multiworld.backends.dtypes import DTYPES, memory_of
from multiworld.backends.tensor_pool import RECYCLED_BYTES, recycler


class Description(NamedTuple):
    """Description of a message, from its first header.

    Attributes:
        kind: TENSOR, BUNDLE, OBJECT or COLLECTIVE of ``direct.header``.
        dtype: Wire code of the elements; see ``dtypes``.
        shape: Dimensions of the tensor.
        size: Bytes of the whole message.
        tag: Tag, or number of the collective.
        label: Bytes of a bundle's manifest, or a collective's operation code.
    """

    kind: int
    dtype: int
    shape: tuple[int, ...]
    size: int
    tag: int
    label: int


Check = Callable[[int, Description], Exception | None]
"""Function of source and message; returns the error of a receive that refuses it."""

Place = Callable[[Description], Tensor | None]
"""Function that returns the tensor to receive into, or None for new memory."""

Merge = Callable[[int, memoryview], None]
"""Function that merges a part of a payload, from this byte on, into a tensor."""

SourceErrorMaker = Callable[[int], Exception]
"""Function of a source that returns the error for receives from it."""


class Arrival:
    """A message that has begun to arrive, and its memory.

    Args:
        number: Position among all messages and receives of the mailbox.
        source: Rank of the sender.
        description: Description of the message.
        place: The caller's tensor to receive into; None allocates one.
    """

    __slots__ = (
        "description",
        "is_borrowed",
        "is_complete",
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
        self, number: int, source: int, description: Description, place: Tensor | None
    ) -> None:
        self.number, self.source, self.description = number, source, description
        self.is_borrowed = place is not None
        self.tensor = allocate(description) if place is None else place
        self.memory = memory_of(self.tensor)
        self.received = 0
        self.is_complete = False
        self.merge: Merge | None = None
        self.is_merged = False
        self.receive: Receive | None = None
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
    """Return an uninitialised tensor for a message.

    It has the message's dtype and shape if they match its size, as a tensor's do.
    Otherwise it is flat, of uint8.
    """
    dtype, shape = DTYPES[description.dtype], description.shape
    count = _product(shape)
    if description.size != count * dtype.itemsize:
        dtype, shape, count = torch.uint8, (description.size,), description.size
    if description.size < RECYCLED_BYTES:
        return torch.empty(shape, dtype=dtype)
    return recycler.empty(count, dtype).view(shape)


MESSAGE_BYTES = 512
"""Approximate bytes that a message costs beside its payload."""


def _weight(description: Description) -> int:
    return description.size + MESSAGE_BYTES


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


class Receive:
    """A posted receive.

    Args:
        source: Rank to receive from; None takes the first message of any rank.
        tag: Tag to match.
        check: Returns the error for a message that this receive refuses, or None.
        place: Returns the tensor to receive into, or None for new memory.
        future: Completed when the message has arrived.
        merge: Called with each part of a payload in shared memory, which is then not
            copied (``Arrival.is_merged``). Such a receive cannot be cancelled once its
            message has begun.
    """

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


class Mailbox:
    """Matches the messages of all sources of one channel with receives.

    Invariant: no held message matches a posted receive.

    Args:
        sources: Ranks of the other members.
        budget_bytes: Most bytes of unexpected messages to hold for each source.
    """

    def __init__(self, sources: frozenset[int], budget_bytes: int) -> None:
        self._sources = sources
        self._budget = budget_bytes
        self._posted: dict[int, deque[Receive]] = defaultdict(deque)
        self._queues: dict[tuple[int, int], deque[Arrival]] = {}
        self._taken: set[Receive] = set()
        # Receives whose message is complete and not returned to the caller yet.
        self._served: dict[tuple[int, int], deque[Receive]] = {}
        self._held = dict.fromkeys(sources, 0)
        self._ended: dict[int, SourceErrorMaker] = {}
        self._stalled: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._broken: Callable[[], Exception] | None = None

    # The receiver's side.

    def post(self, receive: Receive) -> None:
        """Match ``receive`` with a held message, or queue it until one arrives."""
        receive.number = next(self._numbers)
        arrival = self._head(receive)
        if self._broken is not None and arrival is None:
            receive.fail(self._broken())
            return
        if arrival is not None:
            self._offer(arrival, receive)
        elif (error := self._no_source_left(receive)) is not None:
            receive.fail(error)
        else:
            self._posted[receive.tag].append(receive)
        if self._stalled:
            self._make_room()

    def cancel(self, receive: Receive) -> None:
        """Withdraw ``receive``; its message, if any, returns to its queue."""
        self._unpost(receive)
        self._taken.discard(receive)
        arrival = receive.arrival
        self.settle(receive)
        if arrival is not None and (self._broken is None or arrival.is_complete):
            self._put_back(arrival)

    def settle(self, receive: Receive) -> None:
        """Forget a receive that has returned its message, or was cancelled."""
        arrival = receive.arrival
        if arrival is not None:
            key = arrival.source, arrival.description.tag
            served = self._served.get(key)
            if served is not None and receive in served:
                served.remove(receive)
                if not served:
                    del self._served[key]
            # Break the reference cycle: memory must be free once its tensor is dropped.
            receive.arrival = arrival.receive = None
        if receive.settled is not None and not receive.settled.done():
            receive.settled.set_result(None)

    def earlier(self, receive: Receive) -> Receive | None:
        """Return a receive that has an earlier message and has not returned it yet.

        Args:
            receive: A receive whose message is complete.
        """
        arrival = receive.arrival
        if arrival is None or not self._served:
            return None
        served = self._served.get((arrival.source, arrival.description.tag))
        return None if not served or served[0] is receive else served[0]

    def _put_back(self, arrival: Arrival) -> None:
        """Return a message to its position, before all later ones that are here."""
        receives = self._with_later(arrival)
        messages = deque([arrival])
        for receive in receives:
            assert receive.arrival is not None
            messages.append(receive.arrival)
        for message in messages:
            message.own()
            message.receive = None
        for receive in receives:
            self._give(receive, messages)
        for message in messages:
            self._hold(message)
            self._rematch(message)

    def _with_later(self, arrival: Arrival) -> list[Receive]:
        """Return the receives that have later messages of the same source and tag."""
        key = arrival.source, arrival.description.tag
        found = [*self._served.get(key, ())]
        found += [
            receive
            for receive in self._taken
            if receive.arrival is not None
            and (receive.arrival.source, receive.arrival.description.tag) == key
        ]
        return [
            receive
            for receive in found
            if receive.arrival is not None and receive.arrival.number > arrival.number
        ]

    def _give(self, receive: Receive, messages: deque[Arrival]) -> None:
        """Give a receive the first of these messages instead of the one it had."""
        receive.arrival = None
        first = messages[0]
        error = receive.check(first.source, first.description)
        key = first.source, first.description.tag
        if error is not None:
            self._taken.discard(receive)
            if receive in self._served.get(key, ()):
                self._served[key].remove(receive)
            receive.fail(error)
            self.settle(receive)
            return
        messages.popleft()
        first.receive, receive.arrival = receive, first
        if first.is_complete and receive in self._taken:
            self._taken.discard(receive)
            self._serve(receive, first)

    def _serve(self, receive: Receive, arrival: Arrival) -> None:
        """Wake a receive whose message is complete."""
        key = arrival.source, arrival.description.tag
        self._served.setdefault(key, deque()).append(receive)
        if not receive.future.done():  # done if it was cancelled in this turn
            receive.future.set_result(arrival)

    def _unpost(self, receive: Receive) -> None:
        waiting = self._posted.get(receive.tag)
        if waiting is None:
            return
        if receive in waiting:
            waiting.remove(receive)
        if not waiting:
            del self._posted[receive.tag]

    def _head(self, receive: Receive) -> Arrival | None:
        if receive.source is not None:
            queue = self._queues.get((receive.source, receive.tag))
            return queue[0] if queue else None
        heads = [
            queue[0] for (_, tag), queue in self._queues.items() if tag == receive.tag
        ]
        return min(heads, key=lambda arrival: arrival.number, default=None)

    def _offer(self, arrival: Arrival, receive: Receive) -> bool:
        """Give a held message to ``receive``; fail a receive that refuses it."""
        error = receive.check(arrival.source, arrival.description)
        if error is not None:
            receive.fail(error)
            return False
        key = arrival.source, arrival.description.tag
        queue = self._queues[key]
        queue.popleft()
        if not queue:
            del self._queues[key]
        self._held[arrival.source] -= _weight(arrival.description)
        self._take(arrival, receive)
        return True

    def _take(self, arrival: Arrival, receive: Receive) -> None:
        arrival.receive, receive.arrival = receive, arrival
        if arrival.on_taken is not None:
            arrival.on_taken()
        if arrival.is_complete:
            self._serve(receive, arrival)
        else:
            self._taken.add(receive)

    def _hold(self, arrival: Arrival) -> None:
        key = arrival.source, arrival.description.tag
        queue = self._queues.setdefault(key, deque())
        if queue and queue[-1].number > arrival.number:  # from ``_put_back``
            earlier = sum(1 for other in queue if other.number < arrival.number)
            queue.insert(earlier, arrival)
        else:
            queue.append(arrival)
        self._held[arrival.source] += _weight(arrival.description)

    def _rematch(self, arrival: Arrival) -> None:
        for receive in self._waiting_for(arrival.source, arrival.description.tag):
            self._unpost(receive)
            if self._offer(arrival, receive):
                return

    def _waiting_for(self, source: int, tag: int) -> list[Receive]:
        waiting = self._posted.get(tag)
        if not waiting:
            return []
        return [r for r in waiting if r.source is None or r.source == source]

    def _no_source_left(self, receive: Receive) -> Exception | None:
        if receive.source is not None:
            make_error = self._ended.get(receive.source)
            return None if make_error is None else make_error(receive.source)
        if self._sources and len(self._ended) == len(self._sources):
            source, make_error = next(reversed(self._ended.items()))
            return make_error(source)
        return None

    # The lanes' side.

    def is_clear(self, source: int, tag: int) -> bool:
        """Tell whether the source's next message would be the first of its tag.

        False if a message is held, or any receive with this tag is posted.
        """
        return (
            tag not in self._posted
            and (source, tag) not in self._queues
            and self._broken is None
        )

    def is_wanted(self, source: int, tag: int) -> bool:
        """Tell whether a receive is posted for a message of this source and tag."""
        waiting = self._posted.get(tag)
        if not waiting:
            return False
        if waiting[0].source in (source, None):  # the common case
            return True
        return any(receive.source in (source, None) for receive in waiting)

    def begin(self, source: int, description: Description) -> Arrival | None:
        """Start a message whose first header has arrived.

        Receives that refuse the message fail; the message waits for the next one.

        Returns:
            The message to fill, or None if the source's budget is spent.

        Raises:
            MemoryError, RuntimeError: There is no memory for the message. A matching
                receive stays posted.
        """
        waiting = self._posted.get(description.tag)
        for receive in list(waiting) if waiting else ():
            if receive.source not in (source, None):
                continue
            error = receive.check(source, description)
            if error is None:
                place = receive.place(description)
                number = next(self._numbers)
                # Before the receive is removed, because allocating may fail.
                arrival = Arrival(number, source, description, place)
                self._unpost(receive)
                arrival.receive, receive.arrival = receive, arrival
                arrival.merge = receive.merge
                self._taken.add(receive)
                return arrival
            self._unpost(receive)
            receive.fail(error)
        if self._held[source] + _weight(description) > self._budget:
            return None
        arrival = Arrival(next(self._numbers), source, description, None)
        self._hold(arrival)
        return arrival

    def finish(self, arrival: Arrival) -> None:
        """Complete a message whose last byte has arrived; wake its receive."""
        arrival.is_complete = True
        receive = arrival.receive
        if receive is not None:
            self._taken.discard(receive)
            self._serve(receive, arrival)

    def revoke(self, arrival: Arrival) -> None:
        """Drop a message that its sender withdrew; its receive waits again."""
        receive = arrival.receive
        if receive is None:
            self._unhold(arrival)
            return
        receive.arrival = None
        self._taken.discard(receive)
        held = self._head(receive)  # exists if the receive takes from any source
        if held is None or not self._offer(held, receive):
            self._repost(receive)
        self._make_room()

    def _unhold(self, arrival: Arrival) -> None:
        key = arrival.source, arrival.description.tag
        queue = self._queues.get(key)
        if queue is None or arrival not in queue:
            return  # the mailbox was aborted meanwhile
        queue.remove(arrival)
        if not queue:
            del self._queues[key]
        self._held[arrival.source] -= _weight(arrival.description)

    def _repost(self, receive: Receive) -> None:
        if receive.future.done():
            return
        waiting = self._posted[receive.tag]
        earlier = sum(1 for other in waiting if other.number < receive.number)
        waiting.insert(earlier, receive)

    def deliver(self, source: int, description: Description, tensor: Tensor) -> Arrival:
        """Take a complete message at once, regardless of the budget.

        Args:
            source: Rank of the sender.
            description: Description of the message.
            tensor: Content; it belongs to the mailbox from now on.

        Returns:
            The message, held or given to a receive.
        """
        arrival = Arrival(next(self._numbers), source, description, tensor)
        arrival.is_borrowed = False
        arrival.received = description.size
        arrival.is_complete = True
        self._hold(arrival)
        self._rematch(arrival)
        return arrival

    def stall(self, source: int, on_room: Callable[[], None]) -> None:
        """Register ``on_room``, called once when ``begin`` is worth another try."""
        self._stalled[source] = on_room

    def _make_room(self) -> None:
        stalled, self._stalled = self._stalled, {}
        for on_room in stalled.values():
            on_room()

    def end(self, source: int, make_error: SourceErrorMaker) -> None:
        """Mark that ``source`` sends no more messages.

        Complete messages can still be received. Receives that only ``source`` could
        serve fail with ``make_error(source)``, now and later.
        """
        if source in self._ended:
            return
        self._ended[source] = make_error
        self._drop_unfinished(source, make_error)
        for waiting in list(self._posted.values()):
            for receive in list(waiting):
                error = self._no_source_left(receive)
                if error is not None:
                    self._unpost(receive)
                    receive.fail(error)

    def _drop_unfinished(self, source: int, make_error: SourceErrorMaker) -> None:
        """Drop the incomplete messages of ``source`` and fail their receives."""
        for receive in list(self._taken):
            if receive.arrival is not None and receive.arrival.source == source:
                self._taken.discard(receive)
                receive.arrival = None
                receive.fail(make_error(source))
        for queue in list(self._queues.values()):
            for arrival in list(queue):
                if arrival.source == source and not arrival.is_complete:
                    self._unhold(arrival)

    def abort(self, make_error: Callable[[], Exception]) -> None:
        """Fail every receive; later ones get what is held complete, or fail too."""
        if self._broken is not None:
            return
        self._broken = make_error
        waiting = [receive for posted in self._posted.values() for receive in posted]
        for receive in [*waiting, *self._taken]:
            receive.fail(make_error())
        self._posted.clear()
        self._taken.clear()
        self._stalled.clear()
        for queue in list(self._queues.values()):
            for arrival in list(queue):
                if not arrival.is_complete:
                    self._unhold(arrival)

    def clear(self) -> None:
        """Drop all held messages: the world was closed by this process."""
        self._queues.clear()
        self._held = dict.fromkeys(self._held, 0)

    def has_message(self, source: int | None, tag: int) -> bool:
        """Tell whether a complete message waits for a receive.

        Args:
            source: Rank of the sender; None: any.
            tag: Tag of the message.
        """
        return any(
            queue[0].is_complete
            for (rank, known), queue in self._queues.items()
            if known == tag and source in (None, rank)
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of held messages, with ``MESSAGE_BYTES`` for each."""
        return sum(self._held.values())

    @property
    def waiting_count(self) -> int:
        """Number of receives that wait for a message or for its end."""
        return sum(map(len, self._posted.values())) + len(self._taken)
