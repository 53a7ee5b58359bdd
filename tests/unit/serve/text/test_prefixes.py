"""Names of prefixes, and the replicas that have them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.text.prefixes import PrefixRoutes, digests

tokens = st.lists(st.integers(0, 2), max_size=20)


@given(tokens, tokens, st.integers(1, 4))
def test_names_are_equal_as_far_as_the_tokens_are(
    one: list[int], other: list[int], block: int
) -> None:
    """They are of whole blocks; another tenant has other names throughout."""
    first, second = (list(digests(each, block, "a")) for each in (one, other))
    for number in range(min(len(first), len(second))):
        end = (number + 1) * block
        assert (first[number] == second[number]) == (one[:end] == other[:end])
    assert len(first) == len(one) // block
    assert not set(first) & set(digests(one, block, "b"))


def test_replica_that_computed_the_longest_prefix_is_known() -> None:
    routes = PrefixRoutes()
    names = list(digests(range(12), 4, "a"))
    routes.record(names[:2], ["front/1", "back/1"])
    routes.record(names[:1], ["front/2", "back/1"])
    assert routes.matches(names, 0) == {"front/2": 1, "front/1": 2}
    assert routes.matches(names, 1) == {"back/1": 2}
    assert routes.matches(list(digests([7] * 12, 4, "a")), 0) == {}
