"""Deterministic mode: results that are bit-identical in any batch."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from multiworld.errors import ModelFailedError
from multiworld.serve.engine.compute.batch_invariant_attention import (
    KEYS,
    PIECE,
    InvariantAttention,
    Sizes,
    attend,
    invariant_sizes,
    largest_step,
    padded,
)
from multiworld.serve.engine.compute.batch_invariant_layers import (
    GRAIN,
    REFERENCE,
    VECTORS,
    InvariantElements,
    InvariantRows,
    cover,
    invariant_rows,
    make_elements_invariant,
    make_linears_invariant,
    make_routers_invariant,
    whole_slices,
)
from multiworld.serve.engine.compute.compiled_attention import (
    AttentionOf,
    compiled,
)
from multiworld.serve.engine.compute.kv_cache import KvCache, Rows
from multiworld.serve.engine.compute.layer_trial import check_layers
from multiworld.serve.engine.compute.stage_engine import engine_of
from multiworld.serve.engine.models import decoder_stage
from multiworld.serve.engine.models.experts import split_experts
from multiworld.serve.engine.models.packed_linear import pack_linears
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.replica.scheduling.scheduler import Scheduler
from multiworld.serve.spec.stage import Generation
from multiworld.serve.text.engine_limits import GROWTH, EngineLimits
from tests.tiers import some
from tests.tiny_decoder import KINDS, save_decoder

LONG = 150
CAPPED = "gemma2"
"""Its scores are capped, which torch's kernel does not do."""
HEAVY = ("mixtral",)
"""Kinds that are slow to test, and similar to others that always run."""
RUN = [kind for kind in KINDS if kind not in (CAPPED, *HEAVY)]


@pytest.fixture(params=some([3, 1, 2], 1))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Chain:
    """Two stages in one process that compute deterministically."""

    def __init__(
        self, folder: Path, dtype: str, attention: AttentionOf, *, is_packed: bool
    ) -> None:
        spans = [Span(0, 2, 4), Span(2, 4, 4)]
        is_int8 = dtype == "int8"
        how = ("float32", "cpu", "int8") if is_int8 else (dtype, "cpu", None)
        self._stages: list[Any] = [
            decoder_stage.load(folder, span, *how) for span in spans
        ]
        for stage in self._stages:
            split_experts(stage)
            if is_packed:
                pack_linears(stage)
            make_linears_invariant(stage)
            make_routers_invariant(stage)
            make_elements_invariant(stage)
            check_layers(stage, lambda: KvCache(attention=attention))
        self._caches = [KvCache(attention=attention) for _ in spans]

    def step(self, parts: list[tuple[int, int, list[int]]]) -> torch.Tensor:
        """Compute tokens of sequences; return the logits after every token."""
        rows = [Rows(number, begin, len(ids)) for number, begin, ids in parts]
        x = torch.tensor([token for *_, ids in parts for token in ids])
        positions = torch.cat([torch.arange(r.begin, r.begin + r.count) for r in rows])
        with torch.inference_mode():
            for stage, cache in zip(self._stages, self._caches, strict=True):
                x = stage(x, positions, cache.step(rows), torch.arange(len(positions)))
        return x


def chunks(chance: random.Random, count: int) -> list[int]:
    """Draw the sizes of chunks that add up to `count` tokens."""
    found: list[int] = []
    while sum(found) < count:
        most = chance.choice([1, 1, 3, 20, 100])
        found.append(min(chance.randint(1, most), count - sum(found)))
    return found


