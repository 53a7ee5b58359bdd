"""Suite "sampling": choice of the next tokens of 64 sequences.

Logits are random, with a few likely words, like those of a language model; histories
have 1,000 tokens. "flat" has the same options as "top_p 0.95", but no likely words:
tens of thousands of words make up 95 %. The baseline, "reading", is one pass over the
logits (their maxima). Everything runs in one thread. "all" has temperature, top_k,
top_p, min_p, penalties and a bias of 50 words; cases with masks of a grammar and with
logprobs are separate. "other" is one sequence with the slowest options among 63
sequences without options, to show its cost for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.members import Options, Step
from multiworld.serve.engine.compute.sampler import TokenHistory, sample
from multiworld.serve.wire.generation_messages import Sampling

READING = "reading"
KIND = "64 rows by vocabulary"

ROWS, TOKENS = 64, 1000
VOCABULARIES = (49_152, 151_936)
"""Numbers of words of SmolLM2 and of Qwen 3."""

SPREAD, LIKELY, RAISED = 2.5, 20, 14.0
"""Standard deviation of the logits, number of likely words, and the amount that is
added to their logits."""

ALL: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.02,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": dict.fromkeys(range(0, 5000, 100), 1.0),
}
SLOWEST: dict[str, Any] = {"temperature": 100.0, "top_p": 0.999}


@dataclass(frozen=True, slots=True)
class Case:
    """Options of the 64 sequences.

    Attributes:
        options: Options of all sequences.
        first: Additional options of the first sequence.
        is_masked: Whether a grammar allows half of the words.
        is_flat: Whether no words are likely.
    """

    options: dict[str, Any]
    first: dict[str, Any] = field(default_factory=dict)
    is_masked: bool = False
    is_flat: bool = False


CASES = {
    "greedy": Case({"temperature": 0.0}),
    "temperature 1": Case({}),
    "top_p 0.95": Case({"top_p": 0.95}),
    "flat": Case({"top_p": 0.95}, is_flat=True),
    "all": Case(ALL),
    "all, masks": Case(ALL, is_masked=True),
    "all, logprobs 5": Case({**ALL, "logprobs": 5}),
    "slowest": Case(SLOWEST),
    "other": Case({}, first=SLOWEST),
}

OnStep = Callable[[Step], None]


def run(options: Options, on_step: OnStep) -> None:
    """Measure all cases alternately, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for size in VOCABULARIES[: 1 if options.is_quick else None]:
            _measure(size, options, on_step)
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _measure(size: int, options: Options, on_step: OnStep) -> None:
    chance = torch.Generator().manual_seed(0)
    flat = SPREAD * torch.randn(ROWS, size, generator=chance)
    given = flat.clone()
    given[:, :: size // LIKELY] += RAISED
    tokens = torch.randint(size, (ROWS, TOKENS), generator=chance).tolist()
    histories = {
        name: [
            TokenHistory(
                Sampling(**case.options | (case.first if row == 0 else {}), seed=row),
                tokens[row],
                TOKENS // 2,
            )
            for row in range(ROWS)
        ]
        for name, case in CASES.items()
    }
    mask = torch.full((-(-size // 8),), 0b01010101, dtype=torch.uint8)
    for number in range(options.rounds):
        on_step(("step", (number / options.rounds, f"{size} words, round {number}")))
        read_ms = _timed(lambda logits: logits.amax(-1), given)
        on_step(("sample", (KIND, size, READING, "ms", read_ms)))
        for name, case in CASES.items():
            masks: list[Tensor | None] = [mask] * ROWS if case.is_masked else []

            logits = flat if case.is_flat else given

            def call(
                logits: Tensor, name: str = name, masks: list[Tensor | None] = masks
            ) -> object:
                return sample(logits, histories[name], masks)

            on_step(("sample", (KIND, size, name, "ms", _timed(call, logits))))


def _timed(call: Callable[[Tensor], object], given: Tensor) -> float:
    """Return the milliseconds of a call, which may modify its copy of the logits."""
    logits = given.clone()
    began = time.perf_counter()
    call(logits)
    return 1000 * (time.perf_counter() - began)
