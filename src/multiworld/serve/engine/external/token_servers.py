"""Dialects of servers that continue a text and sample its tokens themselves.

A dialect writes the body of a request for a piece, sends it, and reads the tokens of
the answers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from multiworld.errors import InvalidRequestError, SpecError
from multiworld.serve.engine.external.engine_server import (
    Answer,
    EngineServer,
    answer_of,
)
from multiworld.serve.engine.external.pieces import Piece, is_greedy, size_of
from multiworld.serve.engine.external.whole_engine import EngineToken, Run
from multiworld.serve.text.tokenizer import Tokenizer
from multiworld.serve.wire.generation_messages import Sampling

# Maximum number of tokens in a piece. Longer pieces need fewer requests. With shorter
# ones, fewer tokens are computed again after a loss.
PIECE = 32
# Maximum number of biases of a request: more would crash the engine of vLLM's GPU
# runner.
MAX_BIASES = 1024
# Maximum number of stop tokens of a request with ``min_tokens``, in addition to the
# model's own: 128 in all are too many for vLLM.
MAX_STOPS = 96
# Numbers of log-probabilities to request if llama.cpp's answer lacks that of the
# sampled token. The token is usually among the MANY likeliest. An answer with ALL has
# several megabytes.
MANY, ALL = 256, 100_000
FORCED = 1e6  # a bias that makes a token likelier than all others
# Maximum number of requests for one log-probability; each bans one more token.
TRIES = 16
TOKEN = "token_id:"  # prefix of token ids in vLLM's log-probabilities


def refuse(title: str, name: str, remedy: str) -> InvalidRequestError:
    """Return the error for a parameter that a server does not support."""
    text = f"this model's engine, {title}, does not support {name}; {remedy}"
    return InvalidRequestError(text, param=name)


class Dialect:
    """The requests and answers of one kind of server.

    By default answers are server-sent events, each with some tokens.
    """

    title: str  # name of the server for error messages
    path: str  # route for requests
    piece: int | None  # maximum number of tokens of a piece; None: no maximum

    def check(self, sampling: Sampling) -> None:
        """Raise InvalidRequestError for parameters that the server does not support."""
        # These parameters need a sampler of ours, so no server that samples itself
        # supports them.
        if sampling.grammar:
            remedy = "leave it out: after a loss, the engine could not continue it"
            raise refuse(self.title, "structured output", remedy)
        if sampling.prompt_logprobs is not None:
            raise refuse(self.title, "echo with logprobs", "leave out one of the two")

    def body(self, run: Run, piece: Piece, slot: int, keep: bool) -> dict[str, Any]:
        """Return the body of a request; ``keep``: use the slot's keys and values."""
        raise NotImplementedError

    async def answers(
        self, server: EngineServer, body: dict[str, Any], run: Run
    ) -> AsyncGenerator[list[EngineToken]]:
        """Send a request, and yield its tokens as they arrive."""
        async with aclosing(server.events(self.path, body)) as events:
            async for data in events:
                if tokens := self.tokens(data, run):
                    yield tokens

    def tokens(self, data: bytes, run: Run) -> list[EngineToken]:
        """Return the tokens of an event."""
        raise NotImplementedError


# llama.cpp's own route.


class _Probability(msgspec.Struct):
    id: int
    logprob: float
    top_logprobs: list[_Probability] = []


class _Completion(Answer):
    tokens: list[int] = msgspec.field(default_factory=list)
    completion_probabilities: list[_Probability] = msgspec.field(default_factory=list)


