"""Messages on the edges of models that generate text. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport.protocol import Key, Message, RemoteError

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Number of tokens, or position of a token."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Token id; checked against the model's vocabulary where it is used."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters; names and meanings are vLLM's.

    Attributes:
        top_k: Number of tokens to choose from; 0: all.
        min_p: Minimum probability, relative to that of the most likely token.
        seed: Each random number depends on it, the choice and the token's index.
        ignore_eos: Do not stop at the model's end-of-text tokens.
        logprobs: Number of most likely tokens to report with each token; None: none,
            and no probabilities.
        prompt_logprobs: The same for the tokens of the prompt.
        grammar: Grammar of the output, in llguidance's form; empty: any output.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence, as announced to the stages of its chain.

    Attributes:
        tokens: The prompt (``prompt`` tokens), and the output tokens delivered so far.
        chain: Replicas by stage.
        previous: Attempt that it continues; replicas keep that one's KV blocks. -1:
            none.
        is_probe: Probes skip the queue.
        is_suspect: Computed alone until it has a token, after repeated losses.
        prepared: Attempt that replicas were prepared for, and whose KV blocks they
            keep. -1: none.
        is_watched: Whether to send ``ComputeBegun`` to the gateway.
        adapter: Name of the engine's LoRA adapter to compute with; empty: none.
    """

    key: Key
    tokens: tuple[TokenId, ...]
    prompt: Count
    chain: tuple[str, ...]
    sampling: Sampling
    share: Share = DEFAULT_SHARE
    previous: int = -1
    is_probe: bool = False
    is_suspect: bool = False
    prepared: int = -1
    is_watched: bool = False
    adapter: str = ""


class BeginSequences(Message, frozen=True, tag="begin_sequences"):
    """Gateway → all replicas of a chain: sequences to generate."""

    starts: tuple[SequenceStart, ...]


class PauseSequences(Message, frozen=True, tag="pause_sequences"):
    """Gateway → stage 0: pause these sequences; a stage of their chain is missing."""

    keys: tuple[Key, ...]


class PrepareSequence(Message, frozen=True, tag="prepare_sequence"):
    """Gateway → new replicas of ``stages``: a running sequence will move to them."""

    start: SequenceStart
    stages: tuple[int, ...]


class FetchActivations(Message, frozen=True, tag="fetch_activations"):
    """Prepared replica → previous stage: request for activations from ``begin`` on."""

    key: Key
    previous: int
    begin: Count


class SequencePrepared(Message, frozen=True, tag="sequence_prepared"):
    """Prepared replica → gateway: it has caught up with the sequence."""

    key: Key


class KvHeld(Message, frozen=True, tag="kv_held"):
    """Stage k → stage k-1, in turn from the last stage up: tokens with KV entries.

    The receiver replays the rest. Stage 0 starts the sequence when it receives this.
    """

    key: Key
    count: Count


class ActivationRows(Message, frozen=True, tag="activation_rows"):
    """Replica → next stage: replay from the activation log, starting at ``begin``.

    The frame has ``hidden`` [tokens, hidden]. After ``is_end`` the last stage sends
    ``KvRebuilt``.
    """

    key: Key
    begin: Count
    is_end: bool = False


class KvRebuilt(Message, frozen=True, tag="kv_rebuilt"):
    """Last stage → stage 0: every stage has caught up.

    ``token`` is None if the prompt is incomplete, or the sequence has ended.
    """

    key: Key
    token: TokenId | None = None


class EndSequences(Message, frozen=True, tag="end_sequences"):
    """Gateway → all replicas of a chain: sequences whose clients no longer wait."""

    keys: tuple[Key, ...]


class StepPart(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a step, from position ``begin`` on.

    ``count`` is 0 if the next stage has the tokens already. With ``samples``, the last
    stage samples the next token.
    """

    key: Key
    begin: Count
    count: Count
    samples: bool


class Step(Message, frozen=True, tag="step"):
    """Replica → next stage: one step of the in-flight batch.

    The frame has ``hidden`` [tokens, hidden], with the tokens of all parts in order.
    ``origin`` is the replica of stage 0 that scheduled and numbered the step.
    """

    origin: str
    number: int
    parts: tuple[StepPart, ...]


class PreemptSequences(Message, frozen=True, tag="preempt_sequences"):
    """Replica → next stage and on: sequences to compute again later, from the start."""

    keys: tuple[Key, ...]


class KvEvicted(Message, frozen=True, tag="kv_evicted"):
    """Stage k → stage k-1 → … → stage 0: no memory for a sequence at ``replica``."""

    key: Key
    replica: str


class TokenItem(msgspec.Struct, frozen=True, array_like=True):
    """A generated token; ``index`` counts those of the completion, from 0.

    Attributes:
        logprob: None if it was not requested.
        top: The most likely tokens with their logprobs.
        prompt: With the first token, if requested: for each token of the prompt but the
            first, its logprob and ``top``.
    """

    key: Key
    index: Count
    token: TokenId
    finish: Literal["", "stop", "length"] = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


class Tokens(Message, frozen=True, tag="tokens"):
    """Last stage → gateway: generated tokens."""

    items: tuple[TokenItem, ...]


class StepDone(Message, frozen=True, tag="step_done"):
    """Last stage → stage 0: each sequence's next token, if one was sampled."""

    number: int
    tokens: tuple[tuple[Key, TokenId | None], ...]


class RunsAlone(Message, frozen=True, tag="runs_alone"):
    """Replica → gateway: a suspect's step begins, with no other step in flight.

    If a replica of its chain is lost now, this sequence is the cause. With ``is_over``,
    a step of others begins.
    """

    key: Key
    is_over: bool = False


class ComputeBegun(Message, frozen=True, tag="compute_begun"):
    """Replica → gateway: the first rows of watched sequences are computed now.

    A replica lost before that was not lost because of them.
    """

    keys: tuple[Key, ...]


class SequenceFailed(Message, frozen=True, tag="sequence_failed"):
    """Replica → gateway: a sequence cannot continue; ``error`` None: replay it."""

    key: Key
    error: RemoteError | None = None


GenerationMessage = (
    BeginSequences
    | PrepareSequence
    | FetchActivations
    | SequencePrepared
    | PauseSequences
    | KvHeld
    | ActivationRows
    | KvRebuilt
    | EndSequences
    | Step
    | PreemptSequences
    | KvEvicted
    | Tokens
    | StepDone
    | RunsAlone
    | ComputeBegun
    | SequenceFailed
)
"""Message on an edge of a model that generates text."""
