"""OpenAI-compatible routes of models that generate text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from multiworld.errors import (
    InvalidRequestError,
    RequestPoisonedError,
    ServeError,
)
from multiworld.serve.gateway.body_budget import Reservation
from multiworld.serve.gateway.gateway import Gateway
from multiworld.serve.gateway.http_responses import (
    EventStream,
    json_response,
    openai_error_response,
    respond,
    timeout_of,
)
from multiworld.serve.gateway.request_body import (
    Body,
    model_named_in,
    while_connected,
)
from multiworld.serve.generation.api.chat_messages import characters_of, for_template
from multiworld.serve.generation.api.choices import (
    Choice,
    Piece,
    digest_of,
    generate,
    sampling_of,
)
from multiworld.serve.generation.api.completion_answers import Ready, events, whole
from multiworld.serve.generation.api.completions import (
    MAX_CHOICES,
    CompletionBody,
    Structure,
    Wanted,
    chat_of,
    check_fits,
    completion_of,
    decoded,
    prompts_of,
)
from multiworld.serve.generation.api.tools import BEGIN, END, Family
from multiworld.serve.generation.gateway.stream import TimeLimits
from multiworld.serve.generation.limits import longest_of
from multiworld.serve.generation.tokenizer import GrowingText, Tokenizer
from multiworld.serve.spec.stage import Generation
from multiworld.serve.tenants.authenticator import AdmittedRequest

MAX_SCORES = 200_000
"""Maximum number of prompt logprobs in one answer; each takes about 50 bytes of it."""


def add_generation(app: FastAPI, gateway: Gateway) -> None:
    """Add the routes to an application."""

    @app.post("/v1/chat/completions", tags=["openai"])
    async def chat(request: Request) -> Response:
        """Generate the next message of a chat.

        Fields are those of OpenAI's API, and those that vLLM adds for sampling.
        """
        return await answered(gateway, request, _read_chat)

    @app.post("/v1/completions", tags=["openai"])
    async def completions(request: Request) -> Response:
        """Continue prompts, given as text or as token ids."""
        return await answered(gateway, request, _read_completion)

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


@dataclass(frozen=True, slots=True)
class _Served:
    """A model that generates text; ``longest`` is the maximum tokens of a sequence."""

    generation: Generation
    tokenizer: Tokenizer
    version: str
    longest: int
    limits: TimeLimits
    family: Family | None
    has_controls: bool


async def _served(gateway: Gateway, admitted: AdmittedRequest, name: str) -> _Served:
    version, model = gateway.model(name, None, admitted.tenant)
    if model.generation is None:
        raise InvalidRequestError(
            f"model {name!r} generates no text; use /v1/embeddings or /v2",
            param="model",
        )
    tokenizer: Tokenizer = await gateway.text(name, version, model)
    spec = gateway.specs[name, version].generation
    assert spec is not None
    return _Served(
        model.generation,
        tokenizer,
        version,
        longest_of(spec, model.generation),
        TimeLimits(spec.first_token_s, spec.between_tokens_s),
        spec.tool_call_parser,
        spec.control_tokens_in_messages,
    )


async def _read_chat(
    gateway: Gateway, admitted: AdmittedRequest, request: Request, body: Body
) -> Ready:
    asked, wanted = chat_of(body)
    served = await _served(gateway, admitted, asked.model)
    served.tokenizer.check_length(
        characters_of(asked.messages), served.longest, "messages"
    )
    tokens = await asyncio.to_thread(
        served.tokenizer.chat,
        asked.messages,
        served.longest,
        begins_answer=asked.add_generation_prompt is not False,
        tools=_shown_tools(wanted),
        options=asked.chat_template_kwargs or {},
        effort=asked.reasoning_effort,
        has_controls=served.has_controls,
    )
    return await _ready(gateway, admitted, wanted, served, [tokens], "chatcmpl-")


async def _read_completion(
    gateway: Gateway, admitted: AdmittedRequest, request: Request, body: Body
) -> Ready:
    asked, wanted = completion_of(body)
    return await read_completion(gateway, admitted, asked, wanted)


async def read_completion(
    gateway: Gateway, admitted: AdmittedRequest, asked: CompletionBody, wanted: Wanted
) -> Ready:
    """Check a completion request against its model."""
    served = await _served(gateway, admitted, asked.model)
    tokenizer = served.tokenizer
    prompts = prompts_of(asked.prompt)
    _check_choices(len(prompts), wanted.n)
    has_special = asked.add_special_tokens is not False
    for prompt in prompts:
        if isinstance(prompt, str):
            tokenizer.check_length(len(prompt), served.longest)
    tokens = [
        await asyncio.to_thread(tokenizer.encode, one, has_special=has_special)
        if isinstance(one, str)
        else one
        for one in prompts
    ]
    return await _ready(gateway, admitted, wanted, served, tokens, "cmpl-")


def _shown_tools(wanted: Wanted) -> list[dict[str, Any]]:
    """Return the tools of a request as its chat template expects them."""
    if wanted.calling is None:
        return []
    found: list[dict[str, Any]] = msgspec.to_builtins(wanted.calling.tools)
    for tool in found:
        tool["function"] = {k: v for k, v in tool["function"].items() if v is not None}
    return found


def _check_choices(prompts: int, n: int) -> None:
    if prompts * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"prompts times n must be at most {MAX_CHOICES}",
            param="n",
            code="invalid_value",
        )


def _check_scores(prompts: Sequence[Sequence[int]], wanted: Wanted) -> None:
    """Check the number of prompt logprobs in an answer."""
    per_token = wanted.sampling.prompt_logprobs
    if per_token is None:
        return
    scores = sum(map(len, prompts)) * wanted.n * (1 + per_token)
    if scores > MAX_SCORES:
        raise InvalidRequestError(
            f"echo with logprobs would return {scores} probabilities; at most "
            f"{MAX_SCORES} fit into one answer",
            param="logprobs",
            code="invalid_value",
        )


def _with_defaults(wanted: Wanted, generation: Generation) -> Wanted:
    """Use the model's own defaults for fields that the request does not give."""
    own = {k: v for k, v in generation.defaults.items() if k not in wanted.given}
    if not own:
        return wanted
    return replace(wanted, sampling=msgspec.structs.replace(wanted.sampling, **own))


