"""OpenAI's routes for generated text, and vLLM's for its tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from multiworld.errors import InvalidRequestError, wrong_field
from multiworld.serve.gateway.http.calls import AdmittedCall
from multiworld.serve.gateway.http.http_responses import json_response
from multiworld.serve.gateway.http.request_body import Body
from multiworld.serve.gateway.openai.chat_messages import for_template
from multiworld.serve.gateway.openai.completion_answers import OPENAI
from multiworld.serve.gateway.openai.kept_streams import events_behind
from multiworld.serve.gateway.openai.preparation import (
    CHAT,
    TEXT,
    CompletionKind,
    ServedModel,
    prepared,
    served_model,
)
from multiworld.serve.gateway.openai.request_fields import (
    DetokenizeBody,
    TokenizeBody,
    decoded_with_ignored,
)
from multiworld.serve.gateway.openai.request_lifecycle import (
    answered,
    begin_generation,
    with_ignored,
)
from multiworld.serve.text.tokenizer import bytes_of


async def chat(call: AdmittedCall) -> Response:
    """Generate the next message of a chat.

    Takes the fields of OpenAI's API, and vLLM's additional sampling fields.
    """
    return await _completed(call, CHAT)


async def completions(call: AdmittedCall) -> Response:
    """Continue prompts, given as text or as token ids."""
    return await _completed(call, TEXT)


async def _completed(call: AdmittedCall, kind: CompletionKind) -> Response:
    # Another gateway began this request, and its stream is kept: answer with the
    # stream's events.
    if call.record.stream:
        return await events_behind(call, call.record.stream, 0)
    parse = partial(kind.parse, is_strict=call.gateway.is_strict)
    asked, wanted = await call.parsed(parse)
    ready = await prepared(call, kind, asked, wanted)
    # Sending the response reads ``pieces``; generation begins only then.
    pieces = begin_generation(call, ready)
    return await answered(call, ready, pieces, OPENAI)


# Tokens.


_tokenize_bodies = msgspec.json.Decoder(TokenizeBody)
_detokenize_bodies = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(call: AdmittedCall) -> Response:
    """Return the tokens of a prompt or of the messages of a chat."""
    parse = partial(_tokenize_request, is_strict=call.gateway.is_strict)
    asked, ignored = await call.parsed(parse)
    served = await served_model(call, asked.model)
    size = bytes_of((asked.messages, asked.prompt))
    served.tokenizer.check_length(size, served.longest)
    encode = partial(_tokenize, asked, served)
    found = await call.gateway.encoded(call.tenant.share, size, encode)
    return with_ignored(json_response(found), asked.model, ignored)


async def detokenize(call: AdmittedCall) -> Response:
    """Return the text of tokens."""
    is_strict = call.gateway.is_strict
    parse = partial(
        decoded_with_ignored, decoder=_detokenize_bodies, is_strict=is_strict
    )
    asked, ignored = await call.parsed(parse)
    served = await served_model(call, asked.model)
    count = len(asked.tokens)
    if count > served.longest:
        rule = f"has {count} tokens; this model takes at most {served.longest}"
        raise wrong_field("tokens", rule)
    decode = partial(_detokenize, asked, served)
    found = await call.gateway.encoded(call.tenant.share, count, decode)
    return with_ignored(json_response(found), asked.model, ignored)


def _tokenize_request(
    body: Body, *, is_strict: bool
) -> tuple[TokenizeBody, tuple[str, ...]]:
    asked: TokenizeBody
    asked, ignored = decoded_with_ignored(body, _tokenize_bodies, is_strict=is_strict)
    if asked.messages is not None:
        asked.messages = for_template(asked.messages)
    elif asked.prompt is None:
        raise InvalidRequestError("give prompt or messages", param="prompt")
    return asked, ignored


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
        raise wrong_field("tokens", f"must be from 0 to {vocabulary - 1}")
    return {"prompt": served.tokenizer.decode(asked.tokens, skips_special=False)}
