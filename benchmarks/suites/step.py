"""Suite "step": parts of a decode step, on SmolLM2.

Steps of one stage with two threads, in this process, without messages: matrix products
(with the scaling of int8), attention, norms, sampling, and the rest, which is
rotations, activations, additions and Python. Every sequence has a context of about 160
tokens. int8 is measured in deterministic mode, too.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.members import Options, Step
from multiworld.demo import smollm2
from multiworld.serve.engine.compute.batch_invariant_attention import (
    PIECE,
    InvariantAttention,
)
from multiworld.serve.engine.compute.batch_invariant_layers import (
    make_elements_invariant,
    make_linears_invariant,
)
from multiworld.serve.engine.compute.compiled_attention import (
    compiled,
    fastest,
)
from multiworld.serve.engine.compute.compiled_layers import compile_layers
from multiworld.serve.engine.compute.kv_cache import KvCache, Rows
from multiworld.serve.engine.compute.sampler import TokenHistory, sample
from multiworld.serve.engine.models import decoder_stage
from multiworld.serve.engine.models.packed_linear import pack_linears
from multiworld.serve.engine.models.partition import Span
from multiworld.serve.wire.generation_messages import Sampling

STREAMS, THREADS = (1, 4, 16), 2
FLOAT, INT8, EQUAL = "float32", "int8", "int8, deterministic"
SHORT = "bfloat16"
MODES = (FLOAT, SHORT, INT8, EQUAL)
LAYERS, PROMPT, STEPS = 30, 128, 60

ALL = "all"
"""Name of the whole step."""

OnStep = Callable[[Step], None]


class Clock:
    """Seconds by part of the current step."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = defaultdict(float)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that adds the time of each call to a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = call(*args, **kwargs)
            self.parts[part] += time.perf_counter() - began
            return found

        return timed


class TimedAttention:
    """Attention of a step, whose time is recorded."""

    def __init__(self, clock: Clock, attention: Any) -> None:
        self.attend = clock.timed("attention", attention.attend)


def _watch(stage: nn.Module, clock: Clock) -> None:
    for module in stage.modules():
        name = type(module).__name__
        if "Linear" in name or name.endswith("Norm"):
            part = "products" if "Linear" in name else "norms"
            module.forward = clock.timed(part, module.forward)


def run(options: Options, on_step: OnStep) -> None:
    """Measure steps of 1, 4 and 16 streams, in float32, bfloat16 and int8."""
    folder = smollm2.fetch(lambda text: on_step(("step", (0.0, text))))
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        stages = {mode: _stage(folder, mode) for mode in MODES}
        for number in range(options.rounds):
            for streams in STREAMS:
                on_step(("step", (number / options.rounds, f"{streams} streams")))
                for mode, (stage, clock) in stages.items():
                    make = _cache if mode != EQUAL else _invariant_cache
                    for part, ms in _measure(stage, clock, streams, make).items():
                        kind = f"{mode}: parts by streams"
                        on_step(("sample", (kind, streams, part, "ms", ms)))
    finally:
        torch.set_num_threads(threads)


def _cache() -> KvCache:
    return KvCache(attention=fastest)


def _invariant_cache() -> KvCache:
    return KvCache(attention=compiled(InvariantAttention), granule=PIECE)


def _stage(folder: Path, mode: str) -> tuple[Any, Clock]:
    quantization = INT8 if mode in (INT8, EQUAL) else None
    dtype = SHORT if mode == SHORT else FLOAT
    span, clock = Span(0, LAYERS, LAYERS), Clock()
    stage: Any = decoder_stage.load(folder, span, dtype, "cpu", quantization)
    with torch.inference_mode():
        pack_linears(stage)
        if mode == EQUAL:
            make_linears_invariant(stage)
            make_elements_invariant(stage)
        compile_layers(stage)
    _watch(stage, clock)
    return stage, clock


@torch.inference_mode()
def _measure(
    stage: Any, clock: Clock, streams: int, make: Callable[[], KvCache]
) -> dict[str, float]:
    """Return the milliseconds of each part, and of the whole step."""
    cache = make()
    prompt = torch.randint(0, 40_000, (PROMPT,)).tolist()
    histories = [TokenHistory(Sampling(seed=n), prompt, PROMPT) for n in range(streams)]
    for number in range(streams):
        step = cache.step([Rows(number, 0, PROMPT)])
        last = torch.tensor([PROMPT - 1])
        stage(torch.tensor(prompt), torch.arange(PROMPT), step, last)
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(STEPS):
        clock.parts.clear()
        began = time.perf_counter()
        _step(stage, cache, histories, PROMPT + number, clock)
        whole = time.perf_counter() - began
        clock.parts["rest"] = whole - sum(clock.parts.values())
        for part, seconds in (*clock.parts.items(), (ALL, whole)):
            found[part].append(1000 * seconds)
    parts = "products", "attention", "norms", "sampling", "rest", ALL
    return {part: statistics.median(found[part]) for part in parts}


def _step(
    stage: Any,
    cache: KvCache,
    histories: Sequence[TokenHistory],
    at: int,
    clock: Clock,
) -> None:
    count = len(histories)
    rows = torch.tensor([history.tokens[-1] for history in histories])
    attention = cache.step([Rows(number, at, 1) for number in range(count)])
    logits: Tensor = stage(
        rows,
        torch.full((count,), at),
        TimedAttention(clock, attention),
        torch.arange(count),
    )
    chosen = clock.timed("sampling", sample)(logits, histories)
    for history, choice in zip(histories, chosen, strict=True):
        history.append(choice.token)
