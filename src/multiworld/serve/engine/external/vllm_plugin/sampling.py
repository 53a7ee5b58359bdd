"""Sampling in vLLM's runner V1, by the sampler of our own engine.

Each sequence carries its parameters in ``extra_args``. The processor samples the next
token, and masks all others.

Of several ranks with the same logits (tensor parallelism), only the first one samples,
and sends its tokens to the others. If all ranks sampled, their tokens could differ,
because the time to compile a grammar may differ between ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from .structures import (
    ALONE_S,
    SHARED_S,
    Failure,
    Ranks,
    Structure,
    Structures,
    end_of,
    report,
)

if TYPE_CHECKING:
    from multiworld.serve.engine.compute.sampler import (
        GREEDY_BELOW,
        TokenHistory,
        sample,
    )

    class LogitsProcessor:
        """vLLM's class."""
else:
    try:  # in vLLM's processes, this folder has a copy of the sampler
        from .sampler import GREEDY_BELOW, TokenHistory, sample
    except ImportError:
        from multiworld.serve.engine.compute.sampler import (
            GREEDY_BELOW,
            TokenHistory,
            sample,
        )
    try:
        from vllm.v1.sample.logits_processor import LogitsProcessor
    except ImportError:
        LogitsProcessor = object

SWAP = "SWAP"  # name of vLLM's direction for a swap of two sequences
VLLMS = -1  # stands for the likeliest token, which vLLM chooses itself
CHANGING = (  # parameters that can make another token the likeliest
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
)


class Sequence:
    """One sequence in vLLM's batch; ``output`` is vLLM's live list."""

    def __init__(
        self, options: dict[str, Any], tokens: list[int], output: list[int]
    ) -> None:
        self.name, self.ends = options["name"], options["ends"]
        defaults = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "seed": 0,
            "choice": 0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_tokens": 0,
            "max_tokens": 16,
        }
        given = {name: options.get(name, value) for name, value in defaults.items()}
        bias = {int(k): v for k, v in options.get("logit_bias", {}).items()}
        # vLLM itself reports log-probabilities, from the logits before this processor.
        parameters: Any = SimpleNamespace(**given, logit_bias=bias, logprobs=None)
        self.history = TokenHistory(parameters, tokens, options["prompt"], self.ends)
        self._before, self.output = len(tokens), output
        self.grammar = options.get("grammar")
        self.structure: Structure | None = None
        self.has_failed = False
        # True if every token is the likeliest one, whatever came before it.
        temperature = given["temperature"]
        self.is_plain = (
            isinstance(temperature, (int, float))
            and temperature < GREEDY_BELOW
            and all(given[name] == defaults[name] for name in CHANGING)
            and not (bias or self.grammar)
        )

    def catch_up(self) -> None:
        """Append the tokens that vLLM has added."""
        known = len(self.history.tokens) - self._before
        for token in self.output[known:]:
            self.history.append(token)

    @property
    def is_ready(self) -> bool:
        return self.structure is None or self.structure.is_ready

    def mask(self, wait_s: float) -> torch.Tensor | None:
        if self.structure is None:
            return None
        history = self.history
        return self.structure.allowed(history.tokens, history.prompt, wait_s)


def kept_of(vllm_config: Any) -> int:
    """Return how many removed sequences to keep, in case vLLM adds them again."""
    if vllm_config is None or vllm_config.parallel_config.pipeline_parallel_size == 1:
        return 0
    return int(vllm_config.scheduler_config.max_num_seqs)


