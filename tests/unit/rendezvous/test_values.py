"""Keys and values of a store."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiworld.rendezvous.values import COST, Answer, FullError, Values


def test_get_waits_until_every_key_is_there() -> None:
    values = Values()
    assert values.get((1, 1), ["a", "b"], 10) == []
    assert values.set("b", "2") == []
    assert values.set("a", "1") == [Answer((1, 1), ["1", "2"])]
    assert values.get((1, 2), ["a"], 10) == [Answer((1, 2), ["1"])]


def test_get_when_time_runs_out_then_answers_nothing() -> None:
    values = Values()
    values.get((1, 1), ["a"], 10)
    assert values.next_deadline() == 10
    assert values.expire(9.9) == []
    assert values.expire(10) == [Answer((1, 1), None)]
    assert values.set("a", "1") == []


def test_add_counts_from_zero_and_is_also_text() -> None:
    """c10d expects a counter to be its decimal text."""
    values = Values()
    assert values.add("n", 2)[0] == 2
    assert values.add("n", -5)[0] == -3
    assert values.get((1, 1), ["n"], 0)[0].values == ["-3"]


def test_compare_set_only_when_expected() -> None:
    """A missing key counts as empty."""
    values = Values()
    assert values.compare_set("k", "x", "y")[0] == "x"
    assert values.compare_set("k", "", "y")[0] == "y"
    assert values.compare_set("k", "x", "z")[0] == "y"
    assert values.compare_set("k", "y", "z")[0] == "z"


def test_delete_prefix_drops_one_incarnation() -> None:
    values = Values()
    for key in ("w/1/a", "w/1/b", "w/2/a"):
        values.set(key, "")
    values.delete_prefix("w/1/")
    assert not values.check(["w/1/a"])
    assert not values.check(["w/1/b"])
    assert values.delete("w/2/a")
    assert not values.delete("w/2/a")


keys = st.sampled_from(["a", "ab", "b"])
texts = st.text("xy", max_size=9)
operations = st.one_of(
    st.tuples(st.just("set"), keys, texts),
    st.tuples(st.just("compare_set"), keys, texts, texts),
    st.tuples(st.just("delete"), keys),
    st.tuples(st.just("delete_prefix"), keys),
    st.tuples(st.just("get"), st.tuples(st.integers(1, 3), st.integers(1, 3)), keys),
    st.tuples(st.just("drop_session"), st.integers(1, 3)),
    st.tuples(st.just("expire"), st.integers(0, 9)),
)


@given(st.lists(operations, max_size=30))
def test_what_is_held_is_bounded_and_freed(steps: list[tuple[str, object]]) -> None:
    """A store that was emptied takes as much as a new one."""
    room = 8 * COST
    values = Values(room)
    for step in steps:
        name, *given = step
        if name == "get":
            given = [given[0], [given[1]], 5]
        with contextlib.suppress(FullError):
            getattr(values, name)(*given)
    for session in (1, 2, 3):
        values.drop_session(session)
    values.delete_prefix("")
    values.set("k", "v" * (room - 2 * COST - 1))
    with pytest.raises(FullError):
        values.set("l", "")
    values.set("k", "w")  # a shorter one in its place


def test_store_that_is_full_sets_nothing() -> None:
    values = Values(2 * COST + 4)
    values.set("k", "abc")
    with pytest.raises(FullError):
        values.set("k", "abcd")
    with pytest.raises(FullError):
        values.get((1, 1), ["l"] * 3, 10)
    assert values.get((1, 1), ["k"], 10) == [Answer((1, 1), ["abc"])], "it is there"
    assert values.compare_set("k", "abc", "ab")[0] == "ab"