@pytest.mark.parametrize(
    ("kind", "dtype", "is_packed", "is_compiled"),
    some(
        [
            *product(RUN, ("float32", "bfloat16"), (True,), (True,)),
            *product(("llama",), ("float32", "bfloat16"), (False,), (True,)),
            ("qwen3_moe", "int8", True, True),
            *product(RUN[:3], ("float32",), (True,), (False,)),
            *product(RUN[3:], ("float32",), (True,), (False,)),
            *product(HEAVY, ("float32", "bfloat16"), (True,), (True,)),
        ],
        2 * len(RUN) + 6,
    ),
)
def test_logits_do_not_depend_on_parts_and_neighbours(
    kind: str,
    dtype: str,
    is_packed: bool,
    is_compiled: bool,
    threads: int,
    tmp_path: Path,
) -> None:
    attention = compiled(InvariantAttention) if is_compiled else InvariantAttention
    folder = save_decoder(tmp_path, kind)
    chance = random.Random(f"{kind} {dtype} {threads}")
    sequences = [[chance.randrange(300) for _ in range(LONG)] for _ in range(4)]
    alone = Chain(folder, dtype, attention, is_packed=is_packed)
    wanted = [alone.step([(0, 0, text)]) for text in sequences]
    chain = Chain(folder, dtype, attention, is_packed=is_packed)
    waiting = {n: chunks(chance, LONG) for n in range(4)}
    done = dict.fromkeys(waiting, 0)
    while waiting:
        numbers = chance.sample(sorted(waiting), chance.randint(1, len(waiting)))
        parts = []
        for number in numbers:
            count = waiting[number].pop(0)
            begin = done[number]
            parts.append((number, begin, sequences[number][begin : begin + count]))
            done[number] += count
            if not waiting[number]:
                del waiting[number]
        logits = chain.step(parts)
        offset = 0
        for number, begin, ids in parts:
            here = logits[offset : offset + len(ids)]
            assert torch.equal(here, wanted[number][begin : begin + len(ids)]), (
                f"text {number} from {begin}, {len(ids)} of {len(logits)} rows"
            )
            offset += len(ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_sizes_give_every_row_the_same_bits(
    dtype: torch.dtype, threads: int
) -> None:
    heads, size = 3, 64
    sizes = invariant_sizes(heads, size, size, dtype, threads)
    drawn = torch.Generator().manual_seed(7)
    for rows, keys in product(sizes.rows, sizes.keys):
        query = torch.randn(1, heads, 1, size, generator=drawn).to(dtype)
        key, value = torch.randn(2, 1, heads, keys, size, generator=drawn).to(dtype)
        mask = (torch.arange(keys) < keys - 3).expand(1, 1, rows, keys)
        found = attend(query.expand(-1, -1, rows, -1), key, value, mask, 1.0)
        assert torch.equal(found, found[:, :, :1].expand_as(found)), (rows, keys)


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [("float32", None), ("bfloat16", None), ("float32", "int8")],
)
@pytest.mark.parametrize("width", some([4_864, 14_336, 4_870, 8_192], 3))
@pytest.mark.parametrize("threads", some([3, 1, 5, 2, 4], 2), indirect=True)
def test_widths_of_real_models_give_the_same_bits_in_any_chunks(
    width: int, dtype: str, quantization: str | None, threads: int, tmp_path: Path
) -> None:
    """Above some number of rows, torch splits the activations over its threads."""
    folder = save_decoder(
        tmp_path,
        intermediate_size=width,
        num_hidden_layers=1,
        max_position_embeddings=512,
    )
    stage: Any = decoder_stage.load(folder, Span(0, 1, 1), dtype, "cpu", quantization)
    pack_linears(stage)
    make_linears_invariant(stage)
    make_elements_invariant(stage)
    chance = random.Random(f"{width} {dtype} {threads}")
    text = [chance.randrange(300) for _ in range(200)]
    whole = logits_of(stage, text, [200])
    for _ in range(3):
        sizes = chunks(chance, 200)
        assert torch.equal(logits_of(stage, text, sizes), whole), sizes


@pytest.mark.parametrize(
    "made",
    [
        nn.Softmax(-1),
        nn.LogSoftmax(-1),
        nn.GLU(),
        nn.PReLU(64),
        nn.SiLU(),
        nn.GELU(),
        nn.Softplus(),
        nn.Threshold(0.1, 0.0),
    ],
    ids=lambda made: type(made).__name__,
)
def test_functions_of_a_step_are_what_they_are_alone(made: nn.Module) -> None:
    """Cutting a flattened step is only valid for element-wise functions."""
    given = torch.randn(7, 64)
    wanted = made(given)
    make_elements_invariant(made)
    torch.testing.assert_close(made(given), wanted)