class MultiworldSampling(LogitsProcessor):
    """Makes each sequence's sampled token the only possible one."""

    def __init__(
        self,
        vllm_config: Any,
        device: torch.device,
        is_pin_memory: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._clock = clock
        self._structures = Structures()
        self._ranks = Ranks()
        self._pins, self._pinned = is_pin_memory, torch.empty(0, 0)
        # With pipeline stages, vLLM removes sequences and adds them again one step
        # later, so keep removed ones.
        self._removed: OrderedDict[str, Sequence] = OrderedDict()
        self._kept = kept_of(vllm_config)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        sequences = self._sequences
        for index in batch_update.removed:
            self._remove(index)
        for index, params, prompt, output in batch_update.added:
            self._remove(index)
            options = (params.extra_args or {}).get("multiworld")
            if options is not None and (begun := self._begin(options, prompt, output)):
                sequences[index] = begun
        for one, other, direction in batch_update.moved:
            moved, replaced = sequences.pop(one, None), sequences.pop(other, None)
            if moved is not None:
                sequences[other] = moved
            if replaced is not None and direction.name == SWAP:
                sequences[one] = replaced

    def _remove(self, row: int) -> None:
        sequence = self._sequences.pop(row, None)
        if sequence is not None and self._kept:
            self._removed[sequence.name] = sequence
            while len(self._removed) > self._kept:
                self._removed.popitem(last=False)

    def _begin(
        self, given: str, prompt: list[int] | None, output: list[int]
    ) -> Sequence | None:
        name = ""
        try:
            options = json.loads(given)
            name = options["name"]
            known = self._removed.pop(name, None)
            if known is not None and known.output is output:
                return known
            sequence = Sequence(options, list(prompt or ()), output)
            if sequence.grammar and self._ranks.is_first:
                sequence.structure = self._structures.begin(sequence.grammar)
            return sequence
        except Exception as error:
            report(name, error)
            return None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        rows = [row for row in sorted(self._sequences) if row < len(logits)]
        if not rows:
            return logits
        tokens = [VLLMS] * len(rows)
        if self._ranks.is_first:
            tokens = self._tokens(logits, rows)
        tokens = self._ranks.share(tokens, logits.device)
        pairs = zip(rows, tokens, strict=True)
        left = [(row, token) for row, token in pairs if token != VLLMS]
        if left:
            at, token = torch.tensor(left, device=logits.device).unbind(1)
            logits.index_fill_(0, at, -math.inf)
            logits[at, token] = 0.0
        return logits

    def _tokens(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        """Return a token for each row.

        A row that fails is reported, and gets an end token.
        """
        found: dict[int, int | Exception]
        try:
            found = self._chosen(logits, rows)
        except Exception as error:
            found = {}
            found.update(dict.fromkeys(rows, error))
        width = logits.shape[-1]
        return [self._token_of(row, found[row], width) for row in rows]

    def _token_of(self, row: int, chosen: int | Exception, width: int) -> int:
        sequence = self._sequences[row]
        if isinstance(chosen, int) and chosen < width:
            return chosen
        if isinstance(chosen, int):
            chosen = Failure(f"token {chosen} is outside the vocabulary")
        if not sequence.has_failed:
            sequence.has_failed = True
            report(sequence.name, chosen)
        return end_of(sequence.ends, width)

    def _chosen(
        self, logits: torch.Tensor, rows: list[int]
    ) -> dict[int, int | Exception]:
        """Return a token, or an error, for each row."""
        found: dict[int, int | Exception] = {}
        sequences = {row: self._sequences[row] for row in rows}
        if any(sequence.is_plain for sequence in sequences.values()):
            # Leave plain sequences to vLLM: on a tie it chooses the first of the
            # likeliest tokens, as our sampler does.
            largest = logits.amax(-1).tolist()  # NaN if any logit of the row is NaN
            for row, sequence in sequences.items():
                if sequence.is_plain and math.isfinite(largest[row]):
                    found[row] = VLLMS
        is_shared = any(sequence.is_ready for sequence in sequences.values())
        until = self._clock() + (SHARED_S if is_shared else ALONE_S)
        masks: dict[int, torch.Tensor | None] = {}
        for row, sequence in sequences.items():
            if row in found:
                continue
            try:
                sequence.catch_up()
                masks[row] = sequence.mask(max(0.0, until - self._clock()))
            except Exception as error:
                found[row] = error
        if masks:
            found.update(self._sampled(logits, masks))
        return found

    def _sampled(
        self, logits: torch.Tensor, masks: dict[int, torch.Tensor | None]
    ) -> dict[int, int | Exception]:
        histories = [self._sequences[row].history for row in masks]
        try:
            copies = self._on_host(logits[list(masks)])
            found = sample(copies, histories, list(masks.values()))
        except Exception as error:
            if len(masks) == 1:
                return dict.fromkeys(masks, error)
            # Sample the rows one by one, so that only sequences with invalid parameters
            # fail.
            each = [self._sampled(logits, {row: m}) for row, m in masks.items()]
            return {row: one for part in each for row, one in part.items()}
        return {
            row: one if isinstance(one, Exception) else one.token
            for row, one in zip(masks, found, strict=True)
        }

    def _on_host(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy in float32 on the host, which the next call may overwrite."""
        if not (self._pins and logits.is_cuda):
            return logits.to("cpu", torch.float32).contiguous()
        if logits.shape[1] != self._pinned.shape[1] or len(logits) > len(self._pinned):
            size = 1 << (len(logits) - 1).bit_length(), logits.shape[1]
            self._pinned = torch.empty(size, dtype=torch.float32, pin_memory=True)
        return self._pinned[: len(logits)].copy_(logits)
