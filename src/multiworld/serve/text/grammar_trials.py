"""Trials of clients' grammars, each in a process that may crash or be killed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from multiworld.errors import ModelFailedError, NoReplicaError
from multiworld.serve.text.grammar_trial_process import (
    Answer,
    TokenizerData,
    TrialRequest,
)

PROGRAM = Path(__file__).with_name("grammar_trial_process.py")
# Seconds of CPU time for a trial, and seconds after which it counts as hung.
CPU_S, ANSWER_S = 4, 30.0
KEPT_ANSWERS = 256
TOO_COMPLEX = "it is too complex"

# Exit codes that prove that the grammar killed the process.
DECISIVE = {-signal.SIGXCPU, -signal.SIGSEGV}


@dataclass(frozen=True, slots=True)
class TrialTokenizer:
    """A tokenizer that the trial process builds when it first needs it."""

    name: str  # equal for equal tokenizers
    made_of: Callable[[], TokenizerData]


class GrammarTrials:
    """A process that compiles grammars one by one, started when first needed."""

    def __init__(
        self,
        cpu_s: int = CPU_S,  # maximum CPU time of a trial
        program: Path = PROGRAM,
    ) -> None:
        self._command = [sys.executable, "-P", str(program), str(cpu_s)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._known: OrderedDict[str, str | None] = OrderedDict()

    def why_not(self, tokenizer: TrialTokenizer, grammar: str) -> str | None:
        """Return why a grammar cannot be enforced; None if it can. Blocks meanwhile."""
        data = f"{tokenizer.name}\n{grammar}".encode()
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return self._known[digest]
            why = self._tried(tokenizer, grammar)
            self._known[digest] = why
            while len(self._known) > KEPT_ANSWERS:
                self._known.popitem(last=False)
            return why

    def _tried(self, tokenizer: TrialTokenizer, grammar: str) -> str | None:
        code = 0
        for _ in range(2):
            is_fresh = self._process is None
            answer = self._answer(tokenizer, grammar)
            if answer is not None:
                if answer.error is not None:
                    raise ModelFailedError(
                        "structured output is not available for this model: "
                        f"{answer.error}"
                    )
                return answer.why
            code = self._end()
            # A process that has tried other grammars may have aborted because those
            # had used up its memory.
            if code in DECISIVE or (is_fresh and code == -signal.SIGABRT):
                return TOO_COMPLEX
        raise NoReplicaError(
            f"the grammar could not be checked (exit code {code}); retry later"
        )

    def _answer(self, tokenizer: TrialTokenizer, grammar: str) -> Answer | None:
        """Return the answer of the process; None if the process died or hangs."""
        answer = self._exchanged(TrialRequest(tokenizer.name, grammar))
        if answer is not None and answer.is_unknown:
            made_of = tokenizer.made_of()
            answer = self._exchanged(TrialRequest(tokenizer.name, grammar, made_of))
        return answer

    def _exchanged(self, asked: TrialRequest) -> Answer | None:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        end = threading.Timer(ANSWER_S, process.kill)
        end.start()
        try:
            process.stdin.write(msgspec.json.encode(asked) + b"\n")
            process.stdin.flush()
            found = process.stdout.readline()
        except OSError:
            return None
        finally:
            end.cancel()
        is_whole = found.endswith(b"\n")
        return msgspec.json.decode(found, type=Answer) if is_whole else None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # protects it from Ctrl-C in a terminal
                )
            except OSError as error:
                raise NoReplicaError(
                    f"the grammar could not be checked ({error}); retry later"
                ) from error
        return self._process

    def _end(self) -> int:
        """End the process; return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        try:
            # If the process is crashing, wait for its own exit code.
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # buffered input cannot be sent
                pipe.close()
        return code

    def close(self) -> None:
        """End the process, if it was started."""
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._end()


@functools.cache
def trials() -> GrammarTrials:
    """Return the trials of this process, which share one trial process."""
    found = GrammarTrials()
    atexit.register(found.close)
    return found
