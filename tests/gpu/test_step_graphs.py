"""CUDA graphs of decode steps on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multiworld.serve.engine.compute.kv_cache import Rows
from multiworld.serve.engine.compute.paged_kv_cache import PagedKvCache
from multiworld.serve.engine.compute.step_graphs import StepGraphs, recorder
from multiworld.serve.engine.compute.transfers import Transfers
from multiworld.serve.engine.models import decoder_stage
from multiworld.serve.engine.models.partition import Span
from tests.tiny_decoder import VOCABULARY, save_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(120),
]
DEVICE = torch.device("cuda", 0)
PROMPT, STEPS, PAGE = 50, 40, 4  # 64 tokens need as many pages as a graph has first
# Tolerance relative to the logits: other numbers of rows use other kernels.
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.03}


class Waiting(nn.Module):
    """A stage that waits for the GPU, which cannot be recorded."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *given: Any) -> Tensor:
        found: Tensor = self.stage(*given)
        assert found.sum().item() < torch.inf
        return found


def loaded(folder: Path, dtype: str) -> nn.Module:
    return decoder_stage.load(folder, Span(0, 4, 4), dtype, str(DEVICE))


def compare(stage: nn.Module, dtype: str) -> bool:
    """Compare steps of sequences with and without graphs; return whether it has any."""
    recorded: list[Any] = []
    record = recorder(DEVICE)

    def counted(call: Any) -> Any:
        recorded.append(record(call))
        return recorded[-1]

    transfers = Transfers(DEVICE)
    caches = [PagedKvCache(PAGE, transfers=transfers) for _ in range(2)]
    graphs = StepGraphs(stage, caches[0], counted)
    upload, draw = transfers.upload, torch.Generator().manual_seed(1)
    for sequence in range(3):
        rows = torch.randint(VOCABULARY, (PROMPT,), generator=draw)
        for cache in caches:
            attention = cache.step([Rows(sequence, 0, PROMPT)])
            at = upload(torch.arange(PROMPT))
            stage(upload(rows), at, attention, at[:1])
    for step in range(STEPS):
        count = 1 + step % 3
        begins = [
            PROMPT + sum(1 + s % 3 > n for s in range(step)) for n in range(count)
        ]
        sequences = [Rows(n, begin, 1) for n, begin in enumerate(begins)]
        rows = torch.randint(VOCABULARY, (count,), generator=draw)
        found = graphs.compute(sequences, rows)
        wanted = upload(torch.arange(count))
        given = upload(rows), upload(torch.tensor(begins))
        if found is None:
            found = stage(*given, caches[0].step(sequences), wanted)
        expected = stage(*given, caches[1].step(sequences), wanted)
        assert (found - expected).norm() < TOLERANCE[dtype] * expected.norm()
    return len(recorded) >= 5  # 1, 2 and 4 rows, and longer ones of some of them


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt2"]
)
@torch.inference_mode()
def test_graphs_compute_what_their_kernels_do(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """Tokens, positions and pages are read when a graph is launched."""
    folder = save_decoder(tmp_path, family, dtype=getattr(torch, dtype))
    assert compare(loaded(folder, dtype), dtype)


@torch.inference_mode()
def test_graphs_are_recorded_again(tmp_path: Path) -> None:
    """Graphs are recorded again when pages move, and when their memory was freed."""
    stage = loaded(save_decoder(tmp_path, "llama"), "float32")
    cache = PagedKvCache(transfers=Transfers(DEVICE))
    graphs = StepGraphs(stage, cache, recorder(DEVICE))
    token, found = torch.tensor([7]), []
    for begin in range(15):
        if begin == 5:
            graphs.clear()
        if begin == 10:
            cache.make_room([Rows("long", 0, cache.count * cache.page_size)])
        one = graphs.compute([Rows("a", begin, 1)], token)
        assert one is not None
        found.append(one.clone())
    assert graphs.compute([Rows("a", 15, 1)], token) is not None  # still in use
    other, rows = PagedKvCache(transfers=Transfers(DEVICE)), token.to(DEVICE)
    for begin, one in enumerate(found):
        at = torch.arange(begin + 1, device=DEVICE)
        attention = other.step([Rows("a", 0, begin + 1)])
        expected = stage(rows.expand(begin + 1), at, attention, at[-1:])
        torch.testing.assert_close(one, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["waits", "mixtral"])
@torch.inference_mode()
def test_stages_that_cannot_be_recorded_are_computed(kind: str, tmp_path: Path) -> None:
    """A failed recording leaves the GPU as it was."""
    family = "llama" if kind == "waits" else kind
    stage = loaded(save_decoder(tmp_path, family), "float32")
    has_graphs = compare(Waiting(stage) if kind == "waits" else stage, "float32")
    assert not has_graphs
    assert compare(loaded(save_decoder(tmp_path / "b", "llama"), "float32"), "float32")
