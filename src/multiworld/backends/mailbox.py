"""The mailbox, which matches messages with receives; it does no I/O and never waits.
For each source and tag, messages match receives in the order of sending and posting."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Container

from torch import Tensor

from multiworld.backends.arrivals import (
    DIMENSION_BYTES,
    MESSAGE_BYTES,
    Arrival,
    Description,
    Lent,
    Receive,
    allocate,
)
from multiworld.backends.base import Handler, Peek
from multiworld.backends.dtypes import UINT8
from multiworld.backends.header import TENSOR

logger = logging.getLogger("multiworld")

# Makes the error for receives from a source.
SourceErrorMaker = Callable[[int], Exception]


class Mailbox:
    """Messages and receives of a channel.

    No message in the mailbox matches a posted receive.
    """

    def __init__(self, sources: frozenset[int], budget_bytes: int) -> None:
        self._sources = sources
        self._budget = budget_bytes
        self._posted: dict[int, deque[Receive]] = defaultdict(deque)
        self._queues: dict[tuple[int, int], deque[Arrival]] = {}
        self._taken: set[Receive] = set()
        # Receives whose message is complete but not yet returned to the caller.
        self._served: dict[tuple[int, int], deque[Receive]] = {}
        self._held = dict.fromkeys(sources, 0)
        self._ended: dict[int, SourceErrorMaker] = {}
        self._stalled: dict[int, Callable[[], None]] = {}
        self._handlers: dict[tuple[int, int], Handler] = {}
        self._peeks: dict[tuple[int, int], Peek] = {}
        self._numbers = itertools.count(1)
        self._broken: Callable[[], Exception] | None = None
        # Accept everything that has arrived, even beyond the budget.
        self._is_ending = False

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

    def handle(
        self, source: int, tag: int, handler: Handler, peek: Peek | None = None
    ) -> None:
        """Pass the tensors of a source and tag, held ones first, to ``handler``."""
        # Messages of other kinds wait for receives. Handled messages use no budget.
        key = source, tag
        self._handlers[key] = handler
        self._peeks.pop(key, None)
        if peek is not None:
            self._peeks[key] = peek
        held = self._queues.get(key, ())
        for arrival in [a for a in held if a.description.kind == TENSOR]:
            self._unhold(arrival)
            arrival.handler = handler
            if arrival.on_taken is not None:
                arrival.on_taken()
            if arrival.is_complete:
                _pass(arrival.tensor, handler)
        if self._stalled:
            self._make_room()

    def peek_of(self, source: int, description: Description) -> Peek | None:
        if not self._peeks or description.kind != TENSOR or description.dtype != UINT8:
            return None
        return self._peeks.get((source, description.tag))

    def _handler_of(self, source: int, description: Description) -> Handler | None:
        if not self._handlers or description.kind != TENSOR:
            return None
        return self._handlers.get((source, description.tag))

    def cancel(self, receive: Receive) -> None:
        """Withdraw ``receive``; put its message, if any, back into the queue."""
        self._unpost(receive)
        self._taken.discard(receive)
        arrival = receive.arrival
        self.settle(receive)
        # Put the message back. A receive that got a later message, and has not returned
        # it to its caller, then gets this earlier one instead.
        if arrival is not None and (self._broken is None or arrival.is_complete):
            self._put_back(arrival)

    def settle(self, receive: Receive) -> None:
        """Forget a receive that has returned its message, or was cancelled."""
        arrival = receive.arrival
        if arrival is not None:
            served = self._served.get(arrival.key)
            if served is not None and receive in served:
                served.remove(receive)
                if not served:
                    del self._served[arrival.key]
            # Break the reference cycle, so that the memory is freed as soon as the
            # tensor is dropped.
            receive.arrival = arrival.receive = None
        if receive.settled is not None and not receive.settled.done():
            receive.settled.set_result(None)

    def earlier(self, receive: Receive) -> Receive | None:
        """Return a receive that has an earlier message and has not returned it yet."""
        arrival = receive.arrival
        if arrival is None or not self._served:
            return None
        served = self._served.get(arrival.key)
        return None if not served or served[0] is receive else served[0]

    def _put_back(self, arrival: Arrival) -> None:
        """Return a message to its position in the queue, before all later messages."""
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
        return [
            receive
            for receive in (*self._served.get(arrival.key, ()), *self._taken)
            if (later := receive.arrival) is not None
            and later.key == arrival.key
            and later.number > arrival.number
        ]

    def _give(self, receive: Receive, messages: deque[Arrival]) -> None:
        """Replace a receive's message by the first of ``messages``; fail the receive if
        the new message does not fit."""
        receive.arrival = None
        first = messages[0]
        error = receive.check(first.source, first.description)
        if error is not None:
            self._taken.discard(receive)
            if receive in self._served.get(first.key, ()):
                self._served[first.key].remove(receive)
            receive.fail(error)
            self.settle(receive)
            return
        messages.popleft()
        first.receive, receive.arrival = receive, first
        if first.is_complete and receive in self._taken:
            self._taken.discard(receive)
            self._serve(receive, first)

    def _serve(self, receive: Receive, arrival: Arrival) -> None:
        self._served.setdefault(arrival.key, deque()).append(receive)
        # The future is done if the receive was cancelled in this loop iteration.
        if not receive.future.done():
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
        self._unhold(arrival)
        arrival.receive, receive.arrival = receive, arrival
        if arrival.on_taken is not None:
            arrival.on_taken()
        if arrival.is_complete:
            self._serve(receive, arrival)
        else:
            self._taken.add(receive)
        return True

    def _hold(self, arrival: Arrival) -> None:
        queue = self._queues.setdefault(arrival.key, deque())
        if queue and queue[-1].number > arrival.number:  # ``_put_back`` put it back
            earlier = sum(1 for other in queue if other.number < arrival.number)
            queue.insert(earlier, arrival)
        else:
            queue.append(arrival)
        self._held[arrival.source] += _weight(arrival.description)

    def _rematch(self, arrival: Arrival) -> None:
        for receive in list(self._posted.get(arrival.description.tag, ())):
            if receive.source in (arrival.source, None):
                self._unpost(receive)
                if self._offer(arrival, receive):
                    return

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
        """Return whether the source's next message would be the first of its tag."""
        return (
            tag not in self._posted
            and (source, tag) not in self._queues
            and (source, tag) not in self._served
            and (source, tag) not in self._handlers
            and self._broken is None
        )

    def is_wanted(self, source: int, tag: int) -> bool:
        """Return whether a receive or a handler waits for this source and tag."""
        if (source, tag) in self._handlers:
            return True
        waiting = self._posted.get(tag)
        if not waiting:
            return False
        if waiting[0].source in (source, None):  # a shortcut for the common case
            return True
        return any(receive.source in (source, None) for receive in waiting)

    def begin(
        self, source: int, description: Description, lent: Lent | None = None
    ) -> Arrival | None:
        """Start a message whose header has arrived; None if the budget is spent."""
        handler = self._handler_of(source, description)
        if handler is not None:
            arrival = self._own(source, description, lent)
            arrival.handler = handler
            return arrival
        if source in self._ended:
            # A message before this one may be lost, so nobody receives this one.
            return self._own(source, description, lent)
        waiting = self._posted.get(description.tag)
        for receive in list(waiting) if waiting else ():
            if receive.source not in (source, None):
                continue
            error = receive.check(source, description)
            if error is None:
                place = receive.place(description)
                # Allocate before removing the receive from the queue, because
                # allocating may fail.
                if place is None and receive.merge is None:
                    arrival = self._own(source, description, lent)
                else:
                    arrival = Arrival(
                        next(self._numbers),
                        source,
                        description,
                        allocate(description) if place is None else place,
                        is_borrowed=place is not None,
                        merge=receive.merge,
                    )
                self._unpost(receive)
                arrival.receive, receive.arrival = receive, arrival
                self._taken.add(receive)
                return arrival
            self._unpost(receive)
            receive.fail(error)
        # If the budget is used up, return None: the lane then stops reading until its
        # ``on_room`` is called (see ``stall``).
        over = self._held[source] + _weight(description) > self._budget
        if over and not self._is_ending:
            return None
        arrival = self._own(source, description, lent)
        self._hold(arrival)
        return arrival

    def _own(self, source: int, description: Description, lent: Lent | None) -> Arrival:
        is_lent = lent is not None
        tensor = allocate(description) if lent is None else lent(description)
        return Arrival(
            next(self._numbers), source, description, tensor, is_lent=is_lent
        )

    def finish(self, arrival: Arrival) -> None:
        """Complete a message whose last byte has arrived; wake its receive."""
        arrival.is_complete = True
        if arrival.handler is not None:
            _pass(arrival.tensor, arrival.handler)
            return
        receive = arrival.receive
        if receive is not None:
            self._taken.discard(receive)
            self._serve(receive, arrival)

    def revoke(self, arrival: Arrival) -> None:
        """Drop a message that its sender has withdrawn; its receive waits again."""
        receive = arrival.receive
        if receive is None:
            self._unhold(arrival)
            return
        receive.arrival = None
        self._taken.discard(receive)
        # Only a receive from any source (``source`` None) may find a held message.
        held = self._head(receive)
        if held is None or not self._offer(held, receive):
            self._repost(receive)
        self._make_room()

    def _unhold(self, arrival: Arrival) -> None:
        queue = self._queues.get(arrival.key)
        if queue is None or arrival not in queue:
            return  # the mailbox was aborted in the meantime
        queue.remove(arrival)
        if not queue:
            del self._queues[arrival.key]
        self._held[arrival.source] -= _weight(arrival.description)

    def _repost(self, receive: Receive) -> None:
        if receive.future.done():
            return
        waiting = self._posted[receive.tag]
        earlier = sum(1 for other in waiting if other.number < receive.number)
        waiting.insert(earlier, receive)

    def deliver(self, source: int, description: Description, tensor: Tensor) -> Arrival:
        """Accept a complete message and its ``tensor``, ignoring the budget."""
        arrival = Arrival(
            next(self._numbers),
            source,
            description,
            tensor,
            received=description.size,
            is_complete=True,
        )
        arrival.handler = self._handler_of(source, description)
        if arrival.handler is not None:
            _pass(tensor, arrival.handler)
            return arrival
        self._hold(arrival)
        self._rematch(arrival)
        return arrival

    def stall(self, source: int, on_room: Callable[[], None]) -> None:
        """Register ``on_room``, to be called once when ``begin`` may succeed."""
        self._stalled[source] = on_room

    def _make_room(self) -> None:
        stalled, self._stalled = self._stalled, {}
        for on_room in stalled.values():
            on_room()

    def lift_budget(self) -> None:
        """Ignore the budget from now on: little more can arrive."""
        self._is_ending = True

    def end(self, source: int, make_error: SourceErrorMaker) -> None:
        """Note that ``source`` sends no more; complete messages stay receivable."""
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
        for receive in list(self._taken):
            if receive.arrival is not None and receive.arrival.source == source:
                self._taken.discard(receive)
                receive.arrival.detach()
                receive.fail(make_error(source))
        self._unhold_unfinished((source,))

    def _unhold_unfinished(self, sources: Container[int]) -> None:
        for arrival in [held for queue in self._queues.values() for held in queue]:
            if arrival.source in sources and not arrival.is_complete:
                self._unhold(arrival)

    def abort(self, make_error: Callable[[], Exception]) -> None:
        """Fail every receive; later receives get complete held messages, or fail."""
        if self._broken is not None:
            return
        self._broken = make_error
        waiting = [receive for posted in self._posted.values() for receive in posted]
        for receive in [*waiting, *self._taken]:
            receive.fail(make_error())
            if receive.arrival is not None:
                receive.arrival.detach()
        self._posted.clear()
        self._taken.clear()
        self._stalled.clear()
        self._unhold_unfinished(self._sources)

    def clear(self) -> None:
        """Drop all held messages: the world was closed by this process."""
        self._queues.clear()
        self._held = dict.fromkeys(self._held, 0)

    def has_message(self, source: int | None, tag: int) -> bool:
        return any(
            queue[0].is_complete
            for (rank, known), queue in self._queues.items()
            if known == tag and source in (None, rank)
        )


def _pass(tensor: Tensor, handler: Handler) -> None:
    """Pass a tensor to ``handler``, whose errors must not end the lane."""
    try:
        handler(tensor)
    except Exception:
        logger.exception("a message handler raised an error; it must not raise")


def _weight(description: Description) -> int:
    shape_bytes = DIMENSION_BYTES * len(description.shape)
    return description.size + MESSAGE_BYTES + shape_bytes
