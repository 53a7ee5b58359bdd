"""OpenAI-compatible routes of models that generate text. Shell."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from multiworld.errors import InvalidRequestError, ServeError
from multiworld.serve.gateway.body_budget import Reservation
from multiworld.serve.gateway.choices import (
    Choice,
    Piece,
    chat_logprobs,
    generate,
    sampling_of,
    text_logprobs,
)
from multiworld.serve.gateway.completions import (
    MAX_CHOICES,
    Wanted,
    chat_of,
    check_fits,
    check_messages,
    completion_of,
    decoded,
    prompts_of,
)
from multiworld.serve.gateway.gateway import Gateway
from multiworld.serve.gateway.request_body import Body, while_connected
from multiworld.serve.gateway.responses import (
    CLIENT_CLOSED,
    json_response,
    openai_error,
    openai_error_response,
    timeout_of,
)
from multiworld.serve.generation.limits import longest_of
from multiworld.serve.generation.text import GrowingText, Tokenizer
from multiworld.serve.spec.stage import Model
from multiworld.serve.tenants.authenticator import AdmittedRequest
from multiworld.serve.transport.generation_messages import TokenItem

logger = logging.getLogger("multiworld.serve")

BROKEN = "internal error of the gateway; see its log"
"""Error text for a bug."""

KEEP_ALIVE_S = 10.0
"""Seconds without a token after which a streamed answer gets a comment."""

DONE = b"data: [DONE]\n\n"
"""The end of a streamed answer."""

SSE = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a streamed answer, so that no proxy holds it back."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that was checked.

    Attributes:
        wanted: What it wants.
        served: Name of the model that serves it.
        tokenizer: Tokenizer of the model.
        choices: Its choices.
        is_chat: Whether it is a chat completion.
        echoes: Text that each choice begins with.
        id: Id of the answer.
        made_at: Time of the answer, in seconds since the epoch.
    """

    wanted: Wanted
    served: str
    tokenizer: Tokenizer
    choices: tuple[Choice, ...]
    is_chat: bool
    echoes: tuple[str, ...]
    id: str
    made_at: int


def add_generation(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes to an application.

    Args:
        app: The application.
        gateway: The gateway.
    """

    @app.post("/v1/chat/completions", tags=["openai"])
    async def chat(request: Request) -> Response:
        """Generate the next message of a chat.

        Fields are those of OpenAI's API, and those that vLLM adds for sampling.
        """
        return await _answered(gateway, request, _read_chat)

    @app.post("/v1/completions", tags=["openai"])
    async def completions(request: Request) -> Response:
        """Continue texts, or lists of token ids."""
        return await _answered(gateway, request, _read_completion)

    @app.post("/tokenize", tags=["openai"])
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a prompt or of the messages of a chat."""
        return await _tool(gateway, request, _tokenize)

    @app.post("/detokenize", tags=["openai"])
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return await _tool(gateway, request, _detokenize)


# Reading.

Reader = Callable[[Gateway, AdmittedRequest, Request, Body], Awaitable[Ready]]


async def _model(
    gateway: Gateway, admitted: AdmittedRequest, name: str
) -> tuple[Model, Tokenizer, int]:
    """Return a model that generates text, its tokenizer, and its longest text."""
    version, model = gateway.model(name, None, admitted.tenant)
    if model.generation is None:
        raise InvalidRequestError(
            f"model {name!r} generates no text; use /v1/embeddings or /v2",
            param="model",
        )
    tokenizer: Tokenizer = await gateway.text(name, version, model)
    spec = gateway.specs[name, version].generation
    assert spec is not None
    return model, tokenizer, longest_of(spec, model.generation)


async def _read_chat(
    gateway: Gateway, admitted: AdmittedRequest, request: Request, body: Body
) -> Ready:
    asked, wanted = chat_of(body)
    model, tokenizer, longest = await _model(gateway, admitted, asked.model)
    tokenizer.check_length(_characters(asked.messages), longest)
    tokens = await asyncio.to_thread(
        tokenizer.chat,
        asked.messages,
        begins_answer=asked.add_generation_prompt is not False,
    )
    return _ready(gateway, admitted, wanted, model, tokenizer, [tokens], longest, True)


async def _read_completion(
    gateway: Gateway, admitted: AdmittedRequest, request: Request, body: Body
) -> Ready:
    asked, wanted = completion_of(body)
    model, tokenizer, longest = await _model(gateway, admitted, asked.model)
    prompts = prompts_of(asked.prompt)
    _check_choices(len(prompts), wanted.n)
    has_special = asked.add_special_tokens is not False
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer.check_length(len(prompt), longest)
    tokens = [
        await asyncio.to_thread(tokenizer.encode, one, has_special=has_special)
        if isinstance(one, str)
        else one
        for one in prompts
    ]
    return _ready(gateway, admitted, wanted, model, tokenizer, tokens, longest, False)


def _check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompts times n must be at most {MAX_CHOICES}",
            param="n",
            code="invalid_value",
        )


