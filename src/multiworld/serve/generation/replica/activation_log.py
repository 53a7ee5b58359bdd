"""Log of the hidden states that a stage has sent, for replicas that lack them."""

from __future__ import annotations

from torch import Tensor

from multiworld.serve.generation.engine_limits import GROWTH
from multiworld.serve.generation.replica.sequence_state import StreamId


class ActivationLog:
    """Outputs of one stage for its sequences, at most ``limit`` bytes.

    Beyond that, the rows of the oldest sequence are dropped.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: dict[StreamId, Tensor] = {}
        self._begins: dict[StreamId, int] = {}
        self.nbytes = 0

    def append(self, sequence: StreamId, begin: int, rows: Tensor) -> list[StreamId]:
        """Keep rows of a sequence; those after them are dropped.

        Args:
            sequence: The sequence.
            begin: Position of the first row; right after those that are kept, or
                before their end.
            rows: Shape [rows, hidden].

        Returns:
            Sequences whose rows were dropped to make room.
        """
        first = self._begins.setdefault(sequence, begin)
        if begin < first:  # they were recomputed from an earlier position
            self._forget(sequence)
            first = self._begins[sequence] = begin
        kept, end = self._rows.get(sequence), begin - first + len(rows)
        if kept is None or len(kept) < end:
            size = max(end, int(GROWTH * (0 if kept is None else len(kept))))
            grown = rows.new_empty((size, rows.shape[1]))
            if kept is not None:
                grown[: begin - first] = kept[: begin - first]
                self.nbytes -= kept.nbytes
            self._rows[sequence] = kept = grown
            self.nbytes += grown.nbytes
        kept[begin - first : end] = rows
        dropped: list[StreamId] = []
        while self.nbytes > self._limit:
            oldest = next(iter(self._rows))
            self._forget(oldest)
            dropped.append(oldest)
        return dropped

    def rows(self, sequence: StreamId, begin: int, end: int) -> Tensor:
        """Return a copy of kept rows, [rows, hidden].

        Args:
            sequence: The sequence.
            begin: Position of the first row.
            end: Position after the last row.
        """
        first = self._begins[sequence]
        return self._rows[sequence][begin - first : end - first].clone()

    def drop(self, sequence: StreamId) -> None:
        """Forget the rows of a sequence, if there are any."""
        self._begins.pop(sequence, None)
        self._forget(sequence)

    def _forget(self, sequence: StreamId) -> None:
        kept = self._rows.pop(sequence, None)
        self._begins.pop(sequence, None)
        if kept is not None:
            self.nbytes -= kept.nbytes
