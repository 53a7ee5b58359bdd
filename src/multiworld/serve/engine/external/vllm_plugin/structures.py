"""Structured output in vLLM's processes, and reports of failed sequences."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
RUNNER = "runner.json"  # file with vLLM's release, and the runner that vLLM has chosen

# Maximum number of grammars to keep, compiled or waiting for compilation.
KEPT_GRAMMARS = 64
# Maximum seconds for which a step waits until grammars are compiled: ``SHARED_S`` if
# another sequence of the step need not wait, ``ALONE_S`` if all wait. A sequence whose
# grammar takes longer fails, and is sent to a replica again.
SHARED_S, ALONE_S = 0.05, 2.0

# Limits of llguidance's parser: the same as in this project's own engine.
LIMITS: dict[str, Any] = {
    "step_max_items": 3000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 30_000,
    "verbose_errors": False,
}


class Failure(Exception):
    """A sequence cannot continue; its client gets this error's text."""


class Later(Exception):
    """A sequence can continue once its grammar is compiled."""


# Prefixes of reports: of a sequence that should be sent again, and of an unexpected
# error.
LATER, ERROR = "later: ", "error: "


class Structure:
    """The matcher of one sequence."""

    def __init__(self, made: Future[Any]) -> None:
        self._made, self._matcher, self._consumed = made, None, 0

    @property
    def is_ready(self) -> bool:
        return self._matcher is not None or self._made.done()

    def allowed(self, tokens: list[int], prompt: int, wait_s: float) -> torch.Tensor:
        """Return a mask of the next tokens: one bit each, [vocabulary / 8], uint8."""
        if self._matcher is None:
            try:
                made = self._made.result(wait_s)
            except (futures.TimeoutError, futures.CancelledError):
                raise Later("the grammar is not compiled yet") from None
            self._matcher = made.deep_copy()
        matcher: Any = self._matcher
        for token in tokens[prompt + self._consumed :]:
            if not matcher.consume_token(token):
                raise Failure(f"structured output failed: {matcher.get_error()[:300]}")
            self._consumed += 1
        found = torch.frombuffer(
            bytearray(matcher.compute_bitmask()), dtype=torch.uint8
        )
        if matcher.is_error():
            raise Failure(f"structured output failed: {matcher.get_error()[:300]}")
        if not bool(found.any()):
            raise Failure("structured output allows no further token")
        return found


class Structures:
    """Compiles grammars in a thread, while prompts are computed."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="multiworld grammar")
        self._kept: OrderedDict[str, Future[Any]] = OrderedDict()
        self._tokenizer: Any = None

    def begin(self, grammar: str) -> Structure:
        try:
            made = self._kept.pop(grammar, None) or self._pool.submit(
                self._compile, grammar
            )
        except RuntimeError as error:  # the system can start no more threads
            # Raise the error only when a token is sampled, so that all ranks keep the
            # sequence.
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return Structure(failed)
        self._kept[grammar] = made
        while len(self._kept) > KEPT_GRAMMARS:
            # Has no effect if the grammar is being compiled, or is compiled.
            self._kept.popitem(last=False)[1].cancel()
        return Structure(made)

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        if self._tokenizer is None:
            facts = json.loads((HERE / "model.json").read_text())
            self._tokenizer = LLTokenizer(
                (HERE / "tokenizer.json").read_text(),
                n_vocab=facts["vocabulary"],
                eos_token=list(facts["end_tokens"]) or None,
            )
        limits = LLParserLimits(**LIMITS)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)


class Ranks:
    """The ranks of vLLM with the same logits; ``is_first``: this rank samples."""

    def __init__(self) -> None:
        self._group: Any = None
        self.is_first = True
        try:
            from vllm.distributed import get_pp_group, get_tp_group

            tensor, stages = get_tp_group(), get_pp_group()
        except (ImportError, AssertionError):
            # Not in vLLM, or not in one of its workers.
            return
        if tensor.world_size > 1:
            self._group = tensor
        # Earlier pipeline stages have no logits.
        self.is_first = tensor.rank_in_group == 0 and stages.is_last_rank

    def share(self, tokens: list[int], device: torch.device) -> list[int]:
        """Return the tokens of the first rank."""
        if self._group is None:
            return tokens
        shared = torch.tensor(tokens, dtype=torch.int64, device=device)
        self._group.broadcast(shared, src=0)
        found: list[int] = shared.tolist()
        return found

    def broadcast(self, given: torch.Tensor) -> torch.Tensor:
        """Return the first rank's tensor."""
        return given if self._group is None else self._group.broadcast(given, src=0)


def report(name: str, error: Exception) -> None:
    """Write a file named after the sequence; its existence reports the failure."""
    if isinstance(error, Failure):
        text = str(error)
    else:
        is_later = isinstance(error, Later)
        text = f"{LATER}{error}" if is_later else f"{ERROR}{error!r}"
    last = Path(name).name or "unnamed"
    draft = HERE / f"{last}.{os.getpid()}"
    with suppress(OSError):
        draft.write_text(text[:1000])
    # Renamed, because a reader must not see an incomplete report. Where the disk is
    # full, the report is empty, and still says that the sequence failed.
    with suppress(OSError):  # the replica's folder was removed
        draft.replace(HERE / "failures" / last)


def end_of(ends: Any, vocabulary: int) -> int:
    """Return a token that ends a sequence; 0 if it has none."""
    known = range(vocabulary)
    return next((t for t in ends if isinstance(t, int) and t in known), 0)
