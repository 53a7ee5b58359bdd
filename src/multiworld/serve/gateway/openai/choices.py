"""The choices of one completion request, as they are generated."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from multiworld.errors import ServeError
from multiworld.serve.gateway.http.answer_record import AnswerRecord
from multiworld.serve.gateway.streams.actions import Cut
from multiworld.serve.gateway.streams.streams import Delivered, OpenStream, Places
from multiworld.serve.text.growing_text import GrowingText
from multiworld.serve.text.tokenizer import Tokenizer
from multiworld.serve.wire.generation_messages import Sampling, TokenItem

# ``Streams.stream`` with all arguments bound except the prompt, the sampling, and the
# part of the stream that another gateway has delivered.
Open = Callable[
    [Sequence[int], Sampling, Delivered],
    AbstractAsyncContextManager[OpenStream],
]

MAX_UNREAD = 400_000  # maximum ``_cost`` of a request's pieces that wait for its client
# Logprob of probability zero, as in vLLM, because JSON has no infinity.
MIN_LOGPROB = -9999.0


class SlowClientError(ServeError):
    """The client reads a stream more slowly than its tokens are generated."""

    status = 408


@dataclass(slots=True)
class Choice:
    index: int
    prompt: Sequence[int]
    text: GrowingText
    is_prompt_only: bool = False  # the answer leaves out the one computed token
    keeps_items: bool = True  # False: the answer is streamed
    made: int = 0  # number of output tokens
    items: list[TokenItem] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # start of each, in characters
    # Logprobs of the prompt, as in ``TokenItem.prompt``.
    scores: Sequence[tuple[float, Any]] = ()
    finish: str = ""  # reason why the choice ended; empty until then


@dataclass(frozen=True, slots=True)
class Piece:
    """The text that one token adds to a choice; may be empty."""

    choice: Choice
    text: str
    item: TokenItem | None  # None: the deadline has passed
    finish: str  # empty except for the last piece
    offset: int  # position of the text, in characters


def digest_of(choices: Sequence[Choice], sampling: Sampling) -> str:
    """Return a digest of prompts and sampling, except for the seed."""
    found = hashlib.blake2b(digest_size=16)
    # Sort here, because msgspec sorts only keys that are strings.
    biases = sorted(sampling.logit_bias.items())
    rest = msgspec.structs.replace(sampling, seed=0, logit_bias={})
    found.update(msgspec.msgpack.encode((rest, biases), order="sorted"))
    for choice in choices:
        found.update(array("q", (len(choice.prompt), *choice.prompt)))
    return found.hexdigest()


async def generate(
    stream: Open,
    choices: Sequence[Choice],
    samplings: Sequence[Sampling],
    places: Places,
    on_token: Callable[[], None],
    record: AnswerRecord,
) -> AsyncGenerator[Piece]:
    """Generate all choices concurrently; if one fails, cancel the others.

    Yield tokens that another gateway has sent first; each choice continues after them.

    Raises:
        SlowClientError: The pieces that wait for the client exceed ``MAX_UNREAD``.
    """
    arrived: asyncio.Queue[Piece | ServeError | Exception] = asyncio.Queue()
    unread = 0

    async def one(choice: Choice, sampling: Sampling) -> None:
        nonlocal unread
        places.take()
        delivered = Delivered(
            tuple(tokens.get(choice.index, ())), record.drawn.noise.get(choice.index)
        )
        try:
            async with stream(choice.prompt, sampling, delivered) as opened:
                async for item in opened:
                    await asyncio.sleep(0)  # let other tasks run
                    if isinstance(item, Cut):
                        if not any(each.made for each in choices):
                            raise item.error
                        arrived.put_nowait(_cut(choice))
                        return
                    if not choice.is_prompt_only:
                        on_token()  # charges it, even if the client does not read it
                    if opened.noise != record.drawn.noise.get(choice.index):
                        assert opened.noise is not None
                        record.drawn.noise[choice.index] = opened.noise
                        record.keep()
                    piece = _piece(choice, item)
                    unread += _cost(piece)
                    if unread > MAX_UNREAD:
                        while not arrived.empty():
                            arrived.get_nowait()
                        raise SlowClientError(
                            "the client reads more slowly than tokens are generated, "
                            "and too many tokens are waiting; read faster, or request "
                            "less"
                        )
                    arrived.put_nowait(piece)
                    if piece.finish:
                        return
        except Exception as error:
            arrived.put_nowait(error)

    tokens: dict[int, list[int]] = {}
    for index, item in record.replayed():
        tokens.setdefault(index, []).append(item.token)
        yield _piece(choices[index], item)
    tasks = [
        asyncio.ensure_future(one(choice, sampling))
        for choice, sampling in zip(choices, samplings, strict=True)
        if not choice.finish
    ]
    try:
        open_choices = len(tasks)
        while open_choices:
            piece = await arrived.get()
            if not isinstance(piece, Piece):
                raise piece
            open_choices -= bool(piece.finish)
            unread -= _cost(piece)
            if piece.item is not None:
                record.add(piece.choice.index, piece.item)
            yield piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cost(piece: Piece) -> int:
    """Return the memory of a piece, in units of about 100 bytes."""
    return 4 + (0 if piece.item is None else len(piece.item.top))


def _cut(choice: Choice) -> Piece:
    """Return the last piece of a choice whose deadline has passed."""
    offset, text = choice.text.offset, choice.text.end()
    choice.finish = "length"
    return Piece(choice, text, None, choice.finish, offset)


def _piece(choice: Choice, item: TokenItem) -> Piece:
    choice.scores = choice.scores or item.prompt
    if choice.is_prompt_only:
        choice.finish = "length"
        return Piece(choice, "", item, choice.finish, 0)
    offset = choice.text.offset
    choice.made += 1
    if choice.keeps_items:
        choice.items.append(item)
        choice.offsets.append(offset)
    # A token that ends the text is not part of the text.
    text = "" if item.finish == "stop" else choice.text.add(item.token)
    if item.finish:  # add text that was held back
        text += choice.text.end()
    finish = "stop" if choice.text.is_stopped else item.finish
    choice.finish = finish
    return Piece(choice, text, item, finish, offset)


def chat_logprobs(tokenizer: Tokenizer, items: Sequence[TokenItem]) -> Any:
    def shown(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.piece(token),
            "logprob": max(MIN_LOGPROB, logprob),
            "bytes": list(tokenizer.raw(token)),
        }

    return {
        "content": [
            {
                **shown(
                    item.token, MIN_LOGPROB if item.logprob is None else item.logprob
                ),
                "top_logprobs": [shown(token, value) for token, value in item.top],
            }
            for item in items
        ]
    }


def text_logprobs(
    tokenizer: Tokenizer,
    items: Sequence[TokenItem],
    offsets: Sequence[int],  # of ``prompt`` and then of the items, in characters
    prompt: Sequence[int] = (),  # tokens before the items, with logprobs ``scores``
    scores: Sequence[tuple[float, Any]] = (),
) -> dict[str, Any]:
    """Return the logprobs of tokens in the format of a text completion."""
    scored: list[tuple[int, float | None, Any]] = [
        (item.token, item.logprob, item.top) for item in items
    ]
    tokens = [tokenizer.piece(token) for token in prompt]
    if prompt:
        # The first token of a prompt has no logprob.
        known = zip(prompt[1:], scores, strict=False)
        reported = [(token, logprob, top) for token, (logprob, top) in known]
        scored = [(prompt[0], None, None), *reported, *scored]
    return {
        "tokens": [*tokens, *(tokenizer.piece(item.token) for item in items)],
        "token_logprobs": [
            None if logprob is None else max(MIN_LOGPROB, logprob)
            for _, logprob, _ in scored
        ],
        "top_logprobs": [
            # The chosen token is always included.
            None
            if top is None or logprob is None
            else {
                tokenizer.piece(t): max(MIN_LOGPROB, v)
                for t, v in ((token, logprob), *top)
            }
            for token, logprob, top in scored
        ],
        "text_offset": list(offsets),
    }
