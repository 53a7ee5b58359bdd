"""Log of the hidden states that a stage has sent, for replicas that lack them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multiworld.serve.text.engine_limits import GROWTH
from multiworld.serve.wire.protocol import StreamId


class _Rows:
    """Rows of one sequence, [rows, hidden]: shared pieces, then a growing tail."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.nbytes = 0
        self._shared: list[Tensor] = []
        self._tail_begin = begin
        self._tail: Tensor | None = None

    def share(self, piece: Tensor) -> None:
        """Keep a piece without copying it; allowed only while there is no tail."""
        self._shared.append(piece)
        self._tail_begin += len(piece)
        self.nbytes += piece.nbytes

    def write(self, begin: int, rows: Tensor) -> None:
        """Copy rows to the tail, replacing all rows from ``begin`` on."""
        while begin < self._tail_begin:
            self._drop_tail()
            piece = self._shared.pop()
            self._tail_begin -= len(piece)
            self.nbytes -= piece.nbytes
            if begin > self._tail_begin:
                self.share(piece[: begin - self._tail_begin])
        first, end = begin - self._tail_begin, begin - self._tail_begin + len(rows)
        size = 0 if self._tail is None else len(self._tail)
        if self._tail is None or size < end:
            grown = rows.new_empty((max(end, int(GROWTH * size)), rows.shape[1]))
            if self._tail is not None:
                grown[:first] = self._tail[:first]
            self._drop_tail()
            self._tail = grown
            self.nbytes += grown.nbytes
        self._tail[first:end] = rows

    def _drop_tail(self) -> None:
        if self._tail is not None:
            self.nbytes -= self._tail.nbytes
            self._tail = None

    def copied(self, begin: int, end: int) -> Tensor:
        """Return a copy of the rows at [begin, end)."""
        found, at = [], self.begin
        tail = () if self._tail is None else (self._tail,)
        for piece in (*self._shared, *tail):
            first, last = max(begin - at, 0), min(end - at, len(piece))
            if first < last:
                found.append(piece[first:last])
            at += len(piece)
        return torch.cat(found)


class ActivationLog:
    """Outputs of one stage, at most ``limit`` bytes; drops the oldest sequences."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[StreamId, _Rows] = {}
        self.nbytes = 0

    def append(self, sequence: StreamId, begin: int, rows: Tensor) -> list[StreamId]:
        """Keep rows, [rows, hidden]; return the sequences dropped to make room."""
        # ``begin`` is the end of the kept rows, or a position before it. Kept rows from
        # there on are replaced.
        kept = self._kept.get(sequence)
        if kept is None or begin < kept.begin:
            # The sequence is recomputed from an earlier position.
            self.drop(sequence)
            kept = self._kept[sequence] = _Rows(begin)
        self.nbytes -= kept.nbytes
        kept.write(begin, rows)
        self.nbytes += kept.nbytes
        return self._make_room()

    def share(self, sequence: StreamId, pieces: Sequence[Tensor]) -> list[StreamId]:
        """Keep only these pieces of a sequence, uncopied; return dropped sequences."""
        self.drop(sequence)
        kept = self._kept[sequence] = _Rows(0)
        # Each piece is [rows, hidden], immutable, and follows the previous one.
        for piece in pieces:
            kept.share(piece)
        self.nbytes += kept.nbytes
        return self._make_room()

    def rows(self, sequence: StreamId, begin: int, end: int) -> Tensor:
        """Return a copy of kept rows at [begin, end), [rows, hidden]."""
        return self._kept[sequence].copied(begin, end)

    def drop(self, sequence: StreamId) -> None:
        kept = self._kept.pop(sequence, None)
        if kept is not None:
            self.nbytes -= kept.nbytes

    def _make_room(self) -> list[StreamId]:
        dropped: list[StreamId] = []
        while self.nbytes > self._limit:
            oldest = next(iter(self._kept))
            self.drop(oldest)
            dropped.append(oldest)
        return dropped
