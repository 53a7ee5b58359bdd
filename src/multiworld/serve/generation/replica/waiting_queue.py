"""Waiting sequences, by tenant. Pure."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterator

from multiworld.serve.generation.replica.scheduled_sequence import ScheduledSequence
from multiworld.serve.tenants.fair_queue import Share


class WaitingQueue:
    """Waiting sequences: each tenant's, and probes, in order of arrival."""

    def __init__(self) -> None:
        self._queues: dict[Share | None, list[ScheduledSequence]] = {}

    def add(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence in its order of arrival."""
        queue = self._queues.setdefault(_queue_key(sequence), [])
        bisect.insort(queue, sequence, key=_number)

    def remove(self, sequence: ScheduledSequence) -> None:
        queue = self._queues.get(_queue_key(sequence), [])
        index = bisect.bisect_left(queue, sequence.number, key=_number)
        if index < len(queue) and queue[index] is sequence:
            del queue[index]
            if not queue:
                del self._queues[_queue_key(sequence)]

    def heads(self, full: Collection[str] = ()) -> Iterator[ScheduledSequence]:
        """Yield each tenant's first sequence that waits for none of ``full``."""
        for share, queue in self._queues.items():
            if share is None:
                continue
            usable = (
                queue if not full else filter(lambda s: not s.waits_for(full), queue)
            )
            yield from next(zip(usable, strict=False), ())

    def probes(self) -> list[ScheduledSequence]:
        """Return the waiting probes, in order of arrival."""
        return list(self._queues.get(None, ()))

    def above(self, priority: int) -> list[ScheduledSequence]:
        """Return the waiting sequences of higher priorities, except probes."""
        return [
            sequence
            for share, queue in self._queues.items()
            if share is not None and share.priority > priority
            for sequence in queue
        ]

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
