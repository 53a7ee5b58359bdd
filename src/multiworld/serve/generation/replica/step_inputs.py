"""Selection of the rows of a step that are still to be computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multiworld.serve.generation.replica.sequence_state import SequenceTable
from multiworld.serve.transport.generation_messages import StepPart
from multiworld.serve.transport.protocol import Key


def still_lacking(
    parts: Sequence[StepPart], hidden: Tensor, table: SequenceTable
) -> tuple[list[StepPart], Tensor, list[Key]]:
    """Return the parts of known sequences, without rows computed earlier.

    A part without rows is kept: later stages may lack them, and its scheduler waits for
    it.

    Args:
        parts: The parts of the step.
        hidden: Their rows, [rows, hidden].
        table: The sequences of this stage.

    Returns:
        The parts, their rows, and the sequences that lack earlier rows.
    """
    kept, rows, gone, offset = [], [], [], 0
    for part in parts:
        state = table.get(part.key)
        end, offset = offset + part.count, offset + part.count
        if state is None or state.is_evicted:
            continue
        count = state.lacking(part.begin, part.count)
        if count is None:
            gone.append(part.key)
            continue
        begin = part.begin + part.count - count
        kept.append(StepPart(part.key, begin, count, part.samples))
        rows.append(hidden[end - count : end])
    if sum(len(each) for each in rows) == len(hidden):
        return kept, hidden, gone
    return kept, torch.cat(rows) if rows else hidden[:0], gone