def logits_of(stage: Any, text: list[int], sizes: list[int]) -> torch.Tensor:
    cache, found, begin = KvCache(attention=compiled(InvariantAttention)), [], 0
    for size in sizes:
        rows, at = [Rows(0, begin, size)], torch.arange(begin, begin + size)
        given = torch.tensor(text[begin : begin + size])
        with torch.inference_mode():
            found.append(stage(given, at, cache.step(rows), torch.arange(size)))
        begin += size
    return torch.cat(found)


@pytest.mark.parametrize("threads", [3, 5], indirect=True)
@pytest.mark.parametrize("name", ["silu", "gelu", "tanh", "sigmoid"])
def test_elementwise_results_have_the_same_bits_in_every_batch(
    name: str, threads: int
) -> None:
    plain = getattr(torch.nn.functional, name)
    fixed = InvariantElements(plain)
    for width in (64, 100, 4_864):
        given = torch.randn(97, width, generator=torch.Generator().manual_seed(1))
        whole = fixed(given)
        torch.testing.assert_close(whole, plain(given))
        for begin, end in ((0, 1), (1, 3), (3, 50), (50, 97)):
            assert torch.equal(fixed(given[begin:end]), whole[begin:end])


@given(st.integers(0, 200_000), st.integers(1, 64))
def test_slices_are_whole_numbers_of_vectors(count: int, threads: int) -> None:
    """Every slice that torch gives a thread is a whole number of vectors."""
    count = count * VECTORS or VECTORS
    whole = whole_slices(count, threads)
    assert 0 < whole <= count
    slices = min(threads, -(-whole // GRAIN))
    assert -(-whole // slices) % VECTORS == 0, "each slice but the last"
    assert whole % VECTORS == 0, "and that as well"


@pytest.mark.parametrize("threads", [3], indirect=True)
def test_layers_whose_rows_depend_on_the_step_are_refused(
    threads: int, tmp_path: Path
) -> None:
    stage: Any = decoder_stage.load(
        save_decoder(tmp_path), Span(0, 4, 4), "float32", "cpu"
    )
    make_linears_invariant(stage)
    make_elements_invariant(stage)
    norm = stage.whole.model.norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) * (1 + 1e-7 * hidden.shape[-2])
    with pytest.raises(ModelFailedError, match="deterministic: true is not possible"):
        check_layers(stage, lambda: KvCache(attention=InvariantAttention))


def test_default_kernels_do_depend_on_them(tmp_path: Path) -> None:
    """Otherwise the tests above would prove nothing."""
    folder = save_decoder(tmp_path)
    stage: Any = decoder_stage.load(folder, Span(0, 4, 4), "float32", "cpu")
    text = list(range(1, 101))

    def logits(sizes: list[int]) -> torch.Tensor:
        cache, found, begin = KvCache(), [], 0
        for size in sizes:
            rows, at = [Rows(0, begin, size)], torch.arange(begin, begin + size)
            given = torch.tensor(text[begin : begin + size])
            with torch.inference_mode():
                found.append(stage(given, at, cache.step(rows), torch.arange(size)))
            begin += size
        return torch.cat(found)

    assert not torch.equal(logits([100]), logits([1] * 100))


def test_sizes_that_are_not_invariant_are_not_used() -> None:
    def strange(rows: torch.Tensor) -> torch.Tensor:
        return rows * 2 + (len(rows) > 24)

    sizes = invariant_rows(strange, torch.zeros(1, 8))
    assert max(sizes) == 24
    assert REFERENCE in sizes
    given = torch.randn(3, 50, 8)
    assert torch.equal(InvariantRows(strange, sizes)(given), given * 2)


def test_function_that_is_never_invariant_is_called_with_one_size() -> None:
    def strange(rows: torch.Tensor) -> torch.Tensor:
        return rows + (len(rows) != REFERENCE)

    assert invariant_rows(strange, torch.zeros(1, 8)) == [REFERENCE]


@pytest.mark.parametrize("count", [1, 4, 5, 16, 17, 63, 64, 65, 200])
def test_sizes_cover_all_rows(count: int) -> None:
    found = cover([4, 16, 64], count)
    assert sum(found) >= count
    assert sum(found[:-1]) < count


@pytest.mark.parametrize("end", [1, 64, 65, 512, 513, 600, 1024])
def test_keys_are_padded_to_whole_pieces_and_a_tried_size(end: int) -> None:
    length = padded(KEYS, end)
    assert length >= end
    assert length % PIECE in (0, *KEYS)


@pytest.mark.parametrize("keys", [None, KEYS, (256, 512), (64, 512), (512,)])
@given(chunks=st.lists(st.integers(1, 300), max_size=5), tokens=st.integers(0, 150))
@settings(deadline=None, max_examples=40)
def test_memory_is_what_the_scheduler_counts(
    keys: tuple[int, ...] | None, chunks: list[int], tokens: int
) -> None:
    limits = EngineLimits(block_size=16, blocks=10_000)
    scheduler, cache = Scheduler(limits), KvCache()
    scheduler.pool.granule = 1 if keys is None else largest_step(keys)
    begin = 0
    for count in (*chunks, *[1] * tokens):
        rows = Rows("text", begin, count)
        begin += count
        cache.step([rows])
        new = torch.ones(1, count, 1)
        cache.append(rows, 0, new, new, 0 if keys is None else padded(keys, begin))
        counted = scheduler.pool.blocks_of(begin) * limits.block_size * GROWTH
        assert cache.nbytes <= counted * 2 * new.element_size()


def test_products_without_bias_and_conv1d_are_changed() -> None:
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4))
    make_linears_invariant(module)
    assert isinstance(module[0].forward, InvariantRows)
    assert isinstance(module[2].forward, InvariantRows)
    assert module(torch.zeros(2, 3, 8)).shape == (2, 3, 4)
    assert module(torch.zeros(1, 0, 8)).shape == (1, 0, 4)


