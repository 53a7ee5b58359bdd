"""OpenAI-compatible routes of models that generate text."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from multiworld.errors import InvalidRequestError, wrong_field
from multiworld.serve.gateway.admission.authenticator import AdmittedRequest
from multiworld.serve.gateway.http.body_budget import Reservation
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_responses import (
    json_response,
    openai_error_response,
    respond,
)
from multiworld.serve.gateway.http.request_body import Body, model_named_in, off_loop
from multiworld.serve.gateway.openai import schemas
from multiworld.serve.gateway.openai.chat_messages import for_template
from multiworld.serve.gateway.openai.completion_answers import events, whole
from multiworld.serve.gateway.openai.completions import chat_of, completion_of
from multiworld.serve.gateway.openai.preparation import (
    Ready,
    ServedModel,
    prepare_chat,
    prepare_completion,
    served_model,
    timed,
)
from multiworld.serve.gateway.openai.request_fields import (
    DetokenizeBody,
    TokenizeBody,
    decoded,
)
from multiworld.serve.gateway.openai.request_lifecycle import Form, answered
from multiworld.serve.text.tokenizer import bytes_of

OPENAI = Form(whole, events, openai_error_response)


def add_generation(app: FastAPI, gateway: Gateway) -> None:
    app.state.schemas = schemas.schemas()

    @app.post("/v1/chat/completions", tags=["openai"], openapi_extra=schemas.CHAT)
    async def chat(request: Request) -> Response:
        """Generate the next message of a chat.

        Fields are those of OpenAI's API, and those that vLLM adds for sampling.
        """
        return await answered(gateway, request, _read_chat, OPENAI)

    @app.post("/v1/completions", tags=["openai"], openapi_extra=schemas.COMPLETION)
    async def completions(request: Request) -> Response:
        """Continue prompts, given as text or as token ids."""
        return await answered(gateway, request, _read_completion, OPENAI)

    @app.post("/tokenize", tags=["openai"], openapi_extra=schemas.TOKENIZE)
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a prompt or of the messages of a chat."""
        return await _tool(gateway, request, _answer_tokenize)

    @app.post("/detokenize", tags=["openai"], openapi_extra=schemas.DETOKENIZE)
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return await _tool(gateway, request, _answer_detokenize)


async def _read_chat(
    gateway: Gateway, admitted: AdmittedRequest, request: Request, body: Body
) -> Ready:
    parse = partial(chat_of, body, is_strict=gateway.is_strict)
    asked, wanted = await off_loop(len(body), parse)
    return await prepare_chat(gateway, admitted, asked, timed(wanted, request))


async def _read_completion(
    gateway: Gateway, admitted: AdmittedRequest, request: Request, body: Body
) -> Ready:
    parse = partial(completion_of, body, is_strict=gateway.is_strict)
    asked, wanted = await off_loop(len(body), parse)
    return await prepare_completion(gateway, admitted, asked, timed(wanted, request))


# Tokens.


_tokenize_bodies = msgspec.json.Decoder(TokenizeBody)
_detokenize_bodies = msgspec.json.Decoder(DetokenizeBody)


async def _answer_tokenize(
    gateway: Gateway, admitted: AdmittedRequest, body: Body
) -> Response:
    parse = partial(decoded, body, _tokenize_bodies)
    parsed: TokenizeBody = await off_loop(len(body), parse)
    if parsed.messages is not None:
        parsed.messages = for_template(parsed.messages)
    elif parsed.prompt is None:
        raise InvalidRequestError("give prompt or messages", param="prompt")
    served = await served_model(gateway, admitted, parsed.model)
    size = bytes_of((parsed.messages, parsed.prompt))
    served.tokenizer.check_length(size, served.longest)
    return await _encoded(gateway, admitted, size, partial(_tokenize, parsed, served))


async def _answer_detokenize(
    gateway: Gateway, admitted: AdmittedRequest, body: Body
) -> Response:
    parse = partial(decoded, body, _detokenize_bodies)
    parsed: DetokenizeBody = await off_loop(len(body), parse)
    served = await served_model(gateway, admitted, parsed.model)
    count = len(parsed.tokens)
    if count > served.longest:
        rule = f"has {count} tokens; this model takes at most {served.longest}"
        raise wrong_field("tokens", rule)
    call = partial(_detokenize, parsed, served)
    return await _encoded(gateway, admitted, count, call)


async def _encoded(
    gateway: Gateway,
    admitted: AdmittedRequest,
    size: int,
    call: Callable[[], dict[str, Any]],
) -> Response:
    """Answer with what the tokenizer returns, in the tenant's turn."""
    work = gateway.encoding.submit(admitted.tenant.share, 1.0 + size, call)
    return json_response(await asyncio.wrap_future(work))


async def _tool(
    gateway: Gateway,
    request: Request,
    answer: Callable[[Gateway, AdmittedRequest, Body], Awaitable[Response]],
) -> Response:
    async def handle(admitted: AdmittedRequest, reservation: Reservation) -> Response:
        body = await gateway.read_body(request, admitted, reservation)
        admitted.model = model_named_in(body)
        try:
            return await answer(gateway, admitted, body)
        except InvalidRequestError:
            gateway.check_known(admitted)
            raise

    return await respond(gateway, request, "", handle, openai_error_response)


def _tokenize(asked: TokenizeBody, served: ServedModel) -> dict[str, Any]:
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
    else:
        assert asked.prompt is not None
        tokens = tokenizer.encode(asked.prompt, has_special=asked.add_special_tokens)
    found = {"count": len(tokens), "max_model_len": served.longest, "tokens": tokens}
    if asked.return_token_strs:
        found["token_strs"] = [tokenizer.piece(token) for token in tokens]
    return found


def _detokenize(asked: DetokenizeBody, served: ServedModel) -> dict[str, Any]:
    vocabulary = served.generation.vocabulary
    if any(not 0 <= token < vocabulary for token in asked.tokens):
        raise InvalidRequestError(
            f"tokens must be from 0 to {vocabulary - 1}",
            param="tokens",
            code="invalid_value",
        )
    return {"prompt": served.tokenizer.decode(asked.tokens, skips_special=False)}