def _characters(messages: list[dict[str, Any]]) -> int:
    return sum(len(message.get("content") or "") for message in messages)


def _ready(
    gateway: Gateway,
    admitted: AdmittedRequest,
    wanted: Wanted,
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    longest: int,
    is_chat: bool,
) -> Ready:
    assert model.generation is not None
    sampling = wanted.sampling
    for tokens in prompts:
        low, high = min(tokens, default=0), max(tokens, default=0)
        if low < 0 or high >= model.generation.vocabulary:
            raise InvalidRequestError(
                f"prompt has tokens from {low} to {high}; the vocabulary has 0 to "
                f"{model.generation.vocabulary - 1}",
                param="prompt",
                code="invalid_value",
            )
        sampling = check_fits(
            len(tokens),
            wanted.sampling,
            longest,
            model.generation.vocabulary,
            "messages" if is_chat else "prompt",
        )
    choices = tuple(
        Choice(
            index,
            prompts[index // wanted.n],
            GrowingText(
                tokenizer,
                wanted.stop,
                skips_special=wanted.skips_special,
                min_tokens=wanted.sampling.min_tokens,
            ),
        )
        for index in range(len(prompts) * wanted.n)
    )
    admitted.rows += len(choices)
    echoes = tuple(
        tokenizer.decode(choice.prompt) if wanted.echo else "" for choice in choices
    )
    if len(prompts) == 1:
        wanted = replace(wanted, sampling=sampling)
    prefix = "chatcmpl-" if is_chat else "cmpl-"
    return Ready(
        wanted,
        gateway.route(wanted.model, admitted.tenant),
        tokenizer,
        choices,
        is_chat,
        echoes,
        prefix + secrets.token_hex(12),
        int(time.time()),
    )


# Answering.


async def _answered(gateway: Gateway, request: Request, read: Reader) -> Response:
    """Admit a request, answer it, and count it, whatever its outcome.

    Cancellation: Safe. Its streams end, and it is counted as ``CLIENT_CLOSED``.
    """
    try:
        admitted = gateway.authenticator.admit(request.headers)
    except ServeError as error:
        response = openai_error_response(error)
        gateway.counts.add("unknown", "", response.status_code, 0.0)
        return response
    reservation = Reservation(gateway.bodies)
    finished = _Finished(gateway, admitted, reservation)
    is_streaming = False
    try:
        body = await gateway.read_body(request, admitted, reservation)
        ready = await read(gateway, admitted, request, body)
        finished.model = ready.wanted.model
        del body
        reservation.release()  # a stream may take long
        limit_s = timeout_of(request, ready.wanted.timeout_s)
        pieces = generate(
            gateway.streams,
            ready.served,
            ready.choices,
            [
                sampling_of(ready.wanted.sampling, c.index % ready.wanted.n)
                for c in ready.choices
            ],
            limit_s,
        )
        if ready.wanted.is_streamed:
            is_streaming = True
            events = _events(ready, pieces, finished)
            return StreamingResponse(
                events, headers=SSE, media_type="text/event-stream"
            )
        response = await while_connected(request, _whole(ready, pieces))
        finished.status = response.status_code
        return response
    except ServeError as error:
        response = openai_error_response(error)
        finished.status = response.status_code
        return response
    except Exception:
        logger.exception("gateway failed to handle a request")
        finished.status = 500
        return openai_error_response(ServeError(BROKEN))
    finally:
        if not is_streaming:
            finished.end()


@dataclass(slots=True)
class _Finished:
    """Counts a request once it has ended."""

    gateway: Gateway
    admitted: AdmittedRequest
    reservation: Reservation
    model: str = ""
    status: int = CLIENT_CLOSED

    def end(self) -> None:
        """Count it, and free what it holds."""
        self.reservation.release()
        gateway, admitted = self.gateway, self.admitted
        is_known = gateway.may_use(admitted.tenant, self.model)
        label = self.model if is_known else "unknown"
        gateway.authenticator.finish(admitted, label, self.status)
        took_s = gateway.authenticator.clock() - admitted.started_at
        gateway.counts.add(label, admitted.tenant.name, self.status, took_s)


async def _whole(ready: Ready, pieces: AsyncGenerator[Piece]) -> Response:
    texts = list(ready.echoes)
    async for piece in pieces:
        texts[piece.choice.index] += piece.text
    if ready.wanted.sampling.logprobs is not None:  # rendering takes long
        return await asyncio.to_thread(_rendered, ready, texts)
    return _rendered(ready, texts)


def _rendered(ready: Ready, texts: Sequence[str]) -> Response:
    found = [
        _choice(ready, choice, text, choice.items, choice.finish)
        for choice, text in zip(ready.choices, texts, strict=True)
    ]
    kind = "chat.completion" if ready.is_chat else "text_completion"
    return json_response(
        {**_head(ready, kind), "choices": found, "usage": _usage(ready)}
    )


def _head(ready: Ready, kind: str) -> dict[str, Any]:
    return {
        "id": ready.id,
        "object": kind,
        "created": ready.made_at,
        "model": ready.wanted.model,
    }


def _usage(ready: Ready) -> dict[str, int]:
    prompts = {id(choice.prompt): len(choice.prompt) for choice in ready.choices}
    made = sum(len(choice.items) for choice in ready.choices)
    asked = sum(prompts.values())
    return {
        "prompt_tokens": asked,
        "completion_tokens": made,
        "total_tokens": asked + made,
    }


def _choice(
    ready: Ready,
    choice: Choice,
    text: str,
    items: Sequence[TokenItem],
    finish: str,
) -> dict[str, Any]:
    """Return a choice of an answer that is not streamed."""
    found: dict[str, Any] = {"index": choice.index, "finish_reason": finish or None}
    if ready.wanted.has_ids:
        found["token_ids"] = [item.token for item in items]
        found["prompt_token_ids"] = list(choice.prompt)
    has_logprobs = ready.wanted.sampling.logprobs is not None
    if ready.is_chat:
        found["message"] = {"role": "assistant", "content": text}
        found["logprobs"] = (
            chat_logprobs(ready.tokenizer, items) if has_logprobs else None
        )
    else:
        found["text"] = text
        found["logprobs"] = (
            text_logprobs(
                ready.tokenizer,
                items,
                len(ready.echoes[choice.index]),
                choice.prompt if ready.wanted.echo else (),
            )
            if has_logprobs
            else None
        )
    return found


# Streaming.


async def _events(
    ready: Ready, pieces: AsyncGenerator[Piece], finished: _Finished
) -> AsyncGenerator[bytes]:
    """Yield a streamed answer as server-sent events.

    Cancellation: Safe. The streams end, and their replicas are told.
    """
    try:
        finished.status = CLIENT_CLOSED
        for choice in ready.choices:
            if ready.is_chat:
                yield _event(ready, choice, {"role": "assistant", "content": ""})
            elif ready.echoes[choice.index]:
                yield _event(ready, choice, ready.echoes[choice.index])
        async for piece in _kept_alive(pieces):
            if piece is None:
                yield b": still generating\n\n"
                continue
            yield _piece_event(ready, piece)
        if ready.wanted.has_usage:
            kind = "chat.completion.chunk" if ready.is_chat else "text_completion"
            yield _data({**_head(ready, kind), "choices": [], "usage": _usage(ready)})
        finished.status = 200
    except ServeError as error:
        finished.status = error.status
        yield _data({"error": openai_error(error)})
    finally:
        finished.end()
    yield DONE


async def _kept_alive(pieces: AsyncGenerator[Piece]) -> AsyncGenerator[Piece | None]:
    """Yield pieces, and None whenever none came for a while."""
    waiting: asyncio.Future[Piece] | None = None
    try:
        while True:
            if waiting is None:
                waiting = asyncio.ensure_future(anext(pieces))
            done, _ = await asyncio.wait([waiting], timeout=KEEP_ALIVE_S)
            if not done:
                yield None
                continue
            try:
                piece = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield piece
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await pieces.aclose()


def _piece_event(ready: Ready, piece: Piece) -> bytes:
    shown: Any = {"content": piece.text} if ready.is_chat else piece.text
    if ready.is_chat and not piece.text and piece.finish:
        shown = {}
    return _event(ready, piece.choice, shown, piece)


def _event(
    ready: Ready,
    choice: Choice,
    delta: Any,
    piece: Piece | None = None,
) -> bytes:
    item = None if piece is None else piece.item
    finish = "" if piece is None else piece.finish
    found: dict[str, Any] = {"index": choice.index}
    found["delta" if ready.is_chat else "text"] = delta
    logprobs = None
    if piece is not None and item is not None and item.logprob is not None:
        offset = len(ready.echoes[choice.index]) + piece.offset
        logprobs = (
            chat_logprobs(ready.tokenizer, [item])
            if ready.is_chat
            else text_logprobs(ready.tokenizer, [item], offset)
        )
    found |= {"logprobs": logprobs, "finish_reason": finish or None}
    if ready.wanted.has_ids:
        found["token_ids"] = [] if item is None else [item.token]
        if item is None:
            found["prompt_token_ids"] = list(choice.prompt)
    kind = "chat.completion.chunk" if ready.is_chat else "text_completion"
    chunk = {**_head(ready, kind), "choices": [found]}
    if ready.wanted.has_usage:
        chunk["usage"] = None
    return _data(chunk)


def _data(content: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


# Tokens.


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


_tools = msgspec.json.Decoder(_Tool)


async def _tool(
    gateway: Gateway,
    request: Request,
    answer: Callable[[_Tool, Tokenizer, int, int], dict[str, Any]],
) -> Response:
    try:
        admitted = gateway.authenticator.admit(request.headers)
    except ServeError as error:
        return openai_error_response(error)
    reservation = Reservation(gateway.bodies)
    finished = _Finished(gateway, admitted, reservation)
    try:
        body = await gateway.read_body(request, admitted, reservation)
        asked: _Tool = decoded(body, _tools)
        check_messages(asked.messages or [])
        finished.model = asked.model
        model, tokenizer, longest = await _model(gateway, admitted, asked.model)
        assert model.generation is not None
        given = _characters(asked.messages or []) + len(asked.prompt or "")
        tokenizer.check_length(given, longest)
        vocabulary = model.generation.vocabulary
        found = await asyncio.to_thread(answer, asked, tokenizer, longest, vocabulary)
        finished.status = 200
        return json_response(found)
    except ServeError as error:
        finished.status = error.status
        return openai_error_response(error)
    except Exception:
        logger.exception("gateway failed to handle a request")
        finished.status = 500
        return openai_error_response(ServeError(BROKEN))
    finally:
        finished.end()


def _tokenize(
    asked: _Tool, tokenizer: Tokenizer, longest: int, vocabulary: int
) -> dict[str, Any]:
    if asked.messages is not None:
        tokens = tokenizer.chat(
            asked.messages, begins_answer=asked.add_generation_prompt
        )
    elif asked.prompt is not None:
        tokens = tokenizer.encode(asked.prompt, has_special=asked.add_special_tokens)
    else:
        raise InvalidRequestError("give prompt or messages", param="prompt")
    found = {"count": len(tokens), "max_model_len": longest, "tokens": tokens}
    if asked.return_token_strs:
        found["token_strs"] = [tokenizer.piece(token) for token in tokens]
    return found


def _detokenize(
    asked: _Tool, tokenizer: Tokenizer, longest: int, vocabulary: int
) -> dict[str, Any]:
    if asked.tokens is None:
        raise InvalidRequestError("give tokens", param="tokens")
    if any(not 0 <= token < vocabulary for token in asked.tokens):
        raise InvalidRequestError(
            f"tokens must be from 0 to {vocabulary - 1}",
            param="tokens",
            code="invalid_value",
        )
    return {"prompt": tokenizer.decode(asked.tokens, skips_special=False)}