class TopKRouter(nn.Module):
    """A router that returns only its scores, as DeepSeek's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 96, generator=seeded()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self.weight)


class HashRouter(nn.Module):
    """A router that takes token IDs beside the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 96, generator=seeded()))

    def forward(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self.weight) + ids


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("count", [1, 5, 33])
def test_a_router_of_scores_alone_gives_each_row_the_same_bits(count: int) -> None:
    router = TopKRouter()
    rows = torch.randn(count, 96, generator=seeded())
    plain = router(rows)
    make_routers_invariant(router)
    with torch.inference_mode():
        scores = router(rows)
        alone = torch.cat([router(row[None]) for row in rows])
    torch.testing.assert_close(scores, plain)
    assert torch.equal(scores, alone)


def test_other_routers_stay_as_they_are() -> None:
    modules = nn.ModuleList([HashRouter(), type("NoRouter", (nn.Module,), {})()])
    rows, ids = torch.randn(3, 96, generator=seeded()), torch.ones(3, 8)
    plain = modules[0](rows, ids)
    make_routers_invariant(modules)
    assert torch.equal(modules[0](rows, ids), plain)


SHAPES = ((1, 16), (4, 8), (1, 16))
"""Key heads, and their size, of three layers."""


@pytest.mark.parametrize(
    ("lengths", "steps"),
    [
        ((260, 350), [{0: 1, 1: 1}]),
        ((190, 192, 192), [{0: 4, 1: 1, 2: 1}, {1: 1, 2: 1}, {2: 1}]),
    ],
    ids=["other rooms", "a sequence that moves"],
)
def test_layers_may_have_heads_of_different_sizes(
    lengths: tuple[int, ...],
    steps: list[dict[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The key counts that a layer may use differ; a sequence has one room in all."""
    keys = {16: (64, 128, 192, 320, 384, 448, 512), 8: (64, 128, 192, 384, 448, 512)}

    def sizes(heads: int, size: int, *rest: object) -> Sizes:
        return Sizes((4, 16, 64), keys[size], 8)

    module = "multiworld.serve.engine.compute.batch_invariant_attention"
    monkeypatch.setattr(f"{module}.invariant_sizes", sizes)
    cache, chance = KvCache(attention=InvariantAttention), torch.Generator()
    kept: dict[tuple[Hashable, int], tuple[Tensor, Tensor]] = {}
    for counts in [{n: length} for n, length in enumerate(lengths)] + steps:
        rows = [Rows(n, cache.lengths.get(n, 0), count) for n, count in counts.items()]
        step = cache.step(rows)
        for layer, (heads, size) in enumerate(SHAPES):
            shape = (sum(counts.values()), size)
            query = torch.randn(2 * heads, *shape, generator=chance)
            key, value = torch.randn(2, heads, *shape, generator=chance)
            found = step.attend(layer, query, key, value).transpose(0, 1)
            begin = 0
            for each in rows:
                here = slice(begin, begin := begin + each.count)
                new = key[:, here], value[:, here]
                old = kept.get((each.sequence, layer), (key[:, :0], value[:, :0]))
                all_keys, all_values = (
                    torch.cat(pair, 1) for pair in zip(old, new, strict=True)
                )
                kept[each.sequence, layer] = all_keys, all_values
                at = torch.arange(each.begin, each.begin + each.count)
                wanted = functional.scaled_dot_product_attention(
                    query[None, :, here],
                    all_keys[None],
                    all_values[None],
                    attn_mask=torch.arange(all_keys.shape[1])[None] <= at[:, None],
                    enable_gqa=True,
                )[0]
                torch.testing.assert_close(
                    found[:, here], wanted, msg=f"{layer} {each}"
                )


class Own(nn.Module):
    """A user's stage, whose activation is a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 100), nn.Linear(100, 64)
        self.function = function

    def forward(self, rows: Tensor, *others: Any) -> Tensor:
        found: Tensor = rows + self.down(self.function(self.up(rows)))
        return found


@pytest.mark.parametrize(
    "function",
    [
        functional.silu,
        torch.sigmoid,
        Tensor.tanh,
        Tensor.sigmoid_,
        torch.special.expit,
        nn.Tanhshrink(),
        lambda x: functional.softplus(x, 2),
        lambda x: functional.silu(x, inplace=True),
        lambda x: functional.silu(input=x),
        lambda x: torch.sigmoid(x, out=torch.empty_like(x)),
        lambda x: functional.glu(torch.cat([x, x + 1], -1)),
        lambda x: torch.sigmoid(x.t()).view(-1, x.shape[0]).t(),
        lambda x: torch.pow(x.abs(), 1.7),
        lambda x: torch.pow(x.abs(), exponent=1.7),
        lambda x: x.abs().__ipow__(1.7),
        lambda x: 2.5**x,
        lambda x: torch.pow(2.5, x),
        lambda x: functional.elu_(x.clone()),
        lambda x: torch.sigmoid(x, out=torch.empty(0)),
        lambda x: (
            x.abs() ** torch.full((100,), 2.0)
        ),  # of two tensors: computed plainly
        lambda x: torch.sigmoid(x).view(-1).view(x.shape),
    ],
)
def test_functions_that_a_stage_calls_have_the_same_bits_in_every_step(
    function: Any, threads: int
) -> None:
    engine = engine_of(
        Own(function).eval(),
        is_last=False,
        model=Generation(
            tokenizer=lambda: None,
            end_tokens=(),
            vocabulary=100,
            max_tokens=1000,
            kv_bytes=(0,),
        ),
        is_deterministic=True,
    )
    rows = torch.randn(600, 64)
    own: Any = engine.function
    with torch.inference_mode():
        many = own(rows)
        alone = torch.cat([own(row) for row in torch.split(rows, 1)])
    assert torch.equal(many, alone)
