"""Triton's routes ``generate`` and ``generate_stream``. Fields are those of Triton's
generate extension and of its vLLM backend.

https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_generate.html
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from multiworld.errors import InvalidRequestError, ServeError
from multiworld.serve.gateway.admission.authenticator import AdmittedRequest
from multiworld.serve.gateway.http import http_responses as responses
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.request_body import Body, off_loop
from multiworld.serve.gateway.openai.choices import Piece
from multiworld.serve.gateway.openai.completion_answers import kept_alive
from multiworld.serve.gateway.openai.completions import wanted_of
from multiworld.serve.gateway.openai.preparation import Ready, prepare_completion, timed
from multiworld.serve.gateway.openai.request_fields import (
    CompletionBody,
    GenerateBody,
    decoded,
    invalid,
)
from multiworld.serve.gateway.openai.request_lifecycle import Form, Reader, answered
from multiworld.serve.gateway.openai.schemas import GENERATE, GENERATE_STREAM

# Parameter that leaves out the prompt, as in Triton's vLLM backend.
EXCLUDES = "exclude_input_in_output"


_bodies = msgspec.json.Decoder(GenerateBody)

# Fields of a text completion that a request cannot set.
FIXED = (
    *("model", "prompt", "n", "best_of", "echo", "stream", "stream_options"),
    *("logprobs", "return_token_ids"),  # the answer has no place for them
)


class _Events(responses.EventStream):
    last = b""

    @staticmethod
    def error_of(error: ServeError) -> Any:
        return responses.text_of(error)


def add_generate(app: FastAPI, gateway: Gateway) -> None:
    def add(path: str, *, is_streamed: bool) -> None:
        async def generate(
            name: str, request: Request, version: str | None = None
        ) -> Response:
            """Continue a text, as defined by Triton's generate extension."""
            read = _reader(name, version, is_streamed)
            return await answered(gateway, request, read, _form(name))

        for prefix in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            app.add_api_route(
                f"{prefix}/{path}",
                generate,
                methods=["POST"],
                tags=["inference"],
                name=path,
                openapi_extra=GENERATE_STREAM if is_streamed else GENERATE,
            )

    add("generate", is_streamed=False)
    add("generate_stream", is_streamed=True)


def _reader(name: str, version: str | None, is_streamed: bool) -> Reader:
    async def read(
        gateway: Gateway, admitted: AdmittedRequest, request: Request, body: Body
    ) -> Ready:
        gateway.model(name, version, admitted.tenant)
        asked: GenerateBody = await off_loop(len(body), partial(decoded, body, _bodies))
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
        wanted = replace(
            wanted_of(completion), is_streamed=is_streamed, echo=not is_excluded
        )
        wanted = timed(wanted, request)
        ready = await prepare_completion(gateway, admitted, completion, wanted)
        return replace(ready, id=asked.id)

    return read


def _form(name: str) -> Form:
    def shown(ready: Ready, text: str) -> dict[str, Any]:
        head = {"id": ready.id} if ready.id else {}
        return {
            **head,
            "model_name": name,
            "model_version": ready.served.version,
            "text_output": text,
        }

    async def whole(ready: Ready, pieces: AsyncGenerator[Piece]) -> Response:
        text = "".join([piece.text async for piece in pieces])
        return responses.json_response(shown(ready, ready.echoes[0] + text))

    async def events(
        ready: Ready, pieces: AsyncGenerator[Piece]
    ) -> AsyncGenerator[bytes]:
        before = ready.echoes[0]
        async with aclosing(kept_alive(pieces)) as found:
            async for piece in found:
                if piece is None:
                    yield b": still generating\n\n"
                elif piece.text or piece.finish:
                    yield responses.event_of(shown(ready, before + piece.text))
                    before = ""

    return Form(whole, events, responses.error_response, _Events, name)
