"""The choices of one completion request, as they are generated."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from multiworld.errors import ServeError
from multiworld.serve.gateway.http.answer_record import AnswerRecord
from multiworld.serve.gateway.streams.actions import Cut, Item
from multiworld.serve.gateway.streams.streams import (
    Delivered,
    OnItem,
    OpenStream,
    Places,
)
from multiworld.serve.text.growing_text import GrowingText
from multiworld.serve.text.tokenizer import Tokenizer
from multiworld.serve.wire.generation_messages import Sampling, TokenItem

# ``Streams.open`` with all arguments bound except the prompt, the sampling, the part of
# the stream that another gateway has delivered, and the receiver of its items.
Open = Callable[[Sequence[int], Sampling, Delivered, OnItem], OpenStream]

REPLAYED = 64  # recorded tokens that are rendered at once, in about 5 ms at most
KEEP_ALIVE_S = 10.0  # seconds without a token after which a stream gets a comment
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


# Pieces of all choices of a request; None after every ``KEEP_ALIVE_S`` without one.
Pieces = AsyncGenerator[Piece | None]


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
) -> Pieces:
    """Generate all choices concurrently; if one fails, end the others.

    First yield the tokens that another gateway has sent; each choice continues them.
    Yield None after every ``KEEP_ALIVE_S`` without a token. Raise SlowClientError if
    the pieces that wait for the client exceed ``MAX_UNREAD``.
    """
    tokens: dict[int, list[int]] = {}
    for number, (index, item) in enumerate(record.replayed(), 1):
        if number % REPLAYED == 0:
            await asyncio.sleep(0)  # other requests need the event loop, too
        tokens.setdefault(index, []).append(item.token)
        yield _piece(choices[index], item)
    arrivals = _Arrivals(choices, on_token, record)
    try:
        open_choices = 0
        for choice, sampling in zip(choices, samplings, strict=True):
            if not choice.finish:
                places.take()
                sent = tuple(tokens.get(choice.index, ()))
                noise = record.drawn.noise.get(choice.index)
                delivered = Delivered(sent, noise, record.spent_s)
                arrivals.open(stream, choice, sampling, delivered)
                open_choices += 1
        while open_choices:
            piece = await arrivals.next()
            if piece is not None:
                open_choices -= bool(piece.finish)
                if piece.item is not None:
                    record.add(piece.choice.index, piece.item)
            yield piece
    finally:
        arrivals.close()


class _Arrivals:
    """Pieces of all choices of a request, in the order in which they arrive.

    Tokens are charged, and become text, when they arrive, whether or not the client
    reads.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        on_token: Callable[[], None],
        record: AnswerRecord,
    ) -> None:
        self._choices, self._on_token, self._record = choices, on_token, record
        self._pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        self._unread = 0
        self._open: dict[int, OpenStream] = {}  # by index of the choice
        self._ended: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._waits_since = self._loop.time()
        self._timer = self._loop.call_later(KEEP_ALIVE_S, self._keep_alive)

    def open(
        self, stream: Open, choice: Choice, sampling: Sampling, delivered: Delivered
    ) -> None:
        on_item = partial(self._arrived, choice)
        self._open[choice.index] = stream(choice.prompt, sampling, delivered, on_item)

    async def next(self) -> Piece | None:
        """Return the next piece; None if none has arrived for ``KEEP_ALIVE_S``."""
        self._waits_since = self._loop.time()
        piece = await self._pieces.get()
        if isinstance(piece, Exception):
            raise piece
        if piece is not None:
            self._unread -= _cost(piece)
        return piece

    def close(self) -> None:
        """End all streams that are open."""
        self._timer.cancel()
        for index in list(self._open):
            self._close(index, asyncio.CancelledError())

    def _close(self, index: int, error: BaseException | None) -> None:
        if (stream := self._open.pop(index, None)) is not None:
            stream.close(error)

    def _arrived(self, choice: Choice, item: Item) -> None:
        index, failed = choice.index, None
        if index in self._ended:
            return
        try:
            piece = self._made(choice, item)
            self._pieces.put_nowait(piece)
        except Exception as error:
            failed = error
            self._pieces.put_nowait(error)
        if failed is not None or piece.finish:
            self._ended.add(index)
            # Close the stream later, because it is delivering its items now.
            self._loop.call_soon(self._close, index, failed)

    def _made(self, choice: Choice, item: Item) -> Piece:
        if isinstance(item, ServeError):
            raise item
        if isinstance(item, Cut):
            if not any(each.made for each in self._choices):
                raise item.error
            return _cut(choice)
        if not choice.is_prompt_only:
            self._on_token()
        if (stream := self._open.get(choice.index)) is not None:
            self._note_noise(choice.index, stream.noise)
        piece = _piece(choice, item)
        self._unread += _cost(piece)
        if self._unread > MAX_UNREAD:
            while not self._pieces.empty():
                self._pieces.get_nowait()
            raise SlowClientError(
                "the client reads more slowly than tokens are generated, and too many "
                "tokens are waiting; read faster, or request less"
            )
        return piece

    def _note_noise(self, index: int, noise: str | None) -> None:
        noises = self._record.drawn.noise
        if noise is not None and noise != noises.get(index):
            noises[index] = noise
            self._record.keep()

    def _keep_alive(self) -> None:
        now = self._loop.time()
        if now - self._waits_since >= KEEP_ALIVE_S:
            self._waits_since = now
            if self._pieces.empty():
                self._pieces.put_nowait(None)
        again_at = self._waits_since + KEEP_ALIVE_S
        self._timer = self._loop.call_at(again_at, self._keep_alive)


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
