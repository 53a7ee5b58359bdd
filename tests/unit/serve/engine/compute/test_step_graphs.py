"""CUDA graphs of steps, tested with fake recorders."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multiworld.serve.engine.compute import step_graphs
from multiworld.serve.engine.compute.kv_cache import (
    KvCache,
    MissingTokensError,
    Rows,
)
from multiworld.serve.engine.compute.paged_kv_cache import (
    SCRATCH,
    ZERO,
    PagedKvCache,
)
from multiworld.serve.engine.compute.stage_engine import StageEngine
from multiworld.serve.engine.compute.step_graphs import Record, StepGraphs
from multiworld.serve.engine.models import decoder
from multiworld.serve.spec.stage import StageContext
from multiworld.serve.wire.generation_messages import StepPart
from tests.tiny_decoder import VOCABULARY, save_decoder

HIDDEN = 64


class Recorder:
    """A recorder that recomputes into the same tensor, as a graph does."""

    def __init__(self) -> None:
        self.recorded = self.launched = 0

    def __call__(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        kept = call()

        def launch() -> Tensor:
            self.launched += 1
            return kept.copy_(call())

        return launch


def loaded(folder: Path, number: int = 0, of: int = 1) -> Any:
    model = decoder.model(str(folder), of, dtype="float32")
    return model.stages[number].load(StageContext())


def prefill(
    stage: Any, cache: KvCache | PagedKvCache, sequence: int, rows: Tensor
) -> None:
    attention = cache.step([Rows(sequence, 0, len(rows))])
    stage(rows, torch.arange(len(rows)), attention, torch.tensor([0]))


def rows_of(count: int, number: int, draw: torch.Generator) -> Tensor:
    if number:
        return torch.randn(count, HIDDEN, generator=draw)
    return torch.randint(VOCABULARY, (count,), generator=draw)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt2"])
@pytest.mark.parametrize("number", [0, 1])
@torch.inference_mode()
def test_results_are_those_of_steps_without_graphs(
    family: str, number: int, tmp_path: Path
) -> None:
    stage = loaded(save_decoder(tmp_path, family), number, 2)
    paged, plain, record = PagedKvCache(4), KvCache(), Recorder()
    graphs = StepGraphs(stage, paged, record)
    chance, draw = torch.Generator().manual_seed(3), random.Random(3)
    lengths: dict[int, int] = {}
    for _ in range(60):
        for sequence in range(7):
            if sequence not in lengths and draw.random() < 0.3:
                rows = rows_of(draw.choice([3, 70]), number, chance)
                for cache in (paged, plain):
                    prefill(stage, cache, sequence, rows)
                lengths[sequence] = len(rows)
        if not lengths:
            continue
        chosen = draw.sample([*lengths], draw.randint(1, len(lengths)))
        sequences = [Rows(each, lengths[each], 1) for each in chosen]
        rows = rows_of(len(chosen), number, chance)
        found = graphs.compute(sequences, rows)
        assert found is not None
        at = torch.tensor([each.begin for each in sequences])
        wanted = torch.arange(len(rows))
        expected = stage(rows, at, plain.step(sequences), wanted)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        for each in chosen:
            lengths[each] += 1
            if draw.random() < 0.1:
                paged.free(each)
                plain.free(each)
                del lengths[each]
    assert record.recorded >= 4  # sizes
    assert record.launched > 2 * record.recorded


class Adding:
    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(
        self, rows: Tensor, positions: Tensor, attention: Any, wanted: Tensor
    ) -> Tensor:
        self.counts.append(len(rows))
        memory = rows.float()[None, :, None].expand(2, -1, 4) + 1.0
        attention.attend(0, memory, memory, memory)
        return rows[:, None] + 1.0


def computed(graphs: StepGraphs, begin: int, count: int = 1) -> list[float] | None:
    with torch.inference_mode():
        sequences = [Rows(n, begin, 1) for n in range(count)]
        found = graphs.compute(sequences, torch.arange(count) + begin)
    return None if found is None else found[:, 0].tolist()


def made(record: Record) -> tuple[StepGraphs, Adding, PagedKvCache]:
    stage, cache = Adding(), PagedKvCache(4, tokens=4000)
    return StepGraphs(stage, cache, record), stage, cache


def test_sizes_are_powers_of_two() -> None:
    """Five to eight sequences share a graph, which is recorded at its second use."""
    record = Recorder()
    graphs, stage, cache = made(record)
    recorded = []
    for begin, count in enumerate((8, 7, 6, 5, 2)):
        expected = [float(n + begin + 1) for n in range(count)]
        assert computed(graphs, begin, count) == expected
        recorded.append(record.recorded)
    assert recorded == [0, 1, 1, 1, 1]
    assert stage.counts[-1] == 2
    assert set(stage.counts[:-1]) == {8}
    assert set(cache.lengths.values()) == {1, 2, 3, 4, 5}


def test_rows_that_fill_up_reach_no_page_of_others() -> None:
    """Tables are padded with the page of zeros, which must stay zero."""
    graphs, _, cache = made(Recorder())
    free = cache.count - 2
    for begin in range(6):
        assert computed(graphs, begin, 3)
    assert cache.count - 2 == free >= 4000 // 4
    like = torch.empty(2, 1, 4), torch.empty(2, 1, 4)
    for pages in cache.pool(0, like):
        assert not pages[ZERO].any()
        used = {page for n in range(3) for page in cache.pages(n)}
        assert not {ZERO, SCRATCH} & used


def test_other_steps_are_computed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph gains nothing for prompts and for steps of many pages."""
    graphs, _, cache = made(Recorder())
    with torch.inference_mode():
        assert graphs.compute([Rows(0, 0, 2)], torch.arange(2)) is None
    monkeypatch.setattr(step_graphs, "MAX_TOKENS", 16 * 4)
    assert computed(graphs, 0, 2) is None
    assert cache.lengths == {}
    assert computed(graphs, 0, 1) == [1.0]


