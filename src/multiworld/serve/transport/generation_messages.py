"""Messages on the edges of models that generate text. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from multiworld.serve.tenants.fair_queue import DEFAULT_SHARE, Share
from multiworld.serve.transport.protocol import Key, Message, RemoteError

Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Number of tokens, or position of one."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""Id of a token; that it is one of the model's shows when it is used."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of the choice of tokens; names and meanings are vLLM's.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: Smallest sum of probabilities of the tokens to choose from.
        top_k: Number of tokens to choose from; 0: all.
        min_p: Least probability, as a share of that of the most likely token.
        seed: Seed of the random numbers; each depends on it, the choice and the index.
        choice: Number of the choice, of several for one prompt.
        presence_penalty: Subtracted from the logits of tokens generated before.
        frequency_penalty: The same, for each time.
        repetition_penalty: Divides the logits of tokens that were there before.
        logit_bias: Added to the logits of these tokens, by token id.
        stop_token_ids: Tokens that end the sequence.
        min_tokens: Least tokens before a token may end the sequence.
        max_tokens: Most tokens to generate.
        ignore_eos: Whether the model's own end of text ends nothing.
        logprobs: Number of most likely tokens to report with each token; None: report
            no probabilities.
        prompt_logprobs: The same for the tokens of the prompt.
        grammar: Structure of the text, in llguidance's form; empty: any.
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


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """A sequence, as the stages of its chain get to know it.

    Attributes:
        key: Gateway, stream and attempt.
        tokens: The prompt, and the tokens that were delivered.
        prompt: Number of tokens of the prompt.
        chain: Replicas by stage.
        sampling: How its tokens are chosen.
        share: Its tenant.
        previous: Number of the attempt that it continues: a replica that has that one
            keeps what it has computed. -1: it begins anew.
        is_probe: Whether it is a probe, which waits for nobody.
        is_suspect: Whether replicas were lost with it again and again, so that it is
            computed alone until it has a token.
        prepared: Number of the attempt that some replicas were prepared for, and keep
            what they have computed. -1: none.
        is_watched: Whether the gateway is to be told when anything of it is computed.
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


class Begin(Message, frozen=True):
    """Sequences to generate: of a gateway to all replicas of a chain."""

    openings: tuple[Opening, ...]


class Pause(Message, frozen=True):
    """Sequences of whose chain a stage has no replica now, so that they wait.

    Of a gateway to a replica of stage 0.
    """

    keys: tuple[Key, ...]


class Prepare(Message, frozen=True):
    """A sequence that will go on with other replicas: of its gateway to these.

    It goes on meanwhile with its chain so far, whose attempt is ``opening.previous``.

    Attributes:
        opening: The sequence, as it will begin.
        stages: Stages that have other replicas then.
    """

    opening: Opening
    stages: tuple[int, ...]


class Fetch(Message, frozen=True):
    """Tokens that a replica lacks which is prepared: to the one before it.

    That one sends it what it has of them, and goes on.

    Attributes:
        key: The sequence, as it will begin.
        previous: Number of the attempt that goes on.
        begin: Position of the first token.
    """

    key: Key
    previous: int
    begin: Count


class Prepared(Message, frozen=True):
    """A replica has computed what there was of a sequence: to its gateway."""

    key: Key


class Held(Message, frozen=True):
    """The tokens that a replica has of a sequence that begins: to the one before it.

    That one sends it all tokens from there on. It is told from the last stage up, each
    replica in turn, and with it stage 0 begins.

    Attributes:
        key: The sequence.
        count: Number of its tokens of which the keys and values are there.
    """

    key: Key
    count: Count


class Refill(Message, frozen=True):
    """Tokens that a stage has computed before: of a replica to one of the next stage.

    The frame has one content, ``hidden`` of shape [tokens, hidden].

    Attributes:
        key: The sequence.
        begin: Position of the first token.
        is_end: True if these are the last ones, so that the last stage tells stage 0.
    """

    key: Key
    begin: Count
    is_end: bool = False