def _strict(wanted: Wanted, served: _Served) -> Structure:
    """Return the structure of output whose tool calls must fit their schemas."""
    assert wanted.calling is not None
    token_id = served.tokenizer.fast.token_to_id
    begin, end = token_id(BEGIN), token_id(END)
    has_marks = served.family == "hermes" and begin is not None and end is not None
    if not has_marks or wanted.structure is not None or wanted.sampling.ignore_eos:
        raise InvalidRequestError(
            "strict tools are enforced with tool_choice required, or with a name; with "
            "auto, this model or this request does not allow it",
            param="tools",
            code="unsupported_value",
        )
    forms = wanted.calling.forms(is_strict=True)
    ends = served.generation.end_tokens
    return Structure("marked calls", (forms, begin, end, ends), "tools")


async def _ready(
    gateway: Gateway,
    admitted: AdmittedRequest,
    wanted: Wanted,
    served: _Served,
    prompts: Sequence[Sequence[int]],
    prefix: str,
) -> Ready:
    is_chat = prefix == "chatcmpl-"
    wanted = _with_defaults(wanted, served.generation)
    if wanted.calling is not None and wanted.calling.is_strict:
        wanted = replace(wanted, structure=_strict(wanted, served))
    if wanted.structure is not None:
        grammar = await asyncio.to_thread(wanted.structure.grammar)
        sampling = msgspec.structs.replace(wanted.sampling, grammar=grammar)
        wanted = replace(wanted, sampling=sampling)
    sampling, calling = wanted.sampling, wanted.calling
    if calling is not None and calling.is_free and served.family is None:
        raise InvalidRequestError(
            "this model has no tool_call_parser in its spec; name a tool or use "
            "tool_choice: required",
            param="tools",
            code="unsupported_value",
        )
    vocabulary, tokenizer = served.generation.vocabulary, served.tokenizer
    for tokens in prompts:
        low, high = min(tokens, default=0), max(tokens, default=0)
        if low < 0 or high >= vocabulary:
            raise InvalidRequestError(
                f"prompt has tokens from {low} to {high}; the vocabulary has 0 to "
                f"{vocabulary - 1}",
                param="prompt",
                code="invalid_value",
            )
        sampling = check_fits(
            len(tokens),
            wanted.sampling,
            served.longest,
            vocabulary,
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
            wanted.is_prompt_only,
        )
        for index in range(len(prompts) * wanted.n)
    )
    admitted.rows += len(choices)
    _check_scores(prompts, wanted)
    echoes = [""] * len(prompts)
    if wanted.echo:
        echoes = [await asyncio.to_thread(tokenizer.decode, one) for one in prompts]
    return Ready(
        replace(wanted, sampling=sampling),
        gateway.route(wanted.model, admitted.tenant),
        served.version,
        tokenizer,
        choices,
        is_chat,
        tuple(echoes[index // wanted.n] for index in range(len(choices))),
        prefix + secrets.token_hex(12),
        int(time.time()),
        served.limits,
        served.family,
    )


# Answering.


@dataclass(frozen=True, slots=True)
class Form:
    """The form of the answers of a route: whole, as events, and errors."""

    whole: Callable[[Ready, AsyncGenerator[Piece]], Coroutine[Any, Any, Response]]
    events: Callable[[Ready, AsyncGenerator[Piece]], AsyncGenerator[bytes]]
    error: Callable[[ServeError], Response]
    event_stream: type[EventStream] = EventStream


OPENAI = Form(whole, events, openai_error_response)


async def answered(
    gateway: Gateway, request: Request, read: Reader, form: Form = OPENAI
) -> Response:
    """Answer a request, at once or as a stream.

    Cancelling ends its streams and counts it as ``CLIENT_CLOSED``.
    """
    ready: Ready | None = None

    async def answer(admitted: AdmittedRequest, reservation: Reservation) -> Response:
        nonlocal ready
        body = await gateway.read_body(request, admitted, reservation)
        try:
            ready = await read(gateway, admitted, request, body)
        except ServeError:
            admitted.model = model_named_in(body)
            raise
        del body
        reservation.release()  # a stream may take long
        await gateway.check_poison(
            admitted, (ready.wanted.model, ready.version), partial(_digest, ready)
        )
        sampling, n = ready.wanted.sampling, ready.wanted.n
        prompts = ready.choices[::n]
        gateway.authenticator.count_prompt(
            admitted, sum(len(choice.prompt) for choice in prompts)
        )
        generated = generate(
            gateway.streams,
            ready.served,
            ready.choices,
            [sampling_of(sampling, choice.index % n) for choice in ready.choices],
            timeout_of(request, ready.wanted.timeout_s),
            ready.limits,
            admitted.tenant.share,
            ready.wanted.session,
            admitted.id,
        )
        pieces = _watched(gateway, admitted, ready, generated)
        if ready.wanted.is_streamed:
            gateway.streams.check_room(ready.served)  # the status can still report it
            return form.event_stream(form.events(ready, pieces))
        return await while_connected(request, form.whole(ready, pieces))

    def name() -> str:
        return "" if ready is None else ready.wanted.model

    return await respond(gateway, request, name, answer, form.error)


async def _watched(
    gateway: Gateway,
    admitted: AdmittedRequest,
    ready: Ready,
    pieces: AsyncGenerator[Piece],
) -> AsyncGenerator[Piece]:
    """Yield pieces; count their tokens for the tenant, and record poison."""
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                if not piece.choice.is_prompt_only:
                    gateway.authenticator.count_generated(admitted)
                yield piece
    except RequestPoisonedError:
        model_version = ready.wanted.model, ready.version
        gateway.found_poison(admitted.tenant, model_version, await _digest(ready))
        raise


async def _digest(ready: Ready) -> str:
    return digest_of(ready.choices, ready.wanted.sampling)


# Tokens.


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tokens: list[int] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool = False


_tools = msgspec.json.Decoder(_Tool)


async def _tool(
    gateway: Gateway,
    request: Request,
    answer: Callable[[_Tool, _Served], dict[str, Any]],
) -> Response:
    asked: _Tool | None = None

    async def handle(admitted: AdmittedRequest, reservation: Reservation) -> Response:
        nonlocal asked
        body = await gateway.read_body(request, admitted, reservation)
        admitted.model = model_named_in(body)
        asked = parsed = decoded(body, _tools)
        if parsed.messages is not None:
            parsed.messages = for_template(parsed.messages)
        served = await _served(gateway, admitted, parsed.model)
        given = characters_of(parsed.messages or []) + len(parsed.prompt or "")
        served.tokenizer.check_length(given, served.longest)
        return json_response(await asyncio.to_thread(answer, parsed, served))

    def name() -> str:
        return "" if asked is None else asked.model

    return await respond(gateway, request, name, handle, openai_error_response)


def _tokenize(asked: _Tool, served: _Served) -> dict[str, Any]:
    tokenizer = served.tokenizer
    if asked.messages is not None:
        tokens = tokenizer.chat(
            asked.messages,
            served.longest,
            begins_answer=asked.add_generation_prompt,
            options=asked.chat_template_kwargs or {},
            effort=asked.reasoning_effort,
            has_controls=served.has_controls,
        )
    elif asked.prompt is not None:
        tokens = tokenizer.encode(asked.prompt, has_special=asked.add_special_tokens)
    else:
        raise InvalidRequestError("give prompt or messages", param="prompt")
    found = {"count": len(tokens), "max_model_len": served.longest, "tokens": tokens}
    if asked.return_token_strs:
        found["token_strs"] = [tokenizer.piece(token) for token in tokens]
    return found


def _detokenize(asked: _Tool, served: _Served) -> dict[str, Any]:
    vocabulary = served.generation.vocabulary
    if asked.tokens is None:
        raise InvalidRequestError("give tokens", param="tokens")
    if any(not 0 <= token < vocabulary for token in asked.tokens):
        raise InvalidRequestError(
            f"tokens must be from 0 to {vocabulary - 1}",
            param="tokens",
            code="invalid_value",
        )
    return {"prompt": served.tokenizer.decode(asked.tokens, skips_special=False)}