class LlamaCpp(Dialect):
    """``/completion`` of llama.cpp's server: token ids in, token ids out.

    The server's streams leave out tokens that end within a character. So each token is
    a separate request, which reuses the keys and values in its slot. Answers also leave
    out the log-probabilities of these tokens; further requests find them.
    """

    title, path = "llama.cpp", "/completion"
    piece = 1

    def __init__(self, adapters: Sequence[str] = ()) -> None:
        self._adapters = adapters
        self._decoder = msgspec.json.Decoder(_Completion)
        # A token that ends with a whole character, so that llama.cpp reports
        # log-probabilities.
        self._whole: int | None = None

    def body(self, run: Run, piece: Piece, slot: int, keep: bool) -> dict[str, Any]:
        given = run.sampling
        bias: list[tuple[int, float | bool]] = [
            (token, value if value > -math.inf else False)
            for token, value in piece.bias.items()
        ]
        if piece.min_tokens:
            bias += [(token, False) for token in run.ends]
        # The samplers in vLLM's order. One without an effect is left out, because it
        # would cost time.
        order = {"penalties": given.repetition_penalty != 1.0, "temperature": True}
        order |= {"min_p": given.min_p > 0.0, "top_k": given.top_k > 0}
        order |= {"top_p": given.top_p < 1.0}
        lora = [
            {"id": number, "scale": float(name == run.adapter)}
            for number, name in enumerate(self._adapters)
        ]
        return {
            **({"lora": lora} if lora else {}),
            "prompt": piece.tokens,
            "n_predict": 1,
            "return_tokens": True,
            "id_slot": slot,
            "cache_prompt": keep,
            "samplers": [name for name, is_used in order.items() if is_used],
            "temperature": -1.0 if is_greedy(given) else given.temperature,
            "top_k": given.top_k,
            "top_p": given.top_p,
            "min_p": given.min_p,
            "repeat_penalty": given.repetition_penalty,
            "repeat_last_n": len(piece.tokens),
            "seed": piece.seed,
            "logit_bias": bias,
            "n_probs": 0 if given.logprobs is None else max(1, given.logprobs),
            "response_fields": ["tokens", "completion_probabilities"],
        }

    async def answers(
        self, server: EngineServer, body: dict[str, Any], run: Run
    ) -> AsyncGenerator[list[EngineToken]]:
        # No timeout: the server sends nothing while it computes a long prompt. The
        # replica's worker limits that time.
        data = await server.post(self.path, body, is_timed=False)
        found = answer_of(self._decoder, data)
        count, scores = run.sampling.logprobs, found.completion_probabilities
        if count is not None and not scores and len(found.tokens) == 1:
            yield [await self._scored(server, body, found.tokens[0], count)]
        elif count is None or len(scores) < len(found.tokens):
            yield [EngineToken(token) for token in found.tokens]
        else:
            self._whole = next(iter(found.tokens), self._whole)
            yield [
                EngineToken(token, score.logprob, pairs_of(score.top_logprobs, count))
                for token, score in zip(found.tokens, scores, strict=False)
            ]

    async def _scored(
        self, server: EngineServer, body: dict[str, Any], token: int, count: int
    ) -> EngineToken:
        """Return a token with its log-probability, found in further requests.

        These requests ban the token or force another one. The server reports the
        log-probabilities before sampling, so the biases do not change them.
        """
        banned, many = [token], max(count, MANY)
        for _ in range(TRIES):
            bias: list[tuple[int, float | bool]] = [(each, False) for each in banned]
            if self._whole is not None:
                bias = [(self._whole, FORCED)]
            other = {"temperature": -1.0, "logit_bias": bias, "n_probs": many}
            # The previous request has left this prompt's keys and values in the slot.
            other["cache_prompt"] = True
            data = await server.post(self.path, {**body, **other})
            found = await asyncio.to_thread(answer_of, self._decoder, data)
            if found.completion_probabilities:
                scores = found.completion_probabilities[0].top_logprobs
                for one in scores:
                    if one.id == token:
                        return EngineToken(token, one.logprob, pairs_of(scores, count))
                if many == ALL:
                    break
                many = ALL
            elif found.tokens:
                # These tokens end within a character, too, so llama.cpp reports nothing
                # for them.
                banned += found.tokens
                self._whole = None
            else:
                break
        return EngineToken(token)


def pairs_of(
    scores: Sequence[_Probability], count: int
) -> tuple[tuple[int, float], ...]:
    """Return the likeliest tokens with their log-probabilities, at most ``count``."""
    return tuple((one.id, one.logprob) for one in scores[:count])


# vLLM's completions route, and those of other servers with vLLM's fields.


