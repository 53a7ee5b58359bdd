"""The queue of a stage, in which steps and KV rebuilds take turns."""

from __future__ import annotations

import pytest
import torch

from multiworld.serve.replica.sequences.sequence_state import SequenceTable
from multiworld.serve.replica.sequences.step_queue import (
    PIECE,
    ArrivedStep,
    RebuildRows,
    StepQueue,
)
from multiworld.serve.wire.generation_messages import (
    ActivationRows,
    Sampling,
    SequenceStart,
    Step,
    StepPart,
)
from multiworld.serve.wire.protocol import Key


def key(number: int) -> Key:
    return "gateway/1", number, 0


def step(number: int) -> ArrivedStep:
    parts = (StepPart(key(number), 0, 1, True),)
    return ArrivedStep(Step("r0", number, parts), torch.zeros(1, 2))


def rebuild(queue: StepQueue, number: int, rows: int, *, is_end: bool = True) -> None:
    queue.rebuild(ActivationRows(key(number), 5, is_end), torch.zeros(rows, 2))


def table_of(held: dict[int, int], prepared: tuple[int, ...] = ()) -> SequenceTable:
    """Return a table of sequences with these tokens; those `prepared` run elsewhere."""
    found = SequenceTable(is_last=False)
    for number, count in held.items():
        start = SequenceStart(key(number), (1,), 1, ("a", "b"), Sampling())
        state, _ = found.begin(start, (1,) if number in prepared else ())
        state.held = count
    return found


def shown(queue: StepQueue) -> list[object]:
    found: list[object] = []
    while (what := queue.next()) is not None:
        if isinstance(what, ArrivedStep):
            found.append(what.step.number)
        else:
            assert isinstance(what, list)
            found.append([(r.key[1], r.begin, len(r.rows), r.is_end) for r in what])
    return found


def sizes(queue: StepQueue) -> list[int]:
    found = []
    while (what := queue.next()) is not None:
        assert isinstance(what, list)
        found.append(sum(len(each.rows) for each in what))
    return found


def test_long_rebuild_is_split_and_takes_turns_with_steps() -> None:
    queue = StepQueue(4, table_of({}))
    rebuild(queue, 1, 10)
    for number in (2, 3, 4, 5):
        queue.add(step(number))
    assert shown(queue) == [
        2,
        [(1, 5, 4, False)],
        3,
        [(1, 9, 4, False)],
        4,
        [(1, 13, 2, True)],
        5,
    ]


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ({1: 0, 2: 300}, [256, 44]),  # alone
        ({1: 0, 2: 300, 3: 0}, [256, 44]),  # beside one that has nothing here yet
        ({1: 0, 2: 300, 3: 9}, [PIECE] * 4 + [300 - 4 * PIECE]),  # beside another
    ],
)
def test_pieces_are_small_beside_sequences_that_lost_nothing(
    held: dict[int, int], wanted: list[int]
) -> None:
    """Sequences just rebuilt wait for those still being rebuilt."""
    queue = StepQueue(256, table_of(held))
    rebuild(queue, 2, 0)
    rebuild(queue, 1, 300)
    assert sizes(queue) == wanted


def test_what_is_prepared_comes_last_and_in_small_pieces() -> None:
    """A sequence that was moved here must not wait for one that will move later."""
    queue = StepQueue(256, table_of({1: 0, 2: 250}, prepared=(1,)))
    rebuild(queue, 1, 100)
    rebuild(queue, 2, 8)
    assert shown(queue) == [
        [(2, 5, 8, True)],
        [(1, 5, PIECE, False)],
        [(1, 5 + PIECE, 100 - PIECE, True)],
    ]


def test_short_rebuilds_of_many_sequences_share_a_computation() -> None:
    """A rebuild without rows only marks the end."""
    queue = StepQueue(8, table_of({}))
    for number, rows in ((1, 3), (2, 0), (3, 5), (4, 1)):
        rebuild(queue, number, rows)
    assert shown(queue) == [
        [(1, 5, 3, True), (2, 5, 0, True), (3, 5, 5, True)],
        [(4, 5, 1, True)],
    ]


def test_step_of_a_sequence_that_is_rebuilt_waits_for_it() -> None:
    """Steps behind it wait as well, because steps stay in order."""
    queue = StepQueue(2, table_of({}))
    rebuild(queue, 1, 4)
    queue.add(step(1))
    queue.add(step(2))
    assert shown(queue) == [[(1, 5, 2, False)], [(1, 7, 2, True)], 1, 2]


def test_pieces_are_typed() -> None:
    """A rebuild without rows is one piece."""
    queue = StepQueue(2, table_of({}))
    rebuild(queue, 1, 0, is_end=False)
    assert len(queue) == 1
    (piece,) = queue.next()  # type: ignore[misc]
    assert isinstance(piece, RebuildRows)
    assert len(queue) == 0
