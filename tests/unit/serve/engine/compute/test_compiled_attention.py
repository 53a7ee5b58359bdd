"""Compiled attention: torch's results, and bit-identical in any step."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from multiworld.serve.engine.compute.compiled_attention import (
    CompiledAttention,
    compiled,
    fastest,
)
from multiworld.serve.engine.compute.kv_cache import (
    KvCache,
    Layers,
    Rows,
    StepAttention,
)
from multiworld.serve.engine.compute.layer_code import DIGEST, can_run, digest

pytestmark = pytest.mark.skipif(not can_run(), reason="not compiled here")


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def waves(*shape: int, step: int = 7919) -> Tensor:
    """Return numbers with the same bits on every processor."""
    found = (torch.arange(math.prod(shape)) * step) % 2003 - 1001
    return found.view(shape) / 512


def drawn(chance: torch.Generator, heads: int, rows: int, size: int) -> Tensor:
    """Return random numbers in the memory layout of transformers."""
    return torch.randn(rows, heads, size, generator=chance).transpose(0, 1)


def exact(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float
) -> Tensor:
    """Return the attention of all rows of a sequence, in float64."""
    query, key, value = (each.double() for each in (query, key, value))
    group, at = len(query) // len(key), torch.arange(query.shape[1])
    key, value = (each.repeat_interleave(group, 0) for each in (key, value))
    hidden = at[None] > at[:, None]
    if window is not None:
        hidden |= at[None] <= at[:, None] - window
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 45])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "value_size"),
    [(9, 3, 64, 64), (4, 4, 8, 8), (4, 1, 80, 96), (14, 2, 256, 8), (26, 2, 128, 128)],
)
def test_rows_attend_to_all_tokens_before_them(
    heads: int, key_heads: int, size: int, value_size: int, window: int | None
) -> None:
    chance, count = torch.Generator().manual_seed(1), 150
    query, key = (
        drawn(chance, heads, count, size),
        drawn(chance, key_heads, count, size),
    )
    value = drawn(chance, key_heads, count, value_size)
    wanted = exact(query, key, value, window, 0.3)
    cache, found, begin = KvCache(attention=compiled(StepAttention)), [], 0
    for rows in (1, 1, 40, 3, 1, 64, 40):
        here = slice(begin, begin + rows)
        step: Any = cache.step([Rows(0, begin, rows)])
        given = query[:, here], key[:, here], value[:, here]
        found.append(step.attend(0, *given, scale=0.3, window=window))
        begin += rows
    torch.testing.assert_close(torch.cat(found).double(), wanted, rtol=1e-5, atol=3e-5)


def test_scores_of_every_size_are_weighted() -> None:
    """The factors make all weights equal, or some too small for a float."""
    cache = KvCache(attention=compiled(StepAttention))
    for factor in (0.0, 1.0, 30.0, 3_000.0):
        query, key, value = waves(2, 90, 8) * factor, waves(2, 90, 8, step=31), None
        value = waves(2, 90, 8, step=77)
        step: Any = cache.step([Rows(0, 0, 90)])
        found = step.attend(0, query, key, value).double()
        wanted = exact(query, key, value, None, 8**-0.5)
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_bits_do_not_depend_on_the_step(threads: int) -> None:
    draw, chance = torch.Generator().manual_seed(threads), random.Random(threads)
    count, texts = 200, range(6)
    given = {n: [drawn(draw, heads, count, 16) for heads in (6, 2, 2)] for n in texts}
    wanted = {}
    torch.set_num_threads(1)
    for n in texts:
        step: Any = KvCache(attention=compiled(StepAttention)).step([Rows(n, 0, count)])
        wanted[n] = step.attend(0, *given[n])
    torch.set_num_threads(threads)
    cache, done = KvCache(attention=compiled(StepAttention)), dict.fromkeys(texts, 0)
    while waiting := [n for n in texts if done[n] < count]:
        those = chance.sample(waiting, chance.randint(1, len(waiting)))
        rows = []
        for n in those:
            most = chance.choice([1, 1, 3, 20, 100])
            rows.append(Rows(n, done[n], min(chance.randint(1, most), count - done[n])))
        parts = [
            [each[:, r.begin : r.begin + r.count] for each in given[r.sequence]]  # type: ignore[index]
            for r in rows
        ]
        step = cache.step(rows)
        found = step.attend(
            0, *(torch.cat(same, 1) for same in zip(*parts, strict=True))
        )
        for each, out in zip(rows, found.split([r.count for r in rows]), strict=True):
            here = slice(each.begin, each.begin + each.count)
            assert torch.equal(out, wanted[each.sequence][here])  # type: ignore[index]
            done[each.sequence] += each.count  # type: ignore[index]


def test_bits_are_the_same_on_every_processor(threads: int) -> None:
    """``DIGEST`` was recorded on a Xeon with AMX."""
    assert digest() == DIGEST


def test_keys_and_values_are_kept_as_torch_keeps_them() -> None:
    """A stream may move between replicas with and without a compiler."""
    chance = torch.Generator().manual_seed(3)
    caches = [KvCache(attention=kind) for kind in (compiled(StepAttention), None)]
    for begin, count in ((0, 20), (20, 1), (21, 30)):
        query, key, value = (drawn(chance, heads, count, 16) for heads in (6, 2, 2))
        for cache in caches:
            cache.step([Rows("a", begin, count)]).attend(3, query, key, value)
    ours, theirs = ([*cache.copied("a", 0, 51).values()] for cache in caches)
    for one, other in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(one, other)
    pieces: list[Layers] = [caches[1].copied("a", 0, 51)]
    restored = KvCache(attention=compiled(StepAttention))
    restored.restore("a", pieces, 51)
    query, key, value = (drawn(chance, heads, 1, 16) for heads in (6, 2, 2))
    rows = [Rows("a", 51, 1)]
    out = [c.step(rows).attend(3, query, key, value) for c in (restored, caches[0])]
    assert torch.equal(*out)


@pytest.mark.parametrize(
    ("dtype", "size", "softcap"),
    [
        (torch.bfloat16, 16, None),
        (torch.float32, 12, None),
        (torch.float32, 264, None),
        (torch.float32, 16, 30.0),
    ],
)
def test_torch_attends_where_the_code_does_not(
    dtype: torch.dtype, size: int, softcap: float | None
) -> None:
    """One layer of a step falls back to torch beside one that does not."""
    chance = torch.Generator().manual_seed(4)
    caches = [KvCache(attention=kind) for kind in (compiled(StepAttention), None)]
    for begin, count in ((0, 20), (20, 1)):
        rows = [Rows("a", begin, count), Rows("b", begin, count)]
        steps = [cache.step(rows) for cache in caches]
        for layer, kind, width in ((0, torch.float32, 16), (1, dtype, size)):
            capped = softcap if layer else None
            given = [drawn(chance, n, 2 * count, width).to(kind) for n in (6, 2, 2)]
            found, wanted = (
                step.attend(layer, *given, softcap=capped) for step in steps
            )
            torch.testing.assert_close(found, wanted)
            if layer:
                assert torch.equal(found, wanted)


def test_rows_may_be_laid_out_in_any_way() -> None:
    given = [waves(heads, 7, 8, step=heads) for heads in (4, 2, 2)]
    sparse = [each.repeat_interleave(2, 2)[:, :, ::2] for each in given]
    found = [
        KvCache(attention=compiled(StepAttention))
        .step([Rows(0, 0, 7)])
        .attend(0, *tensors)
        for tensors in (given, sparse)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("shapes", "error"),
    [
        ([(2, 4, 8), (1, 4, 8), (1, 4, 8)], "rows"),
        ([(2, 5, 16), (1, 5, 8), (1, 5, 8)], "do not match"),
        ([(4, 5, 8), (2, 5, 8), (1, 5, 8)], "do not match"),
        ([(5, 5, 8), (3, 5, 8), (3, 5, 8)], "do not match"),
        ([(1, 5, 8), (2, 5, 8), (2, 5, 8)], "do not match"),
        ([(2, 5, 16), (1, 5, 16), (1, 5, 16)], "changed the shape or dtype"),
        ([(2, 5, 8), (2, 5, 8), (2, 5, 8)], "changed the shape or dtype"),
    ],
)
def test_nothing_is_read_or_written_that_is_not_there(
    shapes: list[tuple[int, ...]], error: str
) -> None:
    """The C code checks no bounds, so Python must."""
    cache = KvCache(attention=compiled(StepAttention))
    cache.step([Rows("a", 0, 5)]).attend(0, *(waves(n, 5, 8) for n in (2, 1, 1)))
    step: Any = cache.step(
        [Rows("a", 0, 5)] if "changed" not in error else [Rows("a", 5, 5)]
    )
    assert isinstance(step, CompiledAttention)
    with pytest.raises(ValueError, match=error):
        step.attend(0, *(waves(*shape) for shape in shapes))


def test_dtype_of_a_layer_stays() -> None:
    """The memory of a layer has one dtype."""
    cache = KvCache(attention=compiled(StepAttention))
    given = [waves(heads, 5, 8) for heads in (2, 1, 1)]
    cache.step([Rows("a", 0, 5)]).attend(0, *(each.bfloat16() for each in given))
    with pytest.raises(ValueError, match="shape or dtype"):
        cache.step([Rows("a", 5, 5)]).attend(0, *given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype_of_torch_does_not_matter(dtype: torch.dtype) -> None:
    """A model's code may set it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert digest() == DIGEST
    finally:
        torch.set_default_dtype(before)


