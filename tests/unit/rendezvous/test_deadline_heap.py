"""Deadlines by key, compared with a plain dictionary."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiworld.rendezvous.deadline_heap import SPARE, Deadlines
from tests.memory import objects_in
from tests.unit.inner_state import deadline_count

KEYS = st.integers(0, 5)
TIMES = st.floats(0, 100)


@given(st.lists(st.tuples(st.sampled_from(["set", "drop", "due"]), KEYS, TIMES)))
def test_deadlines_are_those_of_a_dictionary(
    steps: list[tuple[str, int, float]],
) -> None:
    deadlines, plain = Deadlines[int](), dict[int, float]()
    for what, key, at in steps:
        if what == "set":
            deadlines.set(key, at)
            plain[key] = at
        elif what == "drop":
            deadlines.drop(key)
            plain.pop(key, None)
        else:
            due = {k: t for k, t in plain.items() if t <= at}
            found = deadlines.take_due(at)
            assert sorted(found) == sorted(due)
            assert [due[k] for k in found] == sorted(due.values())
            plain = {k: t for k, t in plain.items() if t > at}
        assert deadline_count(deadlines) == len(plain)
        assert deadlines.next() == min(plain.values(), default=None)


def test_deadlines_that_move_take_no_memory() -> None:
    deadlines = Deadlines[int]()
    most = 2 * 3 + SPARE + 1
    for number in range(100 * most):
        deadlines.set(number % 3, float(number))
    # An entry is a tuple, its time, its key, and at most one more.
    assert objects_in(deadlines) <= 4 * most + 20
