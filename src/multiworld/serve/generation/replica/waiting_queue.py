"""Waiting sequences, by tenant. Pure."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterator

from multiworld.serve.generation.replica.scheduled_sequence import ScheduledSequence
from multiworld.serve.tenants.fair_queue import Share


class WaitingLine:
    """Waiting sequences: each tenant's in order of arrival, probes before all."""

    def __init__(self) -> None:
        self._lines: dict[Share | None, list[ScheduledSequence]] = {}

    def add(self, sequence: ScheduledSequence) -> None:
        """Queue a sequence in its order of arrival."""
        line = self._lines.setdefault(_line_of(sequence), [])
        bisect.insort(line, sequence, key=_number)

    def remove(self, sequence: ScheduledSequence) -> None:
        line = self._lines.get(_line_of(sequence), [])
        place = bisect.bisect_left(line, sequence.number, key=_number)
        if place < len(line) and line[place] is sequence:
            del line[place]
            if not line:
                del self._lines[_line_of(sequence)]

    def heads(self, full: Collection[str] = ()) -> Iterator[ScheduledSequence]:
        """Yield the first sequence of each line that waits for none of ``full``."""
        for line in self._lines.values():
            usable = line if not full else filter(lambda s: not s.waits_for(full), line)
            yield from next(zip(usable, strict=False), ())

    def above(self, priority: int) -> list[ScheduledSequence]:
        """Return the waiting sequences of higher priorities, except probes."""
        return [
            sequence
            for share, line in self._lines.items()
            if share is not None and share.priority > priority
            for sequence in line
        ]

    def tokens(self, most: int) -> dict[Share, int]:
        """Return each tenant's number of waiting tokens, up to about ``most``."""
        found: Counter[Share] = Counter()
        for line in self._lines.values():
            for sequence in line:
                found[sequence.share] += sequence.lacking
                if found[sequence.share] >= most:
                    break
        return found


def _line_of(sequence: ScheduledSequence) -> Share | None:
    return None if sequence.is_probe else sequence.share


def _number(sequence: ScheduledSequence) -> int:
    return sequence.number
