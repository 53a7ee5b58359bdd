"""CUDA graphs of steps, by recorders that are played: which steps are recorded, what
fills them up, and what happens when a stage cannot be recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from multiworld.serve.generation.models import decoder
from multiworld.serve.generation.replica import step_graphs
from multiworld.serve.generation.replica.kv_cache import (
    KvCache,
    MissingTokensError,
    Rows,
)
from multiworld.serve.generation.replica.paged_kv_cache import SPARE, ZERO, PagedKvCache
from multiworld.serve.generation.replica.stage_engine import StageEngine
from multiworld.serve.generation.replica.step_graphs import Record, StepGraphs
from multiworld.serve.spec.stage import StageContext
from multiworld.serve.transport.generation_messages import StepPart
from tests.tiny_decoder import VOCABULARY, save_decoder

HIDDEN = 64


class Recorder:
    """Launches again what it recorded, and counts."""

    def __init__(self) -> None:
        self.recorded = self.launched = 0

    def __call__(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1

        def launch() -> Tensor:
            self.launched += 1
            return call()

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
    """Return random rows for a stage."""
    if number:
        return torch.randn(count, HIDDEN, generator=draw)
    return torch.randint(VOCABULARY, (count,), generator=draw)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gpt2"])
@pytest.mark.parametrize("number", [0, 1])
@torch.inference_mode()
def test_results_are_those_of_steps_without_graphs(
    family: str, number: int, tmp_path: Path
) -> None:
    """Numbers of sequences and of pages change; sequences go, and begin again."""
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
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for each in chosen:
            lengths[each] += 1
            if draw.random() < 0.1:
                paged.free(each)
                plain.free(each)
                del lengths[each]
    assert record.recorded >= 4  # sizes
    assert record.launched > 2 * record.recorded


class Adding:
    """A stage that adds one; what it is asked for is recorded."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(
        self, rows: Tensor, positions: Tensor, attention: Any, wanted: Tensor
    ) -> Tensor:
        self.counts.append(len(rows))
        memory = rows.float()[None, :, None].expand(2, -1, 4)
        attention.attend(0, memory, memory, memory)
        return rows[:, None] + 1.0


def computed(graphs: StepGraphs, begin: int, count: int = 1) -> list[float] | None:
    """Compute a step of sequences at a position; return its results."""
    with torch.inference_mode():
        sequences = [Rows(n, begin, 1) for n in range(count)]
        found = graphs.compute(sequences, torch.arange(count) + begin)
    return None if found is None else found[:, 0].tolist()


def made(record: Record) -> tuple[StepGraphs, Adding, PagedKvCache]:
    stage, cache = Adding(), PagedKvCache(4, tokens=4000)
    return StepGraphs(stage, cache, record), stage, cache


def test_sizes_are_powers_of_two() -> None:
    """Five to eight sequences share a graph; it is recorded when it comes again."""
    record = Recorder()
    graphs, stage, cache = made(record)
    recorded = []
    for begin, count in enumerate((8, 7, 6, 5, 2)):
        expected = [float(n + begin + 1) for n in range(count)]
        assert computed(graphs, begin, count) == expected
        recorded.append(record.recorded)
    assert recorded == [0, 1, 1, 1, 1]
    # Once computed, once recorded and compared.
    assert stage.counts == [8, 8, 8, 8, 8, 2]
    assert set(cache.lengths.values()) == {1, 2, 3, 4, 5}


def test_rows_that_fill_up_reach_no_page_of_others() -> None:
    """Tables are filled up with pages of zeros, which stay so."""
    graphs, _, cache = made(Recorder())
    for begin in range(6):
        assert computed(graphs, begin, 3)
    like = torch.empty(2, 1, 4), torch.empty(2, 1, 4)
    for pages in cache.pool(0, like):
        assert not pages[ZERO].any()
        used = {page for n in range(3) for page in cache.pages(n)}
        assert not {ZERO, SPARE} & used


def test_other_steps_are_computed_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, and steps of so many pages that a graph would gain nothing."""
    graphs, _, cache = made(Recorder())
    with torch.inference_mode():
        assert graphs.compute([Rows(0, 0, 2)], torch.arange(2)) is None
    monkeypatch.setattr(step_graphs, "MAX_TOKENS", 16 * 4)
    assert computed(graphs, 0, 2) is None
    assert cache.lengths == {}
    assert computed(graphs, 0, 1) == [1.0]


def test_missing_tokens_are_reported() -> None:
    """As without graphs; the engine returns such a sequence."""
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
    """One that waits for the GPU in its midst, for example; the log says so once."""

    def refuse(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs, _, _ = made(refuse)
    assert [computed(graphs, n) for n in range(2)] == [[1.0], [2.0]]
    assert computed(graphs, 2) is None
    assert "not permitted" in caplog.text


def test_graph_with_other_results_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """What a stage computes on the host does not happen again in a graph."""

    def frozen(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        found = call() + 1
        return lambda: found

    graphs, _, _ = made(frozen)
    assert [computed(graphs, n) for n in range(2)] == [[1.0], [2.0]]
    assert computed(graphs, 2) is None
    assert "results differ" in caplog.text


def test_cleared_graphs_are_recorded_again() -> None:
    """Their memory is given up for other steps."""
    record = Recorder()
    graphs, _, _ = made(record)
    for begin in range(6):
        if begin == 3:
            graphs.clear()
        assert computed(graphs, begin) == [begin + 1.0]
    assert record.recorded == 2


def test_memory_of_graphs_is_freed_for_a_step_that_lacks_it() -> None:
    """A prompt that does not fit beside them is computed without them."""
    cleared = []

    class Graphs(StepGraphs):
        def clear(self) -> None:
            cleared.append(1)

    def stage(*_: Any) -> Tensor:
        if not cleared:
            raise torch.OutOfMemoryError("no memory")
        return torch.ones(1, 4)

    facts: Any = None
    cache = PagedKvCache(4)
    graphs = Graphs(stage, cache, Recorder())
    engine = StageEngine(stage, False, facts, cache, graphs=graphs)
    parts = [StepPart(("g", n, 1), 0, 1, samples=False) for n in range(2)]
    found = engine.compute(parts, torch.zeros(2, dtype=torch.int64))
    assert len(found.parts) == 2
    assert not found.failed