def test_missing_tokens_are_reported() -> None:
    graphs, _, _ = made(Recorder())
    with pytest.raises(MissingTokensError):
        computed(graphs, 7)


def test_graphs_are_recorded_again_when_pages_move() -> None:
    """A cache that grows copies its pages; a graph would read the old ones."""
    record = Recorder()
    graphs, _, cache = made(record)
    for begin in range(4):
        computed(graphs, begin)
    assert record.recorded == 1
    with torch.inference_mode():
        cache.step([Rows("long", 0, 4 * cache.count)])
    for begin in range(4, 8):
        assert computed(graphs, begin) == [begin + 1.0]
    assert record.recorded == 2


def test_stage_that_cannot_be_recorded_is_computed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """For example, a stage that waits for the GPU cannot be recorded."""

    def refuse(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs, _, _ = made(refuse)
    assert [computed(graphs, n) for n in range(2)] == [[1.0], [2.0]]
    assert computed(graphs, 2) is None
    assert "not permitted" in caplog.text


def test_graph_with_other_results_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """A graph does not repeat what a stage computes on the host."""

    def frozen(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        found = call()
        return lambda: found

    graphs, _, _ = made(frozen)
    assert [computed(graphs, n) for n in range(2)] == [[1.0], [2.0]]
    assert computed(graphs, 2) is None
    assert "the results of a graph differ" in caplog.text
    assert not graphs.clear()  # no memory is kept


def test_cleared_graphs_are_recorded_again() -> None:
    """Clearing frees their memory for other steps."""
    record = Recorder()
    graphs, _, _ = made(record)
    for begin in range(6):
        if begin == 3:
            graphs.clear()
        assert computed(graphs, begin) == [begin + 1.0]
    assert record.recorded == 2


def test_memory_of_graphs_is_freed_for_a_step_that_lacks_it() -> None:
    stage = Adding()
    cache, record = PagedKvCache(4), Recorder()
    graphs = StepGraphs(stage, cache, record)

    def crowded(rows: Tensor, *given: Any) -> Tensor:
        if len(rows) > 8 and graphs.clear():
            graphs.compute([Rows(9, 0, 1)], rows[:1])  # there are some again
            raise torch.OutOfMemoryError("no memory")
        return stage(rows, *given)

    facts: Any = None
    engine = StageEngine(crowded, False, facts, cache, graphs=graphs)
    one = StepPart(("g", 0, 1), 0, 1, samples=False)
    assert engine.compute([one], torch.tensor([5])).parts
    prompt = StepPart(("g", 1, 1), 0, 40, samples=False)
    found = engine.compute([prompt], torch.arange(40))
    assert found.parts == (prompt,)
    assert not found.failed


def test_missing_memory_ends_no_graphs() -> None:
    record = Recorder()
    failures = [torch.OutOfMemoryError("no memory")]

    def record_later(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if failures:
            raise failures.pop()
        return record(call)

    graphs, _, _ = made(record_later)
    assert [computed(graphs, n) for n in range(6)] == [[n + 1.0] for n in range(6)]
    assert record.launched


def test_nan_of_one_sequence_ends_no_graphs() -> None:
    """Results are compared bitwise, because NaN does not equal itself."""
    record = Recorder()
    cache = PagedKvCache(4)

    def stage(rows: Tensor, at: Tensor, attention: Any, wanted: Tensor) -> Tensor:
        return Adding()(rows, at, attention, wanted) * float("nan")

    graphs = StepGraphs(stage, cache, record)
    for begin in range(4):
        assert computed(graphs, begin) is not None
    assert record.launched == 3


def test_step_that_fails_is_not_known() -> None:
    """A failed step does not count as the first one, which initialises libraries."""
    record = Recorder()
    cache, stage, failing = PagedKvCache(4), Adding(), [0, 3]
    calls = iter(range(100))

    def broken(*given: Any) -> Tensor:
        if next(calls) in failing:
            raise RuntimeError("broken")
        return stage(*given)

    graphs = StepGraphs(broken, cache, record)
    with pytest.raises(RuntimeError, match="broken"):
        computed(graphs, 0)
    assert computed(graphs, 0) == [1.0]
    assert record.recorded == 0
    with pytest.raises(RuntimeError, match="broken"):  # beside the graph
        computed(graphs, 1)
    assert computed(graphs, 1) == [2.0]
    assert record.recorded == 2


def test_states_of_another_dtype_are_refused() -> None:
    """A copy would convert them silently."""
    cache = PagedKvCache(4)

    def stage(rows: Tensor, *_: Any) -> Tensor:
        return rows

    graphs = StepGraphs(stage, cache, Recorder())
    with torch.inference_mode():
        graphs.compute([Rows(0, 0, 1)], torch.ones(1, 4))
        with pytest.raises(ValueError, match="dtype"):
            graphs.compute([Rows(0, 1, 1)], torch.ones(1, 4, dtype=torch.bfloat16))


def test_pages_that_do_not_fit_are_not_half_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache that cannot grow keeps all its pages."""
    cache = PagedKvCache(4)
    with torch.inference_mode():
        for layer in range(3):
            ones = torch.ones(2, 1, 4)
            cache.step([Rows(0, layer, 1)]).attend(layer, ones, ones, ones)
    like = torch.empty(2, 1, 4), torch.empty(2, 1, 4)
    before, count, calls = [cache.pool(n, like) for n in range(3)], cache.count, [0]

    def crowded(given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise torch.OutOfMemoryError("no memory")
        return joined(given)

    joined = torch.cat
    monkeypatch.setattr(torch, "cat", crowded)
    with pytest.raises(torch.OutOfMemoryError):
        cache.make_room([Rows("long", 0, 4 * count)])
    assert cache.count == count
    for number, (keys, _) in enumerate(before):
        assert cache.pool(number, like)[0] is keys


def test_early_row_of_a_long_sequence_is_computed_again() -> None:
    """Its table is cut to the length of the graph's."""
    record = Recorder()
    graphs, _, cache = made(record)
    with torch.inference_mode():
        cache.make_room([Rows(0, 0, 200)])  # 50 pages, and a graph of 16
    for _ in range(3):
        assert computed(graphs, 3) == [4.0]
    assert record.launched


def test_pages_of_a_graph_are_a_power_of_two() -> None:
    """Sequences of 17 to 32 pages share a graph."""
    record = Recorder()
    graphs, _, cache = made(record)
    with torch.inference_mode():
        cache.make_room([Rows(0, 0, 63)])
    for begin in (63, 64, 65):
        assert computed(graphs, begin) == [begin + 1.0]
    assert record.recorded == 1  # 63 is the last of 16 pages, and came once
    with torch.inference_mode():
        cache.make_room([Rows(0, 66, 61)])
    for begin in (127, 128):
        assert computed(graphs, begin) == [begin + 1.0]
    assert record.launched == 2  # 128 is on a page more than the graph has


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "qwen3_moe"])
def test_stages_in_which_the_host_decides_are_not_recorded(
    kind: str, tmp_path: Path
) -> None:
    """A failed recording can leave torch's memory in disorder."""
    stage = loaded(save_decoder(tmp_path, kind))
    assert stage.is_recordable == (kind in ("llama", "gpt2"))
    if kind == "llama":
        stage.whole.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
        assert not stage.is_recordable


@pytest.mark.parametrize("fails", [False, True])
def test_recording_is_on_a_stream_of_the_stages_device(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state: dict[str, Any] = {"device": 0, "stream": "default of 0"}

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.number = device.index

        def __enter__(self) -> None:
            state["device"], state["stream"] = self.number, f"default of {self.number}"

        def __exit__(self, *_: Any) -> None:
            state["device"] = 0

    class Capture:
        def __init__(self, graph: Any, **options: Any) -> None:
            assert state["device"] == 1
            state["on"] = options["stream"]

        def __enter__(self) -> None:
            state["stream"] = state["on"]

        def __exit__(self, *_: Any) -> None:
            if fails:
                raise RuntimeError("the capture failed")

    class Graph:
        def pool(self) -> str:
            return "pool"

        def replay(self) -> None: ...

    fakes = {
        "Stream": lambda device: f"own of {device.index}",
        "CUDAGraph": Graph,
        "device": Device,
        "graph": Capture,
        "current_stream": lambda: state["stream"],
        "set_stream": lambda stream: state.update(stream=stream),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    record = step_graphs.recorder(torch.device("cuda", 1))
    expects = pytest.raises(RuntimeError) if fails else contextlib.nullcontext()
    with expects:
        record(lambda: torch.ones(1))
    assert state["on"] == "own of 1"
    assert state["stream"] == "default of 1"
