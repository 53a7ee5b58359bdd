"""The paged KV cache: the attention of contiguous memory, on any device."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from multiworld.serve.engine.compute import paged_kv_cache
from multiworld.serve.engine.compute.kv_cache import (
    KvCache,
    MissingTokensError,
    Rows,
)
from multiworld.serve.engine.compute.paged_kv_cache import PagedKvCache
from multiworld.serve.engine.compute.stage_engine import (
    Chores,
    StageEngine,
    engine_of,
)
from multiworld.serve.engine.compute.transfers import HOST, Transfers
from multiworld.serve.engine.models import decoder
from multiworld.serve.spec.stage import StageContext
from multiworld.serve.wire.generation_messages import (
    Sampling,
    SequenceStart,
    StepPart,
)
from tests.tiny_decoder import VOCABULARY, save_decoder

HEADS, KEY_HEADS, SIZE = 4, 2, 8
LAYERS = 2
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def step_of(draw: random.Random, lengths: dict[int, int]) -> list[Rows]:
    found = []
    for sequence in draw.sample(range(8), draw.randrange(1, 6)):
        length = lengths.get(sequence, 0)
        begin = draw.choice([length, length, length, max(0, length - 3), 0])
        count = draw.choice([1, 1, 1, draw.randrange(1, 40)])
        found.append(Rows(sequence, begin, count))
        lengths[sequence] = begin + count
    return found


@torch.inference_mode()
def attended(
    store: KvCache | PagedKvCache, rows: Sequence[Rows], seed: int, **options: Any
) -> list[Tensor]:
    chance = torch.Generator().manual_seed(seed)
    attention, found = store.step(rows), []
    count = sum(each.count for each in rows)
    for layer in range(LAYERS):
        query = torch.randn(HEADS, count, SIZE, generator=chance)
        key, value = (
            torch.randn(KEY_HEADS, count, SIZE, generator=chance) for _ in range(2)
        )
        found.append(attention.attend(layer, query, key, value, **options))
    return found


@pytest.fixture(params=["gathered", "kernel"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Gather pages, or use the kernel, for which a stand-in is installed."""
    if request.param == "kernel":
        monkeypatch.setattr(paged_kv_cache, "may_have_kernel", lambda query: True)
        monkeypatch.setattr(paged_kv_cache, "torch_kernel", lambda: kernel)
    found: str = request.param
    return found


def kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    begins: Tensor,
    key_begins: None,
    max_rows: int,
    max_keys: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int,
) -> Tensor:
    """Compute what torch documents for ``varlen_attn``, sequence by sequence."""
    for each in (begins, seqused_k, block_table):
        assert each.dtype == torch.int32
    assert query.is_contiguous()
    assert num_splits == 1
    assert enable_gqa
    found, ends = [], begins.tolist()
    assert max_rows == max(b - a for a, b in itertools.pairwise(ends))
    assert max_keys == int(seqused_k.max())
    for n, used in enumerate(seqused_k.tolist()):
        rows = query[ends[n] : ends[n + 1]]
        pages = block_table[n].long()
        key, value = (
            pool[pages].flatten(0, 1)[:used].repeat_interleave(HEADS // KEY_HEADS, 1)
            for pool in (keys, values)
        )
        scores = torch.einsum("rhd,khd->hrk", rows, key) * (scale or SIZE**-0.5)
        at = torch.arange(used - len(rows), used)[:, None]
        of = torch.arange(used)[None]
        seen = of <= at
        if window_size[0] >= 0:
            seen &= of >= at - window_size[0]
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        found.append(torch.einsum("hrk,khd->rhd", weights, value))
    return torch.cat(found)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from([1, 4, 16]))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 5},
        {"scale": 0.3},
        {"softcap": 2.0},
        {"softcap": 2.0, "window": 9},
    ],
    ids=str,
)
def test_attention_is_that_of_contiguous_memory(
    options: dict[str, Any], seed: int, page_size: int
) -> None:
    draw, lengths = random.Random(seed), dict[int, int]()
    paged, plain = PagedKvCache(page_size), KvCache()
    for number in range(12):
        rows = step_of(draw, lengths)
        found = attended(paged, rows, number, **options)
        expected = attended(plain, rows, number, **options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)
        sequence = draw.choice([*lengths])
        if draw.random() < 0.3:
            paged.free(sequence)
            plain.free(sequence)
            del lengths[sequence]
        elif draw.random() < 0.5 and (end := lengths[sequence]) > 1:
            cut = draw.randrange(1, end)
            for store in (paged, plain):
                pieces = [
                    store.copied(sequence, *span) for span in ((0, cut), (cut, end))
                ]
                store.free(sequence)
                store.restore(sequence, pieces, end)
        assert paged.lengths == plain.lengths == lengths
    for sequence in [*lengths]:
        paged.free(sequence)
    assert paged.nbytes == 0


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"scale": 0.3}], ids=str)
def test_kernel_gets_what_its_documentation_asks_for(
    options: dict[str, Any], path: str
) -> None:
    draw, lengths = random.Random(3), dict[int, int]()
    paged, plain = PagedKvCache(4), KvCache()
    for number in range(30):
        rows = step_of(draw, lengths)
        found = attended(paged, rows, number, **options)
        expected = attended(plain, rows, number, **options)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **CLOSE)


