"""Waiting sequences, by tenant. Pure."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterator

from multiworld.serve.queueing.fair_queue import Share
from multiworld.serve.replica.scheduling.scheduled_sequence import ScheduledSequence


class WaitingQueue:
    """Queues of each tenant's waiting sequences, and of probes, in order of arrival."""

    def __init__(self) -> None:
        self._queues: dict[Share | None, list[ScheduledSequence]] = {}

    def add(self, sequence: ScheduledSequence) -> None:
        queue = self._queues.setdefault(_queue_key(sequence), [])
        bisect.insort(queue, sequence, key=_number)

    def remove(self, sequence: ScheduledSequence) -> None:
        queue = self._queues.get(_queue_key(sequence), [])
        index = bisect.bisect_left(queue, sequence.number, key=_number)
        if index < len(queue) and queue[index] is sequence:
            del queue[index]
            if not queue:
                del self._queues[_queue_key(sequence)]

    def shares(self) -> list[Share]:
        return [share for share in self._queues if share is not None]

    def has(self, share: Share) -> bool:
        return share in self._queues

    def head(
        self, share: Share, full: Collection[str] = ()
    ) -> ScheduledSequence | None:
        """Return a tenant's first sequence that waits for none of ``full``."""
        queue = self._queues.get(share, ())
        return next((s for s in queue if not full or not s.waits_for(full)), None)

    def heads(self, full: Collection[str] = ()) -> Iterator[ScheduledSequence]:
        """Yield each tenant's first sequence that waits for none of ``full``."""
        for share in self.shares():
            head = self.head(share, full)
            if head is not None:
                yield head

    def probes(self) -> list[ScheduledSequence]:
        return list(self._queues.get(None, ()))

    def above(self, priority: int) -> list[Iterator[ScheduledSequence]]:
        """Return the waiting sequences of each tenant of a higher priority."""
        return [self._of(s) for s in self.shares() if s.priority > priority]

    def _of(self, share: Share) -> Iterator[ScheduledSequence]:
        """Yield a tenant's sequences in order; the queue may change meanwhile."""
        number = -1
        while True:
            queue = self._queues.get(share, [])
            at = bisect.bisect_right(queue, number, key=_number)
            if at == len(queue):
                return
            number = queue[at].number
            yield queue[at]

    def tokens(self, max_tokens: int) -> dict[Share, int]:
        """Return each tenant's number of waiting tokens, up to about ``max_tokens``."""
        found: Counter[Share] = Counter()
        for queue in self._queues.values():
            for sequence in queue:
                found[sequence.share] += sequence.lacking
                if found[sequence.share] >= max_tokens:
                    break
        return found


def _queue_key(sequence: ScheduledSequence) -> Share | None:
    return None if sequence.is_probe else sequence.share


def _number(sequence: ScheduledSequence) -> int:
    return sequence.number
