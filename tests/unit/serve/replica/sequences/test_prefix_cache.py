"""The cache of blocks of prefixes."""

from __future__ import annotations

import torch

from multiworld.serve.engine.compute.prefix_blocks import Block
from multiworld.serve.replica.sequences.prompt_prefixes import PrefixCache
from multiworld.serve.text.prefixes import digests


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