def test_kernel_that_does_not_run_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        raise RuntimeError("needs FlashAttention 3")

    monkeypatch.setattr(paged_kv_cache, "may_have_kernel", lambda query: True)
    monkeypatch.setattr(paged_kv_cache, "torch_kernel", lambda: refuse)
    paged, plain, rows = PagedKvCache(4), KvCache(), [Rows("a", 0, 5), Rows("b", 0, 1)]
    found, expected = attended(paged, rows, 1), attended(plain, rows, 1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    assert len(calls) == 1
    assert "FlashAttention 3" in caplog.text


def test_pages_grow_when_they_do_not_suffice() -> None:
    paged = PagedKvCache(4, tokens=1)
    attended(paged, [Rows("a", 0, 20)], 1)
    kept = paged.copied("a", 0, 20)
    attended(paged, [Rows("b", 0, 4000)], 2)
    for layer, pair in paged.copied("a", 0, 20).items():
        for one, other in zip(pair, kept[layer], strict=True):
            assert torch.equal(one, other)


def test_missing_tokens_are_reported() -> None:
    with pytest.raises(MissingTokensError):
        PagedKvCache().step([Rows("a", 5, 1)])


@torch.inference_mode()
def with_bad_pages() -> PagedKvCache:
    """Return a store whose free pages have NaNs of an earlier sequence."""
    paged = PagedKvCache(4)
    bad = torch.full((KEY_HEADS, 30, SIZE), float("nan"))
    attention = paged.step([Rows("bad", 0, 30)])
    for layer in range(LAYERS):
        attention.attend(layer, torch.ones(HEADS, 30, SIZE), bad, bad)
    paged.free("bad")
    return paged


def test_numbers_of_one_sequence_reach_no_other() -> None:
    paged, plain = with_bad_pages(), KvCache()
    rows = [Rows("good", 0, 1), Rows("other", 0, 7)]
    found, expected = attended(paged, rows, 1), attended(plain, rows, 1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_step_without_memory_leaves_no_numbers_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a step that memory does not suffice for, its parts are computed alone."""
    paged, plain = with_bad_pages(), KvCache()
    for store in (paged, plain):
        attended(store, [Rows("good", 0, 4), Rows("long", 0, 20)], 1)
    rows = [Rows("good", 4, 1), Rows("long", 20, 1)]  # one computation for both
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(torch, "zeros_like", _without_memory)
        with pytest.raises(torch.OutOfMemoryError):
            paged.step([*rows, Rows("huge", 0, 10_000)])
    found, expected = attended(paged, rows, 1), attended(plain, rows, 1)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def _without_memory(like: Tensor) -> Tensor:
    raise torch.OutOfMemoryError


# A whole stage.


class Elsewhere(Transfers):
    """Transfers to a fake GPU, which tracks shapes and devices only."""

    def upload(self, tensor: Tensor) -> Tensor:
        return on_gpu(tensor)

    def download(self, tensor: Tensor) -> Tensor:
        assert tensor.device.type == "cuda"
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)


class PlainIndexing(TorchFunctionMode):
    """Replaces indexing by brackets, which would ask for the fake device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return indexed(*args)
        if func is Tensor.__setitem__:
            return torch.ops.aten.copy_(indexed(*args[:2]), args[2])
        return func(*args, **(kwargs or {}))


def indexed(tensor: Tensor, index: Any) -> Tensor:
    """Return ``tensor[index]``, by torch's operators."""
    given = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in given:
        at, used = given.index(Ellipsis), len(given) - 1 - given.count(None)
        given[at : at + 1] = [slice(None)] * (tensor.dim() - used)
    dim = 0
    for each in given:
        match each:
            case None:
                tensor = torch.ops.aten.unsqueeze(tensor, dim)
            case int():
                tensor = torch.ops.aten.select(tensor, dim, each)
                continue
            case slice(start=start, stop=stop, step=step):
                tensor = torch.ops.aten.slice(tensor, dim, start, stop, step or 1)
            case _:
                raise AssertionError(f"indexed by {type(each).__name__}")
        dim += 1
    return tensor


def on_gpu(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


def engine(
    folder: Path,
    store: Any,
    transfers: Transfers,
    number: int,
    of: int,
    dtype: str = "float32",
) -> Any:
    model = decoder.model(str(folder), of, dtype=dtype)
    assert model.generation is not None
    with torch.inference_mode():
        function: Any = model.stages[number].load(StageContext())
    return StageEngine(function, number == of - 1, model.generation, store, transfers)


def parts_of(draw: random.Random, lengths: dict[int, int]) -> list[StepPart]:
    found = []
    for sequence, length in lengths.items():
        count = 1 if length else draw.randrange(1, 12)
        found.append(StepPart(("g", sequence, 1), length, count, samples=True))
        lengths[sequence] += count
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "gpt2"])
def test_tokens_are_those_of_contiguous_memory(family: str, tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, family)
    stores = PagedKvCache(4), KvCache()
    engines = [engine(folder, store, HOST, 0, 1) for store in stores]
    draw = random.Random(5)
    prompts = {n: [draw.randrange(VOCABULARY) for _ in range(40)] for n in range(3)}
    sampling = Sampling(temperature=0.0, max_tokens=99, ignore_eos=True)
    for one in engines:
        starts = [
            (SequenceStart(("g", n, 1), tuple(prompts[n]), 40, (), sampling), None)
            for n in prompts
        ]
        one.tidy(Chores(open=starts))
    lengths = dict.fromkeys(prompts, 0)
    for _ in range(20):
        parts = parts_of(draw, lengths)
        rows = [
            t for p in parts for t in prompts[p.key[1]][p.begin : p.begin + p.count]
        ]
        found = [one.compute(parts, torch.tensor(rows)) for one in engines]
        assert not found[0].failed
        assert [t.token for t in found[0].tokens] == [t.token for t in found[1].tokens]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", [0, 1])
def test_stage_keeps_to_its_device(number: int, dtype: str, tmp_path: Path) -> None:
    """On a fake GPU; in bfloat16, torch's own ``varlen_attn`` checks its arguments."""
    folder = save_decoder(tmp_path, "llama")
    transfers = Elsewhere(torch.device("cuda"))
    store = PagedKvCache(4, transfers=transfers)
    made = engine(folder, store, transfers, number, 3, dtype)
    draw, lengths = random.Random(2), dict.fromkeys(range(3), 0)
    steps = [parts_of(draw, lengths) for _ in range(5)]
    counts = [sum(part.count for part in parts) for parts in steps]
    kind = getattr(torch, dtype)
    rows = [
        torch.zeros(n, 64, dtype=kind) if number else torch.zeros(n).long()
        for n in counts
    ]
    whole: Any = made.function
    with FakeTensorMode(allow_non_fake_inputs=True), PlainIndexing():
        named = [*whole.named_parameters(), *whole.named_buffers()]
        moved = {name: on_gpu(tensor) for name, tensor in named}
        made.function = lambda *given: functional_call(whole, moved, given)
        for parts, count, given in zip(steps, counts, rows, strict=True):
            found = made.compute(parts, given)
            assert not found.failed, found.failed
            assert found.hidden.shape == (count, 64)
            assert type(found.hidden) is Tensor
        pieces = store.copied(("g", 0), 0, 5)
        assert {t.shape for pair in pieces.values() for t in pair} == {(2, 5, 16)}
        store.restore(("g", 7), [pieces], 5)
    assert store.lengths["g", 7] == 5


@pytest.mark.parametrize("forgets", ["upload", "download"])
def test_what_is_not_copied_is_found(forgets: str, tmp_path: Path) -> None:
    """The test above fails if a tensor does not go through the transfers."""
    transfers = Elsewhere(torch.device("cuda"))
    store = PagedKvCache(4, transfers=HOST)
    with FakeTensorMode():
        if forgets == "upload":
            attention = store.step([Rows("a", 0, 3)])
            numbers = on_gpu(torch.empty(KEY_HEADS, 3, SIZE))
            with pytest.raises(RuntimeError, match="device"):
                attention.attend(0, on_gpu(torch.empty(HEADS, 3, SIZE)), *[numbers] * 2)
        else:
            with pytest.raises(AssertionError):
                transfers.download(torch.empty(3))


def test_engine_of_a_device_has_pages(tmp_path: Path) -> None:
    """Only the CPU has packed weights and contiguous memory."""
    folder = save_decoder(tmp_path, "llama")
    model = decoder.model(str(folder), dtype="float32")
    assert model.generation is not None
    function: Any = model.stages[0].load(StageContext())
    options: dict[str, Any] = {
        "is_last": True,
        "model": model.generation,
        "is_deterministic": False,
    }
    device = Transfers(torch.device("cuda"))
    paged = engine_of(function, transfers=device, tokens=8000, **options)
    assert isinstance(paged.cache, PagedKvCache)
    assert paged.graphs is not None
    assert isinstance(engine_of(function, **options).cache, KvCache)
