"""Suite "processor": cost of our logits processor in a step of vLLM's runner V2.

The two calls of the processor in a step are measured without vLLM, with the vocabulary
of SmolLM2: for sequences whose penalties vLLM counts itself, and for sequences with a
grammar, whose masks are computed and applied to the logits. Nothing overlaps with a
model here. The baseline, "reading", is one pass over the logits.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.members import Options, Step
from multiworld.demo import smollm2
from multiworld.serve.engine.external.vllm import PLUGIN, write_plugin
from multiworld.serve.engine.external.whole_engine import EngineSettings
from multiworld.serve.text.grammar import grammar_of_regex

READING, PENALISED, STRUCTURED = "reading", "penalised", "structured"
"""Names of the contenders."""

KIND = "a step, by rows"
ROWS = (1, 4, 16)
VOCABULARY, PROMPT, LONGEST = 49_152, 100, 2048
STEPS = 50

OnStep = Callable[[Step], None]


def run(options: Options, on_step: OnStep) -> None:
    """Measure all contenders alternately, with one thread."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as at:
            settings = EngineSettings(
                replica="m/0/1",
                path=str(folder),
                vocabulary=VOCABULARY,
                end_tokens=(2,),
            )
            write_plugin(Path(at), settings)
            sys.path.insert(0, at)
            module = importlib.import_module(f"{PLUGIN}.continuation")
            sys.path.remove(at)
            _measure(module, options, on_step)
    finally:
        torch.set_num_threads(threads)


def _measure(module: Any, options: Options, on_step: OnStep) -> None:
    total, done = options.rounds * len(ROWS) * 3, 0
    for _ in range(options.rounds):
        for rows in ROWS:
            for who in (READING, PENALISED, STRUCTURED):
                on_step(("step", (done / total, f"{rows} rows, {who}")))
                took_ms = 1000 * _step_s(module, who, rows)
                on_step(("sample", (KIND, rows, who, "ms", took_ms)))
                done += 1


def _step_s(module: Any, who: str, rows: int) -> float:
    """Return the mean seconds of a step."""
    logits = torch.randn(rows, VOCABULARY)
    if who == READING:
        began = time.perf_counter()
        for _ in range(STEPS):
            logits.amax(-1)
        return (time.perf_counter() - began) / STEPS
    states = _states(rows)
    processor = module.Continuation(None, states)
    grammar = grammar_of_regex("[a-z ]*", "regex") if who == STRUCTURED else ""
    given = json.dumps({"name": "x", "prompt": PROMPT, "ends": [2], "grammar": grammar})
    for slot in range(rows):
        params = SimpleNamespace(extra_args={"multiworld": given})
        processor.add_request(slot, params)
    context = SimpleNamespace(idx_mapping_np=np.arange(rows))
    processor.apply_staged_writes()
    processor.apply(logits.clone(), context)  # the first call compiles the grammar
    took_s = 0.0
    for _ in range(STEPS):
        _sample(states, rows)
        copy = logits.clone()
        began = time.perf_counter()
        processor.apply_staged_writes()
        processor.apply(copy, context)
        took_s += time.perf_counter() - began
    return took_s / STEPS


class _Buffer:
    """Stand-in for a tensor of vLLM that has a copy on the GPU and one on the host."""

    def __init__(self, *shape: int) -> None:
        self.gpu = torch.zeros(shape, dtype=torch.int32)
        self.np = np.zeros(shape, dtype=np.int32)


def _states(rows: int) -> Any:
    found = SimpleNamespace(
        device=torch.device("cpu"),
        max_num_reqs=rows,
        vocab_size=VOCABULARY,
        all_token_ids=_Buffer(rows, LONGEST),
        prompt_len=_Buffer(rows),
        prefill_len=_Buffer(rows),
        total_len=_Buffer(rows),
    )
    found.prefill_len.np[:] = PROMPT
    found.total_len.gpu[:] = PROMPT
    return found


def _sample(states: Any, rows: int) -> None:
    """Append to each sequence a token that its grammar allows."""
    at = int(states.total_len.gpu[0])
    states.all_token_ids.gpu[:rows, at] = LETTER
    states.total_len.gpu += 1


LETTER = 81  # a token of SmolLM2 that is one lower-case letter
