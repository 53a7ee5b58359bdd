"""Logits processor for vLLM: samples with the function of our own engine.

A copy of this file runs in vLLM's processes, beside a copy of ``sampler.py``. It needs
torch, and llguidance for structured output; nothing else of this package.

Each sequence carries its parameters in ``extra_args``. The processor samples its next
token, and leaves vLLM no other. It must never raise, because that would end the engine:
a failure of a sequence is reported on a socket, and the sequence gets an end token.
"""

from __future__ import annotations

import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from multiworld.serve.generation.compute.sampler import Choice, TokenHistory, sample

    class LogitsProcessor:
        """vLLM's class."""
else:
    try:  # in vLLM's processes; the service copies this file, and tests import it
        from multiworld_sampler import TokenHistory, sample
    except ImportError:
        from multiworld.serve.generation.compute.sampler import TokenHistory, sample
    try:
        from vllm.v1.sample.logits_processor import LogitsProcessor
    except ImportError:
        LogitsProcessor = object

HERE = Path(__file__).parent

KEPT_GRAMMARS = 64  # compiled, or to be compiled
# Seconds for which a step waits for grammars to compile: one with other sequences, and
# one without. Sequences whose grammars take longer come again.
SHARED_S, ALONE_S = 0.05, 2.0
SWAP = "SWAP"  # vLLM's direction in which two sequences change places

# Limits of llguidance's parser, as in the engine of this project.
LIMITS: dict[str, Any] = {
    "step_max_items": 3000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 30_000,
    "verbose_errors": False,
}


class Failure(Exception):
    """A sequence cannot continue; the text is for its client."""


class Later(Exception):
    """A sequence can continue once its grammar is compiled."""


# How reports of what is no ``Failure`` begin.
LATER, ERROR = "later: ", "error: "


class Structure:
    """The matcher of one sequence."""

    def __init__(self, made: Future[Any]) -> None:
        self._made, self._matcher, self._consumed = made, None, 0

    @property
    def is_ready(self) -> bool:
        return self._matcher is not None or self._made.done()

    def allowed(self, tokens: list[int], prompt: int, wait_s: float) -> torch.Tensor:
        """Return which tokens may be next: one bit each, [vocabulary / 8], uint8."""
        if self._matcher is None:
            try:
                made = self._made.result(wait_s)
            except (futures.TimeoutError, futures.CancelledError):
                raise Later("its grammar is not compiled yet") from None
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
        made = self._kept.pop(grammar, None) or self._pool.submit(
            self._compile, grammar
        )
        self._kept[grammar] = made
        while len(self._kept) > KEPT_GRAMMARS:
            self._kept.popitem(last=False)[1].cancel()  # unless it has begun
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
        # vLLM itself reports log-probabilities, before it calls this.
        parameters: Any = SimpleNamespace(**given, logit_bias=bias, logprobs=None)
        self.history = TokenHistory(parameters, tokens, options["prompt"], self.ends)
        self._before, self._output = len(tokens), output
        self.structure: Structure | None = None
        self.has_failed = False

    def catch_up(self) -> None:
        """Take up the tokens that vLLM has added."""
        known = len(self.history.tokens) - self._before
        for token in self._output[known:]:
            self.history.append(token)

    def end_of(self, vocabulary: int) -> int:
        """Return a token that ends the sequence; 0 if it has none."""
        known = range(vocabulary)
        return next((t for t in self.ends if isinstance(t, int) and t in known), 0)

    @property
    def is_ready(self) -> bool:
        return self.structure is None or self.structure.is_ready

    def mask(self, wait_s: float) -> torch.Tensor | None:
        if self.structure is None:
            return None
        history = self.history
        return self.structure.allowed(history.tokens, history.prompt, wait_s)


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

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        sequences = self._sequences
        for index in batch_update.removed:
            sequences.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            sequences.pop(index, None)
            options = (params.extra_args or {}).get("multiworld")
            if options is not None and (begun := self._begin(options, prompt, output)):
                sequences[index] = begun
        for one, other, direction in batch_update.moved:
            moved, replaced = sequences.pop(one, None), sequences.pop(other, None)
            if moved is not None:
                sequences[other] = moved
            if replaced is not None and direction.name == SWAP:
                sequences[one] = replaced

    def _begin(
        self, given: str, prompt: list[int] | None, output: list[int]
    ) -> Sequence | None:
        name = ""
        try:
            options = json.loads(given)
            name = options["name"]
            sequence = Sequence(options, list(prompt or ()), output)
            if options.get("grammar"):
                sequence.structure = self._structures.begin(options["grammar"])
            return sequence
        except Exception as error:
            self._report(name, error)
            return None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        try:
            self._sample(logits)
        except Exception as error:
            for sequence in self._sequences.values():
                self._fail(sequence, error, logits)
        return logits

    def _sample(self, logits: torch.Tensor) -> None:
        rows, masks = [], []
        is_shared = any(sequence.is_ready for sequence in self._sequences.values())
        until = self._clock() + (SHARED_S if is_shared else ALONE_S)
        for row, sequence in sorted(self._sequences.items()):
            if row >= len(logits):
                continue
            try:
                sequence.catch_up()
                masks.append(sequence.mask(max(0.0, until - self._clock())))
                rows.append(row)
            except Exception as error:
                self._fail(sequence, error, logits)
        if not rows:
            return
        for row, choice in zip(rows, self._choices(logits, rows, masks), strict=True):
            if isinstance(choice, Exception):
                self._fail(self._sequences[row], choice, logits)
            elif choice.token >= logits.shape[-1]:
                why = f"token {choice.token} is outside the vocabulary"
                self._fail(self._sequences[row], Failure(why), logits)
            else:
                self._leave(logits, row, choice.token)

    def _choices(
        self, logits: torch.Tensor, rows: list[int], masks: list[torch.Tensor | None]
    ) -> list[Choice | ValueError] | list[Exception]:
        """Return a token, or an error, for each row."""
        histories = [self._sequences[row].history for row in rows]
        copies = logits[rows].to("cpu", torch.float32).contiguous()
        try:
            return sample(copies, histories, masks)
        except Exception as error:
            if len(rows) == 1:
                return [error]
        # Each by itself, so that only those whose parameters are invalid fail.
        pairs = zip(rows, masks, strict=True)
        found: list[Any] = [self._choices(logits, [row], [m])[0] for row, m in pairs]
        return found

    def _leave(self, logits: torch.Tensor, row: int, token: int) -> None:
        logits[row] = -math.inf
        logits[row, token] = 0.0

    def _fail(self, sequence: Sequence, error: Exception, logits: torch.Tensor) -> None:
        """Report a failure, and end the sequence as far as this can."""
        if not sequence.has_failed:
            sequence.has_failed = True
            self._report(sequence.name, error)
        for row, other in self._sequences.items():
            if other is sequence and row < len(logits):
                self._leave(logits, row, sequence.end_of(logits.shape[-1]))

    def _report(self, name: str, error: Exception) -> None:
        """Write a file named as the sequence; that it is there says that it failed."""
        if isinstance(error, Failure):
            text = str(error)
        else:
            is_later = isinstance(error, Later)
            text = f"{LATER}{error}" if is_later else f"{ERROR}{error!r}"
        try:
            with open(HERE / "failures" / (Path(name).name or "unnamed"), "x") as file:
                file.write(text[:1000])
        except OSError:
            pass  # another rank has written it, or the replica is gone
