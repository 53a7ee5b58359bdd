"""Triton's routes ``generate`` and ``generate_stream``.

Fields are those of Triton's generate extension and of its vLLM backend.

https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_generate.html
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from multiworld.errors import InvalidRequestError, ServeError
from multiworld.serve.gateway.http import http_responses as responses
from multiworld.serve.gateway.http.calls import AdmittedCall
from multiworld.serve.gateway.http.request_body import Body
from multiworld.serve.gateway.openai.choices import Pieces
from multiworld.serve.gateway.openai.completion_requests import Wanted, wanted_of
from multiworld.serve.gateway.openai.preparation import (
    TEXT,
    Ready,
    prepared,
    version_of,
)
from multiworld.serve.gateway.openai.request_fields import (
    CompletionBody,
    GenerateBody,
    decoded,
    invalid,
)
from multiworld.serve.gateway.openai.request_lifecycle import (
    Form,
    answered,
    begin_generation,
)

# Parameter that removes the prompt from the answer, as in Triton's vLLM backend.
EXCLUDES = "exclude_input_in_output"


_bodies = msgspec.json.Decoder(GenerateBody)

# Fields of a text completion that a request cannot set.
FIXED = (
    *("model", "prompt", "n", "best_of", "echo", "stream", "stream_options"),
    *("logprobs", "return_token_ids"),  # the answer has no field for them
    "detach_s",  # the stream's events have no id to resume from
)


class _EventStream(responses.EventStream):
    last = b""

    @staticmethod
    def error_of(error: ServeError) -> Any:
        return responses.text_of(error)


async def generate(call: AdmittedCall) -> Response:
    """Continue a text, as defined by Triton's generate extension."""
    return await _generated(call, is_streamed=False)


async def generate_stream(call: AdmittedCall) -> Response:
    """Continue a text as a stream of events, as defined by Triton's extension."""
    return await _generated(call, is_streamed=True)


async def _generated(call: AdmittedCall, *, is_streamed: bool) -> Response:
    # Refuse an unknown model before the body is read, because the body may be long.
    version_of(call, call.name)
    given, asked, wanted = await call.parsed(partial(_parsed, call.name, is_streamed))
    ready = await prepared(call, TEXT, asked, wanted)
    ready = replace(ready, id=given.id)
    pieces = begin_generation(call, ready)
    return await answered(call, ready, pieces, TRITON)


def _parsed(
    name: str, is_streamed: bool, body: Body
) -> tuple[GenerateBody, CompletionBody, Wanted]:
    asked: GenerateBody = decoded(body, _bodies)
    given = dict(asked.parameters)
    is_excluded = given.pop(EXCLUDES, False)
    if not isinstance(is_excluded, bool):
        raise InvalidRequestError(
            f'{EXCLUDES!r} in "parameters" must be a boolean',
            param="parameters",
        )
    for field in FIXED:
        if field in given and field != "stream":
            raise InvalidRequestError(
                f'"parameters" has {field!r}, which this route does not take',
                param="parameters",
            )
    given.pop("stream", None)
    fields = {**given, "model": name, "prompt": asked.text_input}
    try:
        completion = msgspec.convert(fields, CompletionBody)
    except msgspec.ValidationError as error:
        raise invalid(error) from error
    wanted = wanted_of(completion)
    wanted = replace(wanted, is_streamed=is_streamed, echo=not is_excluded)
    return asked, completion, wanted


def _shown(ready: Ready, text: str) -> dict[str, Any]:
    head = {"id": ready.id} if ready.id else {}
    return {
        **head,
        "model_name": ready.wanted.model,
        "model_version": ready.served.version,
        "text_output": text,
    }


async def _whole(ready: Ready, pieces: Pieces) -> Response:
    text = "".join([piece.text async for piece in pieces if piece])
    return responses.json_response(_shown(ready, ready.echoes[0] + text))


async def _events(ready: Ready, pieces: Pieces) -> AsyncGenerator[bytes]:
    before = ready.echoes[0]
    async with aclosing(pieces):
        async for piece in pieces:
            if piece is None:
                yield b": still generating\n\n"
            elif piece.text or piece.finish:
                yield responses.event_of(_shown(ready, before + piece.text))
                before = ""


TRITON = Form(_whole, _events, _EventStream)
