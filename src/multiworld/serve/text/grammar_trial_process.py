"""Process that compiles grammars on trial: ``python grammar_trial_process.py CPU_S``.

llguidance overflows its stack on some grammars, and never finishes others. Such a
grammar kills only this process, which is limited to ``CPU_S`` seconds per grammar,
``STACK_BYTES`` of stack and ``MEMORY_BYTES`` of memory. Threads of other processes have
larger stacks, so a grammar that passes here does not overflow theirs.

The process reads ``TrialRequest`` and writes ``Answer``, as one line of JSON each. It
imports llguidance and msgspec, but not this package, which takes longer to import.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

STACK_BYTES = 2 * 2**20  # a quarter of a thread's default stack
MEMORY_BYTES = 4 * 2**30  # maximum address space
MAX_TOKENIZERS = 4

# Maximum parser items per step (``step_max_items`` of llguidance). In an ambiguous
# grammar, the number of items grows with each token: with the default limit, 50,000, a
# token can take seconds.
MAX_ITEMS = 3000
# Maximum states of a grammar's lexer, of 0.5 KB each (``max_lexer_states``).
MAX_STATES = 30_000
# Maximum alternatives at one position (``max_items_in_row`` of llguidance).
MAX_ROW = 10_000


class TokenizerData(msgspec.Struct, frozen=True):
    """The data from which llguidance builds its tokenizer."""

    tokenizer: str
    vocabulary: int
    ends: list[int]


class TrialRequest(msgspec.Struct, frozen=True):
    """A grammar to try; has ``made_of`` if the process does not know the tokenizer."""

    tokenizer: str
    grammar: str
    made_of: TokenizerData | None = None


class Answer(msgspec.Struct, frozen=True):
    """Outcome of a trial: why the grammar or the tokenizer cannot be used."""

    why: str | None = None
    error: str | None = None
    is_unknown: bool = False


def compiled(tokenizer: Any, grammar: str) -> Any:
    """Return the matcher of a grammar."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        step_max_items=MAX_ITEMS,
        max_items_in_row=MAX_ROW,
        max_lexer_states=MAX_STATES,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def tokenizer_of(made_of: TokenizerData) -> Any:
    """Return llguidance's tokenizer."""
    from llguidance import LLTokenizer

    return LLTokenizer(
        made_of.tokenizer,
        n_vocab=made_of.vocabulary,
        eos_token=made_of.ends or None,
    )


def _why(tokenizer: Any, grammar: str, cpu_s: int) -> str | None:
    """Return why a grammar cannot be enforced; None if it can."""
    from llguidance import LLMatcher

    _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + cpu_s)
    why: str = LLMatcher.validate_grammar(grammar)
    if why and not why.startswith("WARNING"):
        return why
    matcher = compiled(tokenizer, grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
    error: str = matcher.get_error()
    return error if matcher.is_error() else None


def _limit(kind: int, amount: int) -> None:
    """Set a soft limit to ``amount``, or to the hard limit if that is lower."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        is_less = amount != resource.RLIM_INFINITY and amount < most
        amount = amount if is_less else most
    resource.setrlimit(kind, (amount, most))


def _serve(cpu_s: int) -> None:
    tokenizers: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        asked = msgspec.json.decode(line, type=TrialRequest)
        answer = _answer(tokenizers, asked, cpu_s)
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def _answer(tokenizers: dict[str, Any], asked: TrialRequest, cpu_s: int) -> Answer:
    if asked.made_of is not None:
        while len(tokenizers) >= MAX_TOKENIZERS:
            del tokenizers[next(iter(tokenizers))]
        _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
        try:
            tokenizers[asked.tokenizer] = tokenizer_of(asked.made_of)
        except ValueError as error:  # llguidance does not support the tokenizer
            return Answer(error=str(error))
    tokenizer = tokenizers.get(asked.tokenizer)
    if tokenizer is None:
        return Answer(is_unknown=True)
    return Answer(_why(tokenizer, asked.grammar, cpu_s))


def main() -> None:
    """Serve until standard input ends."""
    os.nice(5)
    # When memory is short, the kernel kills this process before others.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(int(sys.argv[1]),))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