class Resumed(Message, frozen=True):
    """A sequence whose stages all have what they need: of the last stage to stage 0.

    Attributes:
        key: The sequence.
        token: The next token; None if its prompt is not complete yet, or it has ended.
    """

    key: Key
    token: TokenId | None = None


class End(Message, frozen=True):
    """Sequences that nobody waits for any more: of a gateway to all of a chain."""

    keys: tuple[Key, ...]


class StepPart(msgspec.Struct, frozen=True, array_like=True):
    """The part of a step that is of one sequence.

    Attributes:
        key: The sequence.
        begin: Position of its first token.
        count: Number of its tokens; 0 if the next stage has them already.
        samples: True if the last stage samples the next token.
    """

    key: Key
    begin: Count
    count: Count
    samples: bool


class Step(Message, frozen=True):
    """A step of some sequences: of a replica to one of the next stage.

    The frame has one content, ``hidden`` of shape [tokens, hidden], with the tokens of
    all parts in order.

    Attributes:
        origin: Replica of stage 0 that has scheduled it.
        number: Number of the step there.
        parts: Its parts.
    """

    origin: str
    number: int
    parts: tuple[StepPart, ...]


class Preempted(Message, frozen=True):
    """Sequences that are computed again later, from their first token.

    Of a replica to one of the next stage, which passes it on.
    """

    keys: tuple[Key, ...]


class KvEvicted(Message, frozen=True):
    """Stage k → stage k-1 → … → stage 0: a sequence was dropped for lack of memory.

    Stage 0 preempts it, and sends nothing more to that replica for a while.

    Attributes:
        key: The sequence.
        replica: The replica that had no memory for it.
    """

    key: Key
    replica: str


class TokenItem(msgspec.Struct, frozen=True, array_like=True):
    """A generated token.

    Attributes:
        key: The sequence.
        index: Number of the token in the stream, from 0.
        token: Its id.
        finish: ``stop`` or ``length`` if it is the last one; else empty.
        logprob: Logarithm of its probability; None if that was not asked for.
        top: The most likely tokens with theirs.
        prompt: With the first token, if that was asked for: of each token of the prompt
            but the first, its logarithm and the most likely tokens with theirs.
    """

    key: Key
    index: Count
    token: TokenId
    finish: Literal["", "stop", "length"] = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    prompt: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()


class Tokens(Message, frozen=True):
    """Generated tokens: of a replica of the last stage to a gateway."""

    items: tuple[TokenItem, ...]


class StepDone(Message, frozen=True):
    """The outcome of a step: of the last stage, back to the replica of stage 0.

    Attributes:
        number: Number of the step.
        tokens: Its sequences, each with the next token; None if its prompt is not
            complete yet, or the sequence has ended.
    """

    number: int
    tokens: tuple[tuple[Key, TokenId | None], ...]


class Alone(Message, frozen=True):
    """A suspect whose step begins, with no other under way: to its gateway.

    If a replica of its chain is lost now, it is the cause, and no other sequence.
    """

    key: Key


class ComputeBegan(Message, frozen=True):
    """Replica → gateway: the first rows of watched sequences are computed now.

    A replica of theirs that is lost before that is not lost because of them.
    """

    keys: tuple[Key, ...]


class SequenceFailed(Message, frozen=True):
    """A sequence that a replica cannot go on with: to its gateway.

    Attributes:
        key: The sequence.
        error: Why, if it would fail in the same way elsewhere; None: it is to be
            computed again.
    """

    key: Key
    error: RemoteError | None = None


GenerationMessage = (
    Begin
    | Prepare
    | Fetch
    | Prepared
    | Pause
    | Held
    | Refill
    | Resumed
    | End
    | Step
    | Preempted
    | KvEvicted
    | Tokens
    | StepDone
    | Alone
    | ComputeBegan
    | SequenceFailed
)
"""Message on an edge of a model that generates text."""
