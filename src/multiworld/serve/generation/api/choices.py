"""The choices of one completion request, as they are generated."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from multiworld.errors import ServeError
from multiworld.serve.generation.gateway.stream import TimeLimits
from multiworld.serve.generation.gateway.streams import Streams
from multiworld.serve.generation.tokenizer import GrowingText, Tokenizer
from multiworld.serve.tenants.fair_queue import Share
from multiworld.serve.transport.generation_messages import Sampling, TokenItem

LEAST_LOGPROB = -9999.0
"""Logarithm of a probability of zero in answers, as in vLLM: JSON has no infinity."""


@dataclass(slots=True)
class Choice:
    """One choice.

    Attributes:
        index: Its index in the answer.
        prompt: Tokens of its prompt.
        text: Its text.
        is_prompt_only: Whether the token that is computed is not part of it.
        items: Its tokens so far.
        scores: Probabilities of the tokens of its prompt, if they were asked for; see
            ``TokenItem``.
        finish: Why it ended; empty while it goes on.
    """

    index: int
    prompt: Sequence[int]
    text: GrowingText
    is_prompt_only: bool = False
    items: list[TokenItem] = field(default_factory=list)
    scores: Sequence[tuple[float, Any]] = ()
    finish: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """The piece that one token adds to a choice.

    Attributes:
        choice: The choice.
        text: Text that can be given out now; may be empty.
        item: The token.
        finish: ``stop`` or ``length`` if it is the last piece.
        offset: Characters of the choice's text before it.
    """

    choice: Choice
    text: str
    item: TokenItem
    finish: str
    offset: int


def digest_of(choices: Sequence[Choice], sampling: Sampling) -> str:
    """Return a digest of a request: of its prompts, and how it samples.

    Its seed has no part in it: a request without one gets another each time.
    """
    found = hashlib.blake2b(digest_size=16)
    found.update(
        msgspec.msgpack.encode(
            msgspec.structs.replace(sampling, seed=0), order="sorted"
        )
    )
    for choice in choices:
        found.update(array("q", (len(choice.prompt), *choice.prompt)))
    return found.hexdigest()


async def generate(
    streams: Streams,
    model: str,
    choices: Sequence[Choice],
    samplings: Sequence[Sampling],
    deadline_s: float | None,
    limits: TimeLimits,
    share: Share,
    session: str = "",
    request: str = "",
) -> AsyncGenerator[Piece]:
    """Generate all choices at once; yield their pieces as they come.

    Args:
        streams: Streams of the gateway.
        model: Name of the model.
        choices: The choices.
        samplings: How to choose the tokens of each.
        deadline_s: Seconds until the deadline; None: the model's default.
        limits: Other time limits, of each choice.
        share: The tenant.
        session: Its name of a session, whose streams prefer the same replicas.
        request: Id of the request, for logs.

    Raises:
        ServeError: One choice failed; the others are ended.

    Cancellation: Safe. All choices end, and their replicas are told.
    """
    arrived: asyncio.Queue[Piece | ServeError | Exception] = asyncio.Queue()

    async def one(choice: Choice, sampling: Sampling) -> None:
        try:
            async with streams.stream(
                model,
                choice.prompt,
                sampling,
                deadline_s=deadline_s,
                limits=limits,
                share=share,
                session=session,
                request=request,
            ) as tokens:
                async for item in tokens:
                    await asyncio.sleep(0)  # others go on, however many have come
                    piece = _piece(choice, item)
                    arrived.put_nowait(piece)
                    if piece.finish:
                        return
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [
        asyncio.ensure_future(one(choice, sampling))
        for choice, sampling in zip(choices, samplings, strict=True)
    ]
    try:
        open_choices = len(choices)
        while open_choices:
            piece = await arrived.get()
            if not isinstance(piece, Piece):
                raise piece
            open_choices -= bool(piece.finish)
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _piece(choice: Choice, item: TokenItem) -> Piece:
    choice.scores = choice.scores or item.prompt
    if choice.is_prompt_only:
        choice.finish = "length"
        return Piece(choice, "", item, choice.finish, 0)
    choice.items.append(item)
    offset = len(choice.text.text)
    # A token that ends the text is not part of it.
    text = "" if item.finish == "stop" else choice.text.add(item.token)
    finish = "stop" if choice.text.is_stopped else item.finish
    if finish:
        text += choice.text.end()
    choice.finish = finish
    return Piece(choice, text, item, finish, offset)


def chat_logprobs(tokenizer: Tokenizer, items: Sequence[TokenItem]) -> Any:
    """Return the probabilities of tokens as in a chat completion."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.piece(token),
            "logprob": max(LEAST_LOGPROB, logprob),
            "bytes": list(tokenizer.raw(token)),
        }

    return {
        "content": [
            {
                **shown(item.token, item.logprob or 0.0),
                "top_logprobs": [shown(token, value) for token, value in item.top],
            }
            for item in items
        ]
    }


def text_logprobs(
    tokenizer: Tokenizer,
    items: Sequence[TokenItem],
    offset: int,
    prompt: Sequence[int] = (),
    scores: Sequence[tuple[float, Any]] = (),
) -> dict[str, Any]:
    """Return the probabilities of tokens as in a text completion.

    Args:
        tokenizer: Tokenizer of the model.
        items: The generated tokens.
        offset: Characters of the text before them.
        prompt: Tokens of the prompt, to be told as well; the first has no probability.
        scores: Probabilities of the others.
    """
    scored: list[tuple[int, float | None, Any]] = [
        (item.token, item.logprob, item.top) for item in items
    ]
    if prompt:
        before = zip(prompt[1:], scores, strict=False)
        told = [(token, logprob, top) for token, (logprob, top) in before]
        scored = [(prompt[0], None, None), *told, *scored]
        offset = 0
    tokens = [tokenizer.piece(token) for token, *_ in scored]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [
            None if logprob is None else max(LEAST_LOGPROB, logprob)
            for _, logprob, _ in scored
        ],
        "top_logprobs": [
            # The token itself is always among them.
            None
            if top is None or logprob is None
            else {
                tokenizer.piece(t): max(LEAST_LOGPROB, v)
                for t, v in ((token, logprob), *top)
            }
            for token, logprob, top in scored
        ],
        "text_offset": offsets,
    }


def sampling_of(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling of one of several choices of a prompt."""
    return msgspec.structs.replace(sampling, choice=number)
