"""OpenAI-compatible routes of models that generate text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
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
from multiworld.serve.gateway.openai.request_fields import decoded
from multiworld.serve.gateway.openai.request_lifecycle import Form, answered
from multiworld.serve.text.tokenizer import bytes_of

OPENAI = Form(whole, events, openai_error_response)


def add_generation(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/chat/completions", tags=["openai"])
    async def chat(request: Request) -> Response:
        """Generate the next message of a chat.

        Fields are those of OpenAI's API, and those that vLLM adds for sampling.
        """
        return await answered(gateway, request, _read_chat, OPENAI)

    @app.post("/v1/completions", tags=["openai"])
    async def completions(request: Request) -> Response:
        """Continue prompts, given as text or as token ids."""
        return await answered(gateway, request, _read_completion, OPENAI)

    @app.post("/tokenize", tags=["openai"])
    async def tokenize(request: Request) -> Response:
        """Return the tokens of a prompt or of the messages of a chat."""
        return await _tool(gateway, request, _tokenize)

    @app.post("/detokenize", tags=["openai"])
    async def detokenize(request: Request) -> Response:
        """Return the text of tokens."""
        return await _tool(gateway, request, _detokenize)


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
    answer: Callable[[_Tool, ServedModel], dict[str, Any]],
) -> Response:
    async def handle(admitted: AdmittedRequest, reservation: Reservation) -> Response:
        body = await gateway.read_body(request, admitted, reservation)
        admitted.model = model_named_in(body)
        parsed: _Tool = await off_loop(len(body), partial(decoded, body, _tools))
        if parsed.messages is not None:
            parsed.messages = for_template(parsed.messages)
        served = await served_model(gateway, admitted, parsed.model)
        given = bytes_of((parsed.messages, parsed.prompt))
        served.tokenizer.check_length(given, served.longest)
        tokens = len(parsed.tokens or ())
        if tokens > served.longest:
            rule = f"has {tokens} tokens; this model takes at most {served.longest}"
            raise wrong_field("tokens", rule)
        call = partial(answer, parsed, served)
        cost = 1.0 + given + tokens
        work = gateway.encoding.submit(admitted.tenant.share, cost, call)
        return json_response(await asyncio.wrap_future(work))

    return await respond(gateway, request, "", handle, openai_error_response)


def _tokenize(asked: _Tool, served: ServedModel) -> dict[str, Any]:
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


def _detokenize(asked: _Tool, served: ServedModel) -> dict[str, Any]:
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