class _Scores(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


# The finish reason of an answer that the server's content filter has ended.
FILTERED = "content_filter"


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Scores | None = None


class _Chunk(Answer):
    choices: list[_Choice] = msgspec.field(default_factory=list)


@dataclass
class Completions(Dialect):
    """``/v1/completions`` with token ids in and out, as in vLLM."""

    model: str  # name of the model at the server
    # The adapters' names at the server, by their names in the spec.
    adapters: Mapping[str, str] = field(default_factory=dict)
    title: str = "a server with OpenAI's API"
    path: str = "/v1/completions"
    piece: int | None = PIECE

    def check(self, sampling: Sampling) -> None:
        super().check(sampling)
        if sampling.min_tokens and len(sampling.stop_token_ids) > MAX_STOPS:
            name = f"min_tokens with more than {MAX_STOPS} stop_token_ids"
            raise refuse(self.title, name, "leave out one of the two")

    def body(self, run: Run, piece: Piece, slot: int, keep: bool) -> dict[str, Any]:
        given = run.sampling
        # With pieces of one token, ``piece.bias`` includes all penalties.
        is_biased = size_of(given, self.piece) == 1
        body: dict[str, Any] = {
            "model": self.adapters.get(run.adapter, self.model),
            "prompt": piece.tokens,
            "max_tokens": piece.count,
            "stream": True,
            "temperature": given.temperature,
            # Send these even if they have no effect, because the server has defaults of
            # its own.
            "top_p": given.top_p,
            "top_k": given.top_k,
            "min_p": given.min_p,
            "repetition_penalty": given.repetition_penalty,
            "frequency_penalty": 0.0 if is_biased else given.frequency_penalty,
            "presence_penalty": 0.0 if is_biased else given.presence_penalty,
            "seed": piece.seed,
            "ignore_eos": True,
            "stop_token_ids": run.ends,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        if piece.min_tokens:
            body["min_tokens"] = piece.min_tokens
        if piece.bias:
            pairs = strongest(piece.bias, given.logit_bias)
            body["logit_bias"] = {
                str(token): max(-100.0, min(100.0, value)) for token, value in pairs
            }
        if given.logprobs is not None:
            body |= {"logprobs": given.logprobs, "return_tokens_as_token_ids": True}
        if run.tenant:
            body["cache_salt"] = run.tenant
        return body

    def tokens(self, data: bytes, run: Run) -> list[EngineToken]:
        found: list[EngineToken] = []
        for choice in answer_of(CHUNK, data).choices[:1]:
            check_finish(choice)
            scores = choice.logprobs or _Scores()
            # The server may return more tokens than are needed, because it repeats the
            # known tokens of a piece.
            ids = (choice.token_ids or [])[: len(run.tokens) + run.remaining]
            for place, token in enumerate(ids):
                found.append(_scored(token, place, scores, run.sampling.logprobs))
            # Some servers leave out the token that ended the answer.
            is_missing = not found or found[-1].token not in run.ends
            is_end = choice.finish_reason == "stop" and not run.sampling.ignore_eos
            if is_end and run.ends and is_missing:
                found.append(EngineToken(run.ends[0]))
        return found


CHUNK = msgspec.json.Decoder(_Chunk)


def check_finish(choice: _Choice) -> None:
    """Raise InvalidRequestError if the server's content filter ended an answer."""
    if choice.finish_reason == FILTERED:
        raise InvalidRequestError(
            f"the server's content filter ended the answer ({FILTERED}); change the "
            "request"
        )


def strongest(
    bias: Mapping[int, float], asked: Mapping[int, float]
) -> list[tuple[int, float]]:
    """Return the biases that a server takes: the requested ones, then the largest.

    The selection depends only on the tokens, so a stream continues exactly. Of equal
    biases, those of the latest tokens are taken, which are the last ones in ``bias``.
    """
    pairs = list(bias.items())
    if len(pairs) > MAX_BIASES:
        pairs.reverse()
        pairs.sort(key=lambda pair: (pair[0] not in asked, -abs(pair[1])))
    return pairs[:MAX_BIASES]


def _scored(token: int, place: int, scores: _Scores, count: int | None) -> EngineToken:
    logprobs, tops = scores.token_logprobs, scores.top_logprobs or []
    if count is None or place >= len(logprobs) or logprobs[place] is None:
        return EngineToken(token)
    top = (tops[place] if place < len(tops) else None) or {}
    pairs = [
        (int(name.removeprefix(TOKEN)), value)
        for name, value in top.items()
        if name.removeprefix(TOKEN).isdigit()
    ]
    pairs.sort(key=lambda pair: -pair[1])
    return EngineToken(token, logprobs[place], tuple(pairs[:count]))


@dataclass
class CompletionsOfText(Dialect):
    """``/v1/completions`` with text in and out; streams do not continue exactly."""

    model: str  # name of the model at the server
    tokenizer: Tokenizer
    # Token to return if the server ended its answer and the request has no end tokens.
    end: int
    adapters: Mapping[str, str] = field(default_factory=dict)
    title: str = "a server that returns text only"
    path: str = "/v1/completions"
    piece: int | None = None

    def __post_init__(self) -> None:
        # Reads the text of a control token as text: a server sends no control tokens.
        fast = self.tokenizer.fast
        self._plain = type(fast).from_str(fast.to_str())
        self._plain.encode_special_tokens = True

    def check(self, sampling: Sampling) -> None:
        super().check(sampling)
        if sampling.logprobs is not None:
            raise refuse(self.title, "logprobs", "leave it out")

    def body(self, run: Run, piece: Piece, slot: int, keep: bool) -> dict[str, Any]:
        given = run.sampling
        body: dict[str, Any] = {
            "model": self.adapters.get(run.adapter, self.model),
            "prompt": self._text_of(piece.tokens, run.prompt),
            "max_tokens": piece.count,
            "stream": True,
            "temperature": given.temperature,
            "top_p": given.top_p,
            "presence_penalty": given.presence_penalty,
            "frequency_penalty": given.frequency_penalty,
            "seed": piece.seed,
        }
        more: Mapping[str, tuple[float, float]] = {
            "top_k": (given.top_k, 0),
            "min_p": (given.min_p, 0.0),
            "repetition_penalty": (given.repetition_penalty, 1.0),
            "min_tokens": (piece.min_tokens, 0),
        }
        body |= {name: value for name, (value, off) in more.items() if value != off}
        if given.logit_bias:
            body["logit_bias"] = {str(t): v for t, v in given.logit_bias.items()}
        return body

    def tokens(self, data: bytes, run: Run) -> list[EngineToken]:
        found: list[EngineToken] = []
        for choice in answer_of(CHUNK, data).choices[:1]:
            check_finish(choice)
            made = self._plain.encode(choice.text, add_special_tokens=False)
            found += map(EngineToken, made.ids)
            # Without an end token, the sequence would continue.
            if choice.finish_reason == "stop":
                found.append(EngineToken(run.ends[0] if run.ends else self.end))
        return found

    def _text_of(self, tokens: Sequence[int], prompt: int) -> str:
        """Return the text of tokens, without tokens that the server adds in front.

        Raises InvalidRequestError if the server would read other control tokens in the
        text of the prompt, which is the first ``prompt`` tokens: for instance one that
        a user has written. The model itself may write about control tokens.
        """
        first = self.tokenizer.encode("")[:1]
        if first and list(tokens[:1]) == first:
            tokens, prompt = tokens[1:], prompt - 1
        text = self.tokenizer.decode(tokens, skips_special=False)
        known = self.tokenizer.fast.get_added_tokens_decoder()
        given = tokens[:prompt]
        shown = self.tokenizer.decode(given, skips_special=False)
        read = self.tokenizer.encode(shown, has_special=False)
        if [t for t in read if t in known] != [t for t in given if t in known]:
            raise InvalidRequestError(
                "the request contains text that this model's engine would read as a "
                "control token; remove it"
            )
        return text or " "


def check_text(tokenizer: Tokenizer) -> None:
    """Raise SpecError unless the tokenizer can encode a text in parts."""
    text = "Begin, a middle; end."
    parts = [text[:5], text[5:11], text[11:]]
    tokens = [t for part in parts for t in tokenizer.encode(part, has_special=False)]
    if tokenizer.decode(tokens) != text:
        raise SpecError(
            "this model's tokenizer cannot encode a text in parts, so it cannot be "
            "used with a server that returns no token ids; use one that returns them"
        )
