"""Memory of keys and values: several sequences side by side, without gaps."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multiworld.serve.engine.compute.batch_invariant_attention import (
    InvariantAttention,
)
from multiworld.serve.engine.compute.compiled_attention import (
    AttentionOf,
    compiled,
)
from multiworld.serve.engine.compute.kv_cache import KvCache, Rows, StepAttention
from multiworld.serve.engine.compute.kv_memory import (
    SHARED_TOKENS,
    SLOTS,
    KvMemory,
    Pair,
)
from multiworld.serve.engine.compute.layer_code import can_run
from multiworld.serve.text.engine_limits import GROWTH
from tests.memory import objects_in

BLOCK = 4
KINDS = [
    StepAttention,
    InvariantAttention,
    pytest.param(
        compiled(StepAttention),
        id="compiled",
        marks=pytest.mark.skipif(not can_run(), reason="not compiled here"),
    ),
]
LIKE = torch.zeros(2, 1, 3), torch.zeros(2, 1, 5)
"""Keys and values of two heads, of three and five numbers."""


def filled(memory: KvMemory, sequence: int, tokens: int, layer: int) -> Pair:
    pair = memory.of(sequence, layer, LIKE)
    made = tuple(torch.rand(2, tokens, each.shape[2]) for each in pair)
    for each, new in zip(pair, made, strict=True):
        each[:, :tokens] = new
    return made[0], made[1]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grow", "exact", "free", "half"]),
            st.integers(0, 9),
            st.integers(1, 90),
        ),
        max_size=60,
    )
)
def test_every_sequence_keeps_its_numbers(steps: list[tuple[str, int, int]]) -> None:
    memory = KvMemory(BLOCK)
    kept: dict[int, dict[int, Pair]] = {}
    sizes: dict[int, int] = {}
    for what, sequence, tokens in steps:
        if what == "free":
            memory.free(sequence)
            kept.pop(sequence, None)
            sizes.pop(sequence, None)
            continue
        memory.make_room(sequence, tokens, is_exact=what == "exact")
        sizes[sequence] = max(tokens, sizes.get(sequence, 0))
        layers = [3] if what == "half" else [3, 4]
        kept.setdefault(sequence, {}).update(
            {layer: filled(memory, sequence, tokens, layer) for layer in layers}
        )
        for each, wanted in kept.items():
            found = memory.all_of(each)
            for layer, pair in wanted.items():
                for new, old in zip(pair, found[layer], strict=True):
                    assert old.shape[1] >= sizes[each]
                    assert torch.equal(old[:, : new.shape[1]], new)
                    assert not old[:, sizes[each] :].any()
        bound = sum(math.ceil(size / BLOCK) * BLOCK for size in sizes.values())
        assert memory.nbytes <= GROWTH * bound * 2 * (3 + 5) * 2 * 4
        runs = memory.runs(list(kept))
        side_by_side = [s for run in runs for s in run.sequences]
        assert len(side_by_side) == len(kept) == len(set(side_by_side))
        of_size: dict[int, int] = {}
        for run in runs:
            assert len(run.sequences) <= SLOTS
            slots, _ = memory.of_run(run, 3, LIKE)
            for number, name in enumerate(run.sequences):
                slot = slots[run.slot + number]
                assert slot.data_ptr() == memory.of(name, 3, LIKE)[0].data_ptr()
            of_size[run.tokens] = of_size.get(run.tokens, 0) + 1
        for size, count in of_size.items():
            many = sum(len(run.sequences) for run in runs if run.tokens == size)
            max_count = max(1, min(SLOTS, SHARED_TOKENS // size))
            assert count == math.ceil(many / max_count), "there are no gaps"


def test_memory_is_free_when_the_last_sequence_is() -> None:
    memory = KvMemory(BLOCK)
    empty = objects_in(memory)
    for sequence in range(9):
        memory.make_room(sequence, 40)
        filled(memory, sequence, 40, 0)
    assert objects_in(memory) > empty
    for sequence in range(9):
        memory.free(sequence)
    assert memory.nbytes == 0
    assert objects_in(memory) == empty


def drawn(chance: torch.Generator, heads: int, rows: int) -> Tensor:
    return torch.randn(heads, rows, 8, generator=chance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [2, 6])
def test_rows_together_are_as_rows_alone(
    kind: AttentionOf,
    window: int | None,
    heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, chance = torch.Generator().manual_seed(1), random.Random(1)
    together = KvCache(attention=kind)
    alone = {number: KvCache(attention=kind) for number in range(10)}
    lengths = dict.fromkeys(alone, 0)
    batches, append = 0, together.append_batch

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        nonlocal batches
        batches += 1
        return append(*args)

    monkeypatch.setattr(together, "append_batch", counted)
    for _ in range(60):
        those = chance.sample(sorted(alone), chance.randint(1, 10))
        counts = [chance.choice([1, 1, 1, 1, 3]) for _ in those]
        rows = [Rows(n, lengths[n], c) for n, c in zip(those, counts, strict=True)]
        query = drawn(draw, heads, sum(counts))
        key, value = drawn(draw, 2, sum(counts)), drawn(draw, 2, sum(counts))
        step: Any = together.step(rows)
        out = step.attend(0, query, key, value, window=window)
        offset = 0
        for number, each in zip(those, rows, strict=True):
            here = slice(offset, offset + each.count)
            given = query[:, here], key[:, here], value[:, here]
            wanted = alone[number].step([each]).attend(0, *given, window=window)
            if kind is not StepAttention:
                assert torch.equal(out[here], wanted)
            torch.testing.assert_close(out[here], wanted, rtol=1e-4, atol=1e-5)
            offset += each.count
            lengths[number] += each.count
            if lengths[number] > 40 and chance.random() < 0.2:
                together.free(number)
                lengths[number] = 0
    if kind in (StepAttention, InvariantAttention):
        assert batches > 20, "rows are computed together"


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_none_stay_with_their_sequence(
    kind: AttentionOf,
) -> None:
    """A NaN reaches neither neighbours in the step nor later owners of the memory."""
    draw = torch.Generator().manual_seed(1)
    cache = KvCache(attention=kind)

    def step(rows: list[Rows], bad: int) -> Tensor:
        count = sum(each.count for each in rows)
        key, value = drawn(draw, 2, count), drawn(draw, 2, count)
        if bad >= 0:
            key[:, bad] = value[:, bad] = math.nan
        return cache.step(rows).attend(0, drawn(draw, 2, count), key, value)

    for number, tokens in enumerate((40, 30, 35)):
        step([Rows(number, 0, tokens)], tokens - 1 if number == 0 else -1)
    rows = [Rows(0, 40, 1), Rows(1, 30, 1), Rows(2, 35, 1)]
    assert step(rows, 0).isnan().flatten(1).any(1).tolist() == [True, False, False]
    cache.free(0)  # another one moves into its slot
    assert not step([Rows(1, 31, 1), Rows(2, 36, 1)], -1).isnan().any()
    step([Rows(3, 0, 10)], -1)  # and a new one comes
    rows = [Rows(1, 32, 1), Rows(2, 37, 1), Rows(3, 10, 1)]
    assert not step(rows, -1).isnan().any()


def test_a_sequence_begins_with_a_part_of_the_last_piece() -> None:
    """What another stage holds may end in the middle of a block."""
    cache = KvCache(BLOCK)
    pieces = [{0: (torch.rand(2, 4, 3), torch.rand(2, 4, 5))} for _ in range(2)]
    cache.restore("a", pieces, 6)
    (kept,) = cache.copied("a", 0, 6).values()
    for number, tensor in enumerate(kept):
        whole = torch.cat([piece[0][number] for piece in pieces], 1)
        assert torch.equal(tensor, whole[:, :6])
    cache.step([Rows("a", 6, 1)])
