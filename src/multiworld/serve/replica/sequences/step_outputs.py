"""Messages with the results of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from multiworld.serve.engine.compute.stage_engine import Computed
from multiworld.serve.replica.sequences.sequence_state import SequenceTable
from multiworld.serve.wire.generation_messages import (
    SequenceStart,
    Step,
    StepDone,
    StepPart,
    TokenItem,
    Tokens,
)
from multiworld.serve.wire.protocol import Key

NO_ROWS = torch.empty(0, 0)


def by_gateway(tokens: Iterable[TokenItem]) -> Iterator[tuple[str, Tokens]]:
    found: dict[str, list[TokenItem]] = {}
    for item in tokens:
        found.setdefault(item.key[0], []).append(item)
    for gateway, items in found.items():
        yield gateway, Tokens(tuple(items))


def outcome(
    number: int,
    parts: Sequence[StepPart],
    tokens: Sequence[TokenItem],
    # Tokens sampled in KV rebuilds; those used here are removed.
    rebuilt: dict[Key, int | None],
) -> StepDone:
    """Return the message that reports a step's tokens to its scheduler."""
    sampled = {t.key: None if t.finish else t.token for t in tokens}
    for part in parts:
        if part.samples and part.key in rebuilt:
            sampled[part.key] = rebuilt.pop(part.key)
    return StepDone(number, tuple((part.key, sampled.get(part.key)) for part in parts))


def steps_on(
    stage: int,
    origin: str,  # replica that scheduled the step, and gave it ``number``
    number: int,
    parts: Sequence[StepPart],
    found: Computed,
    table: SequenceTable,  # records which rows were sent
) -> Iterator[tuple[str, Step, Tensor]]:
    """Yield each next-stage replica of the parts, its ``Step`` and the rows to send."""
    failed = {key for key, _ in found.failed}
    by_peer: dict[str, list[StepPart]] = {}
    starts: dict[str, list[SequenceStart]] = {}
    for part in parts:
        state = table.get(part.key)
        if state is None or part.key in failed:
            continue
        # Leave out the rows that the next stage already has.
        count = state.take_unsent(part.begin, part.count)
        begin = part.begin + part.count - count
        on = StepPart(part.key, begin, count, part.samples)
        peer = state.start.chain[stage + 1]
        by_peer.setdefault(peer, []).append(on)
        if state.is_untold:
            state.is_untold = False
            starts.setdefault(peer, []).append(state.start)
    for peer, ons in by_peer.items():
        hidden = _rows_for(ons, found)
        new = tuple(starts.get(peer, ()))
        yield peer, Step(origin, number, tuple(ons), new), hidden


def _rows_for(ons: Sequence[StepPart], found: Computed) -> Tensor:
    """Return the output rows of the parts ``ons``, [rows, hidden].

    Each of them is the end of a computed part.
    """
    count = sum(on.count for on in ons)
    if not count or found.hidden is None:
        return NO_ROWS
    if count == len(found.hidden):  # the next stage gets all rows, in this order
        return found.hidden.clone()  # a copy, because the stage may reuse the memory
    rows_of = found.rows()
    return torch.cat([rows_of[on.key][-on.count :] for on in ons if on.count])
