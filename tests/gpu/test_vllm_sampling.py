"""The logits processor for vLLM, with logits on a GPU; vLLM itself is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multiworld.serve.wire.generation_messages import Sampling
from tests.unit.serve.engine.external.test_vllm_sampling import (
    SAMPLINGS,
    Asked,
    BatchUpdate,
    Beside,
    expected,
    logits_after,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.timeout(120),
]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_tokens_are_those_that_our_sampler_draws_on_the_host(
    tmp_path: Path, *, is_pinned: bool
) -> None:
    beside = Beside(tmp_path)
    processor = beside.module.MultiworldSampling(None, DEVICE, is_pinned)
    every: list[Asked] = []
    for name, given in SAMPLINGS.items():
        every.append(Asked(name, Sampling(**given)))
        last = len(every) - 1
        processor.update_state(BatchUpdate(added=[every[last].at(last)]))
        made = [logits_after([*o.tokens, *o.output], torch.float32) for o in every]
        found = processor.apply(torch.stack(made).to(DEVICE)).argmax(-1).tolist()
        assert found == [expected(one, torch.float32) for one in every]
        for one, token in zip(every, found, strict=True):
            one.output.append(token)
    assert beside.failures == []
