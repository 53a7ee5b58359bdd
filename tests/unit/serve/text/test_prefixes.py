"""Names of prefixes, the replicas that have them, and the cache of their blocks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from multiworld.serve.engine.compute.prefix_cache import Block, PrefixCache
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


def block_of(count: int) -> Block:
    half = torch.zeros(1, count // 8, 1)
    return Block({0: (half, half)})


def test_least_recently_used_blocks_are_dropped() -> None:
    cache = PrefixCache(100)
    names = list(digests(range(8), 1, "a"))
    for name in names[:2]:
        cache.put(name, block_of(40))
    assert len(cache.use(names)) == 2
    cache.release(names[:2])
    assert len(cache.use(names[:1])) == 1
    cache.release(names[:1])
    cache.put(names[2], block_of(40))
    assert cache.nbytes == 80
    assert cache.has(names[0])
    assert not cache.has(names[1])
    assert len(cache.use(names)) == 1, "a prefix has no gaps"
    cache.release(names[:1])
    cache.put(names[3], block_of(800))
    assert not cache.has(names[3])
    assert cache.has(names[0]), "nothing was dropped for it"


def test_blocks_in_use_are_not_dropped() -> None:
    cache = PrefixCache(100)
    names = list(digests(range(4), 1, "a"))
    for name in names[:2]:
        cache.put(name, block_of(40))
    for used in (2, 1):
        assert len(cache.use(names[:used])) == used
    cache.put(names[2], block_of(40))
    assert [cache.has(name) for name in names[:3]] == [True, True, False]
    cache.release(names[:2])
    cache.put(names[2], block_of(40))
    assert [cache.has(name) for name in names[:3]] == [True, False, True]
    cache.release(names[:1])
    cache.put(names[3], block_of(80))
    assert [cache.has(name) for name in names] == [False, False, False, True]
    assert cache.nbytes == 80
