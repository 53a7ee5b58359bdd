"""The logits processor for vLLM's runner V2, with tensors on a GPU; without vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.serve.engine.external.test_vllm_continuation import (
    END,
    PlayedRunner,
    Plugin,
    generated,
    options,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(120),
]
DEVICE = torch.device("cuda", 0)


def test_structured_and_penalised_sequences_are_those_of_the_host(
    tmp_path: Path,
) -> None:
    """The tokens reach the host by copies that finish after the step."""
    plugin, pattern = Plugin(tmp_path), "(ab|cde){2}f[a-z]{2}"
    host = PlayedRunner(plugin)
    host.add(1, [5, 6], 7, options("structured", 2, pattern))
    host.add(2, [5, 6], 3, options("penalised", 2))
    while END not in host.made[1]:
        host.step(1, 2)
    wanted, count = dict(host.made), len(host.made[1])
    for cut in range(count):
        runner = PlayedRunner(plugin, DEVICE)
        runner.add(3, [5, 6, *wanted[1][:cut]], 7, options("s", 2, pattern))
        runner.add(0, [5, 6, *wanted[2][:cut]], 3, options("p", 2))
        for number in range(count - cut):
            runner.step(*((0, 3) if number % 2 else (3, 0)))
        assert runner.made[3] == wanted[1][cut:]
        assert runner.made[0] == wanted[2][cut:]
    assert plugin.failures == {}


def test_broken_sequence_ends_alone(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path)
    runner = PlayedRunner(plugin, DEVICE)
    runner.add(0, [5, 6], 3, "{")
    assert generated(runner, 0, 2) == [END, END]
    assert len(plugin.failures) == 1
