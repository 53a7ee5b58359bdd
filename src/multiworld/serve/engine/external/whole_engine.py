"""Interface between replicas and adapters to external ("whole") engines. Pure.

A whole engine computes all layers of a model. So the model has a single stage, and the
loss of a replica costs a prefill. The gateway keeps the tokens of every stream; an
engine gets all tokens so far, and returns the next ones. An engine need not keep any
state: an interrupted sequence starts again on another replica, with more tokens.

To write an adapter, implement ``WholeEngine``, and write a function that takes
``EngineSettings`` and returns the adapter. The spec names the function:
``engine: package.module:function``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from multiworld.errors import InvalidRequestError, ServeError
from multiworld.serve.wire.generation_messages import Sampling
from multiworld.serve.wire.origin import NOWHERE, Origin

EXIT_LOST = 71  # exit code of a replica whose engine is lost
WARM_UP = Sampling(temperature=0.0, max_tokens=1, ignore_eos=True)


class EngineLostError(ServeError):
    """The engine has exited, hangs or does not answer; its replica is replaced."""

    status = 503


class RequestRefusedError(InvalidRequestError):
    """A server refused the request; another server may have accepted it earlier."""


class RunFailedError(ServeError):
    """The engine could not continue this sequence; another attempt may succeed."""

    status = 503


class BusyError(RunFailedError):
    """The engine accepts no more sequences at present; its replica is not at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The environment in which an engine starts.

    Attributes:
        replica: Name of the replica.
        path: Folder of the model.
        vocabulary: Number of tokens in the vocabulary.
        end_tokens: Tokens that end a completion.
        args: ``engine_args`` of the spec.
        python: Interpreter of the engine's environment; empty: the service's
            interpreter.
        device: Torch device of the replica, such as ``cpu`` or ``cuda:0``.
        gpus: Indexes of the replica's GPUs, as torch counts them in this process; an
            engine must use no others.
        adapters: LoRA adapters by the names in ``Run.adapter``: folders, files or names
            at a server, as the spec has them.
        gpu_memory_share: Share of each GPU's memory that the replica has booked; None:
            it has its GPUs to itself.
        cpus: Cores that the replica has booked; None: it books none, and may use all.
            An engine on a CPU should use as many threads as it has cores.
        memory_mb: Memory that the replica has booked, in MiB; None: it books none.
        max_model_len: Maximum number of tokens of a sequence; None: the engine's
            maximum.
        longest: Maximum number of tokens of the sequences that are sent; 0: not known.
        max_num_seqs: Maximum number of sequences that run at once.
        dtype: Dtype to compute in; None: the engine chooses.
        exact: Whether a stream must continue with the tokens of an undisturbed stream.
        hung_s: Seconds without any token, while sequences run, after which the engine
            counts as hung.
    """

    replica: str
    path: str
    vocabulary: int
    end_tokens: tuple[int, ...] = ()
    args: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""
    device: str = "cpu"
    gpus: tuple[int, ...] = ()
    adapters: Mapping[str, str] = field(default_factory=dict)
    gpu_memory_share: float | None = None
    cpus: float | None = None
    memory_mb: float | None = None
    max_model_len: int | None = None
    longest: int = 0
    max_num_seqs: int = 64
    dtype: str | None = None
    exact: bool = True
    hung_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Run:
    """A sequence for an engine to continue.

    Attributes:
        tokens: The prompt (``prompt`` tokens) and the output tokens so far.
        sampling: Sampling parameters. The token at each index must be a function of the
            tokens before it, ``seed``, ``choice`` and the index.
        ends: Tokens that end the sequence.
        tenant: Tenant of the sequence. Sequences of different tenants must not share
            cached prefixes.
        adapter: Name of the LoRA adapter to compute with, one of
            ``EngineSettings.adapters``; empty: none.
        origin: Request that the sequence belongs to.
    """

    tokens: Sequence[int]
    prompt: int
    sampling: Sampling
    ends: tuple[int, ...] = ()
    tenant: str = ""
    adapter: str = ""
    origin: Origin = NOWHERE

    @property
    def remaining(self) -> int:
        """Maximum number of tokens to generate."""
        return self.sampling.max_tokens - (len(self.tokens) - self.prompt)


@dataclass(frozen=True, slots=True)
class EngineToken:
    """A generated token; log-probabilities are None unless they were requested.

    Attributes:
        top: The most likely tokens with their log-probabilities.
        prompt: With the first token, if requested: for each token of the prompt but the
            first, its log-probability and ``top``.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


class WholeEngine(Protocol):
    """An external engine, in the process of its replica.

    Creating an engine starts nothing, but raises SpecError if ``EngineSettings.args``
    cannot be used.

    Attributes:
        usage: Used fraction of the engine's KV memory; 0.0 if it is not known.
        phase: What a starting engine is doing, for ``multiworld status``; empty once it
            serves.
        has_adapters: Whether the engine supports ``Run.adapter``; may be left out if it
            does not.
        noise: Name of the engine's random source, known once it has started. Once a
            stream has tokens, it continues only on replicas with the same ``noise``.
            May be left out, or be empty, if tokens depend on nothing but the logits and
            ``Run``, as with ``engine.compute.sampler``.
    """

    @property
    def usage(self) -> float: ...
    @property
    def phase(self) -> str: ...

    async def start(self) -> None:
        """Start the engine, or connect to it, and wait until it serves.

        Raises:
            EngineLostError: The engine did not start; the text says why.

        Cancellation: ``kill`` is called afterwards.
        """

    def check(self, sampling: Sampling) -> None:
        """Check that the engine supports the parameters of a request.

        Raises:
            InvalidRequestError: The engine does not support a parameter, which the text
                names.
        """

    def generate(self, run: Run) -> AsyncGenerator[Sequence[EngineToken]]:
        """Continue a sequence; closing the generator aborts it.

        Yields:
            One or more tokens at a time, up to and including one of ``run.ends``, or
            until ``run.remaining`` tokens were yielded.

        Raises:
            InvalidRequestError: The engine refuses the request; it is not retried.
            RunFailedError: The sequence cannot continue in this attempt.
            EngineLostError: The engine is lost.
        """

    async def wait_lost(self) -> str:
        """Wait until the engine is lost; return why.

        Cancellation: Safe.
        """

    def stopped_s(self) -> float:
        """Return the seconds for which the engine's processes have been stopped."""

    async def close(self) -> None:
        """Let the engine exit, which may take seconds; then release everything.

        Cancellation: Call ``kill`` afterwards.
        """

    def kill(self) -> None:
        """Stop the engine at once, if it is still running."""
