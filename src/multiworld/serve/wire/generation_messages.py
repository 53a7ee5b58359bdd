"""Messages on the edges of models that generate text. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from multiworld.serve.queueing.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.wire.origin import NOWHERE, Origin
from multiworld.serve.wire.protocol import Key, Message, RemoteError

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]  # number of tokens, or a position

# Token id; checked against the model's vocabulary where it is used.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters; names and meanings are vLLM's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # number of most likely tokens to sample from; 0: all
    min_p: float = 0.0  # relative to the probability of the most likely token
    seed: int = 0  # with ``choice`` and the token's index, determines random numbers
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False  # do not stop at the model's end-of-text tokens
    # Number of most likely tokens to report with each token; None: no logprobs.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # like ``logprobs``, for tokens of the prompt
    grammar: str = ""  # grammar of the output, for llguidance; empty: any output


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence, as announced to the stages of its chain."""

    key: Key
    tokens: tuple[TokenId, ...]  # the prompt, and the output tokens delivered so far
    prompt: Count  # number of prompt tokens
    chain: tuple[str, ...]  # replicas by stage
    sampling: Sampling
    share: Share = DEFAULT_SHARE
    previous: int = -1  # earlier attempt whose KV blocks are used; -1: none
    is_probe: bool = False  # a probe skips the queue
    # A suspect is computed alone until it has produced a few tokens.
    is_suspect: bool = False
    prepared: int = -1  # prepared attempt whose KV blocks are used; -1: none
    is_watched: bool = False  # send ``ComputeBegun`` to the gateway
    adapter: str = ""  # the engine's LoRA adapter to compute with; empty: none
    # Suspects of one gateway with the same number may be computed together; 0: alone.
    group: Count = 0
    origin: Origin = NOWHERE


class BeginSequences(Message, frozen=True, tag="begin_sequences"):
    """Gateway → all replicas of a chain: sequences to generate."""

    starts: tuple[SequenceStart, ...]


class PauseSequences(Message, frozen=True, tag="pause_sequences"):
    """Gateway → stage 0: pause sequences because a stage of their chain is lost."""

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
    """Prepared replica → gateway: the replica has caught up with the sequence."""

    key: Key


class KvHeld(Message, frozen=True, tag="kv_held"):
    """Stage k → stage k-1, last stage first: number of tokens whose KV k keeps."""

    key: Key
    # The receiver replays the tokens after these; stage 0 then starts the sequence.
    count: Count


class ActivationRows(Message, frozen=True, tag="activation_rows"):
    """Replica → next stage: replay from the activation log, from ``begin`` on."""

    key: Key
    # The frame has ``hidden`` [tokens, hidden], for the tokens from ``begin`` on.
    begin: Count
    is_end: bool = False  # the last stage then sends ``KvRebuilt``


class KvRebuilt(Message, frozen=True, tag="kv_rebuilt"):
    """Last stage → stage 0: every stage has caught up."""

    key: Key
    # Next token, if sampled; None: incomplete prompt, or the sequence has ended.
    token: TokenId | None = None


class EndSequences(Message, frozen=True, tag="end_sequences"):
    """Gateway → all replicas of a chain: end sequences that clients no longer need."""

    keys: tuple[Key, ...]


class StepPart(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of a step, from position ``begin`` on."""

    key: Key
    begin: Count
    count: Count  # 0 if the next stage has the tokens already
    samples: bool  # the last stage samples the next token


class Step(Message, frozen=True, tag="step"):
    """Replica → next stage: one step of the in-flight batch."""

    origin: str  # replica of stage 0 that scheduled and numbered the step
    number: int
    # ``hidden`` [tokens, hidden] of the frame has the parts' tokens, in this order.
    parts: tuple[StepPart, ...]
    # Sequences that begin with this step. The gateway also announces them to every
    # stage, but its message may arrive later.
    starts: tuple[SequenceStart, ...] = ()


class PreemptSequences(Message, frozen=True, tag="preempt_sequences"):
    """Replica → next → … → last stage: sequences to recompute later, from the start."""

    keys: tuple[Key, ...]


class KvEvicted(Message, frozen=True, tag="kv_evicted"):
    """Stage k → stage k-1 → … → stage 0: ``replica`` lacks memory for a sequence."""

    key: Key
    replica: str


class TokenItem(msgspec.Struct, frozen=True, array_like=True):
    """A generated token; ``index`` is its position in the completion, from 0."""

    key: Key
    index: Count
    token: TokenId
    finish: Literal["", "stop", "length"] = ""
    logprob: float | None = None  # None: not requested
    # The most likely tokens, each with its logprob.
    top: tuple[tuple[int, float], ...] = ()
    # Sent with the first output token, if requested: the logprob and ``top`` of each
    # prompt token except the first.
    prompt: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


class Tokens(Message, frozen=True, tag="tokens"):
    """Last stage → gateway: generated tokens."""

    items: tuple[TokenItem, ...]


class StepDone(Message, frozen=True, tag="step_done"):
    """Last stage → stage 0: each sequence's next token, if one was sampled."""

    number: int
    tokens: tuple[tuple[Key, TokenId | None], ...]


class RunsAlone(Message, frozen=True, tag="runs_alone"):
    """Replica → gateway: a suspect's step starts, with no other step in flight."""

    key: Key  # if a replica of its chain is lost from now on, this sequence is to blame
    is_over: bool = False  # isolation ends: a step with other sequences starts


class ComputeBegun(Message, frozen=True, tag="compute_begun"):
    """Replica → gateway: the computation of these sequences starts.

    Every stage sends it for watched sequences: before this message, a sequence cannot
    have caused a loss. Stage 0 also sends it for sequences without output tokens.
    """

    keys: tuple[Key, ...]


class SequenceFailed(Message, frozen=True, tag="sequence_failed"):
    """Replica → gateway: a sequence cannot continue here; no ``error``: replay it."""

    key: Key
    error: RemoteError | None = None
    lacks: str = ""  # neighbour in the chain that is not connected; empty: none


# Messages on edges of models that generate text.
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
