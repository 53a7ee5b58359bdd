"""Process that compiles grammars on trial: ``python grammar_trial_process.py CPU_S``.

llguidance overflows its stack on some grammars, and on others it computes without an
end. Here that ends this process alone: it may use ``CPU_S`` seconds for a grammar, a
stack of ``STACK_BYTES`` and ``MEMORY_BYTES``. What passes needs less of a stack than
threads have elsewhere.

It reads requests, a line of JSON each: ``tokenizer``, a name; ``grammar``; and
``made_of``, the arguments of ``LLTokenizer``, if the name is new. It answers each with
a line: ``is_unknown``, whether it lacks the tokenizer; ``error``, if there is none; or
``why``, why the grammar cannot be enforced, or null.
It needs llguidance and no other package.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

STACK_BYTES = 2 * 2**20  # a quarter of what threads have by default
MEMORY_BYTES = 4 * 2**30  # of addresses
MAX_TOKENIZERS = 4

# Parser items per step (``step_max_items`` of llguidance). In an ambiguous grammar they
# keep increasing: with the default, 50,000, each token takes seconds.
MAX_ITEMS = 3000
# States of a grammar's lexer, of 0.5 KB each, which it keeps (``max_lexer_states``).
MAX_STATES = 30_000
MAX_ROW = 10_000  # alternatives at one position (``max_items_in_row`` of llguidance)


def compiled(tokenizer: Any, grammar: str) -> Any:
    """Return the matcher of a grammar."""
    limits = LLParserLimits(
        step_max_items=MAX_ITEMS,
        max_items_in_row=MAX_ROW,
        max_lexer_states=MAX_STATES,
        verbose_errors=False,
    )
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def tokenizer_of(made_of: dict[str, Any]) -> Any:
    """Return llguidance's form of a tokenizer."""
    return LLTokenizer(
        made_of["tokenizer"],
        n_vocab=made_of["vocabulary"],
        eos_token=made_of["ends"] or None,
    )


def _why(tokenizer: Any, grammar: str, cpu_s: int) -> str | None:
    """Return why a grammar cannot be enforced; None if it can."""
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
    """Set a soft limit, as far as the hard one allows."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        is_less = amount != resource.RLIM_INFINITY and amount < most
        amount = amount if is_less else most
    resource.setrlimit(kind, (amount, most))


def _serve(cpu_s: int) -> None:
    tokenizers: dict[str, Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked["tokenizer"]
        if "made_of" in asked:
            while len(tokenizers) >= MAX_TOKENIZERS:
                del tokenizers[next(iter(tokenizers))]
            _limit(resource.RLIMIT_CPU, resource.RLIM_INFINITY)
            try:
                tokenizers[name] = tokenizer_of(asked["made_of"])
            except ValueError as error:  # llguidance has no form of it
                tokenizers[name] = str(error)
        answer: dict[str, Any] = {"is_unknown": name not in tokenizers}
        if isinstance(tokenizers.get(name), str):
            answer["error"] = tokenizers[name]
        elif name in tokenizers:
            answer["why"] = _why(tokenizers[name], asked["grammar"], cpu_s)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends."""
    os.nice(5)
    # When memory is short, the system ends this process before others.
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
