"""The work of a stage: steps, and rows that refill it, in turns."""

from __future__ import annotations

import torch

from multiworld.serve.transport.generation_messages import Refill, Step, StepPart
from multiworld.serve.transport.protocol import Key
from multiworld.serve.worker.inbox import ArrivedStep, Inbox, RefillRows


def key(number: int) -> Key:
    """Return the key of a sequence."""
    return "gateway/1", number, 0


def step(number: int) -> ArrivedStep:
    """Return a step of one sequence."""
    parts = (StepPart(key(number), 0, 1, True),)
    return ArrivedStep(Step("r0", number, parts), torch.zeros(1, 2))


def refill(inbox: Inbox, number: int, rows: int, *, is_end: bool = True) -> None:
    """Queue rows that refill a sequence."""
    inbox.refill(Refill(key(number), 5, is_end), torch.zeros(rows, 2))


def shown(inbox: Inbox) -> list[object]:
    """Return what is computed, in order."""
    found: list[object] = []
    while (what := inbox.next()) is not None:
        if isinstance(what, ArrivedStep):
            found.append(what.step.number)
        else:
            assert isinstance(what, list)
            found.append([(r.key[1], r.begin, len(r.rows), r.is_end) for r in what])
    return found


def test_long_refill_is_cut_and_takes_turns_with_steps() -> None:
    """Only its last piece is the end."""
    inbox = Inbox(4)
    refill(inbox, 1, 10)
    for number in (2, 3, 4, 5):
        inbox.add(step(number))
    assert shown(inbox) == [
        2,
        [(1, 5, 4, False)],
        3,
        [(1, 9, 4, False)],
        4,
        [(1, 13, 2, True)],
        5,
    ]


def test_short_refills_of_many_sequences_go_together() -> None:
    """As far as they fit into a step; one without rows only says that it is the end."""
    inbox = Inbox(8)
    for number, rows in ((1, 3), (2, 0), (3, 5), (4, 1)):
        refill(inbox, number, rows)
    assert shown(inbox) == [
        [(1, 5, 3, True), (2, 5, 0, True), (3, 5, 5, True)],
        [(4, 5, 1, True)],
    ]


def test_step_of_a_sequence_that_is_refilled_waits_for_it() -> None:
    """Others behind it wait as well, because steps stay in order."""
    inbox = Inbox(2)
    refill(inbox, 1, 4)
    inbox.add(step(1))
    inbox.add(step(2))
    assert shown(inbox) == [[(1, 5, 2, False)], [(1, 7, 2, True)], 1, 2]


def test_pieces_are_typed() -> None:
    """A refill without rows is one piece."""
    inbox = Inbox(2)
    refill(inbox, 1, 0, is_end=False)
    assert len(inbox) == 1
    (piece,) = inbox.next()  # type: ignore[misc]
    assert isinstance(piece, RefillRows)
    assert len(inbox) == 0