def test_keys_without_a_weight_do_not_count() -> None:
    """A whole piece of keys may have scores of minus infinity."""
    query, key, value = waves(1, 70, 8).abs() + 1, waves(1, 70, 8), waves(1, 70, 8)
    key[:, :40] = -math.inf
    key[:, 40:] = 0.5
    step: Any = KvCache(attention=compiled(StepAttention)).step([Rows(0, 0, 70)])
    found = step.attend(0, query, key, value)
    wanted = exact(query, key, value, None, 8**-0.5)
    torch.testing.assert_close(found[40:].double(), wanted[40:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (80, 96), (8, 8)])
def test_single_rows_of_bfloat16_are_rounded_once(
    size: int, value_size: int, window: int | None
) -> None:
    """This is the default mode, in which torch computes the prompt."""
    chance, count, texts = torch.Generator().manual_seed(5), 110, (0, 1, 2)
    cache, given = KvCache(attention=fastest), {}
    for n in texts:
        query, key, value = (
            drawn(chance, heads, count, width).bfloat16()
            for heads, width in ((6, size), (2, size), (2, value_size))
        )
        given[n] = query, key, value
        begun = (each[:, : 100 + n] for each in (query, key, value))
        cache.step([Rows(n, 0, 100 + n)]).attend(0, *begun, scale=0.3, window=window)
    for more in range(5):
        rows = [Rows(n, 100 + n + more, 1) for n in texts]
        now = (
            torch.cat([given[n][which][:, 100 + n + more, None] for n in texts], 1)
            for which in range(3)
        )
        found = cache.step(rows).attend(0, *now, scale=0.3, window=window)
        for n in texts:
            wanted = exact(*given[n], window, 0.3)[100 + n + more]
            torch.testing.assert_close(
                found[n].double(), wanted, rtol=2.0**-8, atol=1e-4
            )


def test_default_mode_leaves_long_prompts_to_torch() -> None:
    """Torch is faster for long prompts, and for one row of large heads."""
    cache = KvCache()
    long = [Rows(0, 600, 50), Rows(1, 0, 1)]
    assert isinstance(fastest(cache, long), StepAttention)
    for size, rows in ((64, 1), (128, 2), (128, 1)):
        caches = KvCache(attention=fastest), KvCache()
        step = [Rows(number, 0, 1) for number in range(rows)]
        given = [waves(heads, rows, size) for heads in (4, 2, 2)]
        found, wanted = (each.step(step).attend(0, *given) for each in caches)
        torch.testing.assert_close(found, wanted)
