"""Validation of messages about sequences: their sender and their contents.

Every attempt has its own key, and its chain never changes. So each message has one
authorised sender: the gateway begins and ends a sequence, the previous stage sends its
rows, the next stage reports the tokens it has, and the last stage samples. A message
from another sender, or with other rows than it lists, indicates a faulty peer, and that
peer's edge is closed. Messages about unknown sequences are harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from multiworld.serve.replica.sequences.sequence_state import SequenceTable
from multiworld.serve.spec.stage import Tensors
from multiworld.serve.wire import generation_messages
from multiworld.serve.wire.edge_messages import EdgeMessage
from multiworld.serve.wire.generation_messages import SequenceStart, StepPart
from multiworld.serve.wire.protocol import Key, MessageError

# Messages that only later stages may receive. ``OF_STAGE_0``: messages that
# only stage 0 may receive.
OF_LATER_STAGES = (
    generation_messages.ActivationRows,
    generation_messages.Step,
    generation_messages.PreemptSequences,
)
OF_STAGE_0 = (generation_messages.StepDone, generation_messages.KvRebuilt)


def check(
    message: EdgeMessage,
    contents: Sequence[Tensors],  # tensors of the message
    peer: str,  # name of the sender
    name: str,  # name of this replica
    stage: int,
    table: SequenceTable,
) -> None:
    """Raise MessageError for a wrong sender or stage, or for mismatched contents."""
    if isinstance(message, OF_LATER_STAGES if stage == 0 else OF_STAGE_0):
        raise MessageError(f"{peer} sent a {type(message).__name__} to stage {stage}")
    match message:
        case generation_messages.BeginSequences(starts):
            for start in starts:
                _check_start(start, peer, name, stage)
        case generation_messages.PrepareSequence(start):
            _check_start(start, peer, name, stage)
        case generation_messages.EndSequences(
            keys
        ) | generation_messages.PauseSequences(keys):
            if any(key[0] != peer for key in keys):
                raise MessageError(f"{peer} ends sequences of another gateway")
        case generation_messages.KvHeld(key) | generation_messages.KvEvicted(key):
            _check_sender([key], stage + 1, peer, table)
        case generation_messages.ActivationRows(key):
            _rows_of(contents)
            _check_sender([key], stage - 1, peer, table)
        case generation_messages.Step(_, _, parts):
            _check_step(parts, _rows_of(contents))
            _check_sender([part.key for part in parts], stage - 1, peer, table)
            for start in message.starts:
                _check_start(start, start.key[0], name, stage)
                _check_place(start, stage - 1, peer)
        case generation_messages.PreemptSequences(keys):
            _check_sender(keys, stage - 1, peer, table)
        case generation_messages.StepDone(_, tokens):
            _check_sender([key for key, _ in tokens], -1, peer, table)
        case generation_messages.KvRebuilt(key):
            _check_sender([key], -1, peer, table)


def _check_start(start: SequenceStart, peer: str, name: str, stage: int) -> None:
    is_here = start.chain[stage : stage + 1] == (name,)
    has_prompt = 0 < start.prompt <= len(start.tokens)
    if start.key[0] != peer or not is_here or not has_prompt:
        raise MessageError(f"{peer} began an invalid sequence: {start.key}")


def _check_sender(
    keys: Iterable[Key], stage: int, peer: str, table: SequenceTable
) -> None:
    """Check that ``peer`` computes ``stage`` of all known sequences in ``keys``."""
    for key in keys:
        state = table.get(key)
        if state is None:
            continue
        _check_place(state.start, stage, peer)


def _check_place(start: SequenceStart, stage: int, peer: str) -> None:
    key, chain = start.key, start.chain
    if stage >= len(chain) or chain[stage] != peer:
        raise MessageError(
            f"{peer} sent a message about {key} that only stage {stage} of its "
            f"chain {chain} may send"
        )


def _rows_of(contents: Sequence[Tensors]) -> Tensor:
    found = contents[0].get("hidden") if contents else None
    if found is None or found.ndim != 2:
        raise MessageError("hidden states must have two dimensions")
    return found


def _check_step(parts: Sequence[StepPart], hidden: Tensor) -> None:
    if len({part.key for part in parts}) < len(parts):
        raise MessageError("a step contains the same sequence twice")
    count = sum(part.count for part in parts)
    if count != len(hidden):
        raise MessageError(f"a step of {count} rows arrived with {len(hidden)} rows")
