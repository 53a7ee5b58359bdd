"""Suite "graphs": decode steps on a GPU, with CUDA graphs and without.

Whole steps of one stage in this process, without messages: upload, computation,
download, and sampling at temperature 1. The decoder has layers of the size of
Qwen3-0.6B's, random weights in bfloat16, and a vocabulary of 32,768. Every sequence has
a context of about 160 tokens.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.members import Options, Step
from multiworld.serve.engine.compute.paged_kv_cache import PagedKvCache
from multiworld.serve.engine.compute.stage_engine import Chores, StageEngine
from multiworld.serve.engine.compute.step_graphs import (
    Record,
    StepGraphs,
    recorder,
)
from multiworld.serve.engine.compute.transfers import Transfers
from multiworld.serve.engine.models import decoder_stage
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.spec.stage import Generation
from multiworld.serve.wire.generation_messages import (
    Sampling,
    SequenceStart,
    StepPart,
)

EACH, GRAPHS = "kernel by kernel", "CUDA graphs"
BASELINE = EACH
STREAMS = (1, 4, 16, 64)
LAYERS = (8, 28)
PROMPT, STEPS, WARM = 160, 40, 4
VOCABULARY = 32_768
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1_024,
    "intermediate_size": 3_072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}

OnStep = Callable[[Step], None]


def run(options: Options, on_step: OnStep) -> None:
    """Measure on a GPU of this machine."""
    if not torch.cuda.is_available():
        raise RuntimeError("this machine has no GPU; run another suite")
    device = torch.device("cuda", torch.cuda.current_device())
    on_step(("note", torch.cuda.get_device_name(device)))
    measure(options, on_step, Transfers(device), recorder(device), SIZES)


def measure(
    options: Options,
    on_step: OnStep,
    transfers: Transfers,
    record: Record,
    sizes: dict[str, Any],
) -> None:
    """Measure steps with all numbers of layers and streams."""
    for layers in LAYERS:
        stage = _stage(layers, sizes, transfers)
        for number in range(options.rounds):
            for streams in STREAMS[:2] if options.is_quick else STREAMS:
                text = f"{layers} layers, {streams} streams"
                on_step(("step", (number / options.rounds, text)))
                for contender in (EACH, GRAPHS):
                    engine = _engine(stage, sizes, transfers, streams)
                    if contender == GRAPHS:
                        graphs = StepGraphs(stage, engine.cache, record)
                        engine = replace(engine, graphs=graphs)
                    ms = _ms(engine, streams)
                    kind = f"{layers} layers: a step by streams"
                    on_step(("sample", (kind, streams, contender, "ms", ms)))


def _stage(layers: int, sizes: dict[str, Any], transfers: Transfers) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**sizes, num_hidden_layers=layers)
    with tempfile.TemporaryDirectory() as name:
        with transfers.device:
            whole: Any = Qwen3ForCausalLM(config)
            whole.to(torch.bfloat16).save_pretrained(name)
        span = Span(0, layers, layers)
        device = str(transfers.device)
        return decoder_stage.load(Path(name), span, "bfloat16", device)


def _engine(
    stage: Any, sizes: dict[str, Any], transfers: Transfers, streams: int
) -> Any:
    tokens = streams * (PROMPT + STEPS + 16)
    cache = PagedKvCache(tokens=tokens, transfers=transfers)
    model = Generation(
        tokenizer=dict,
        end_tokens=(),
        vocabulary=sizes["vocab_size"],
        max_tokens=PROMPT + STEPS,
        kv_bytes=(),
    )
    engine = StageEngine(stage, True, model, cache, transfers)
    prompt = tuple(range(PROMPT))
    keys = [("g", number, 1) for number in range(streams)]
    for key in keys:
        sampling = Sampling(seed=key[1], max_tokens=STEPS + 1, ignore_eos=True)
        start = SequenceStart(key, prompt, PROMPT, (), sampling)
        engine.tidy(Chores(open=[(start, None)]))
        part = StepPart(key, 0, PROMPT, samples=True)
        engine.compute([part], torch.tensor(prompt))
    return engine


def _ms(engine: StageEngine, streams: int) -> float:
    """Return the median milliseconds of a step."""
    tokens, found = torch.zeros(streams, dtype=torch.int64), []
    for number in range(STEPS):
        parts = [
            StepPart(("g", stream, 1), PROMPT + number, 1, samples=True)
            for stream in range(streams)
        ]
        began = time.perf_counter()
        done = engine.compute(parts, tokens)
        found.append(1000 * (time.perf_counter() - began))
        tokens = torch.tensor([item.token for item in done.tokens])
    return statistics.median(found[WARM:])
