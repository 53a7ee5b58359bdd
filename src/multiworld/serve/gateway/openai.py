"""OpenAI-compatible routes: models and embeddings. Shell."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from multiworld.backends.dtypes import memory_of, plain
from multiworld.errors import InvalidRequestError, ServeError
from multiworld.serve.gateway.gateway import Gateway
from multiworld.serve.gateway.openapi import EMBEDDINGS, OPENAI_KNOWN_MODEL
from multiworld.serve.gateway.request_body import read_body, while_connected
from multiworld.serve.gateway.responses import (
    OFFLOAD_BYTES,
    json_response,
    openai_error_response,
    respond,
    timeout_of,
)
from multiworld.serve.spec.stage import Model, Tensors
from multiworld.serve.tenants.authenticator import AdmittedRequest


def add_openai(app: FastAPI, gateway: Gateway) -> None:
    """Add the OpenAI-compatible routes to an application."""

    @app.get("/v1/models", tags=["openai"])
    async def models(request: Request) -> Response:
        """List the models that the client may use."""
        try:
            names = gateway.names(gateway.authenticator.identify(request.headers))
        except ServeError as error:
            return openai_error_response(error)
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "multiworld"}
            for name in names
        ]
        return json_response({"object": "list", "data": data})

    @app.get("/v1/models/{name}", tags=["openai"], openapi_extra=OPENAI_KNOWN_MODEL)
    async def model(name: str, request: Request) -> Response:
        """Return one model."""
        try:
            gateway.model(name, None, gateway.authenticator.identify(request.headers))
        except ServeError as error:
            return openai_error_response(error)
        return json_response(
            {"id": name, "object": "model", "created": 0, "owned_by": "multiworld"}
        )

    @app.post("/v1/embeddings", tags=["openai"], openapi_extra=EMBEDDINGS)
    async def embeddings(request: Request) -> Response:
        """Embed texts."""
        parsed: dict[str, Any] = {}

        async def answer(admitted: AdmittedRequest) -> Response:
            body = await read_body(
                request,
                gateway.max_body_bytes,
                lambda n: gateway.authenticator.count_bytes(admitted, n),
            )
            if len(body) >= OFFLOAD_BYTES:
                parsed.update(await asyncio.to_thread(_embedding_request, body))
            else:
                parsed.update(_embedding_request(body))
            embedding = _embed(gateway, admitted, request, parsed)
            return await while_connected(request, embedding)

        def name() -> str:
            return str(parsed.get("model", ""))

        return await respond(gateway, request, name, answer, openai_error_response)


def _embedding_request(body: bytes) -> dict[str, Any]:
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"body is not valid JSON: {error}") from error
    if not isinstance(payload, dict) or not isinstance(payload.get("model"), str):
        raise InvalidRequestError(
            'body has no "model"; give the name of a model',
            param="model",
            code="missing_required_parameter",
        )
    inputs = _inputs(payload.get("input"))
    if len(inputs) > MAX_TEXTS:
        raise _invalid("input", f"has more than {MAX_TEXTS} texts; split it")
    if payload.get("encoding_format", "float") not in ("float", "base64"):
        raise _invalid("encoding_format", 'must be "float" or "base64"')
    dimensions = payload.get("dimensions")
    if dimensions is not None and type(dimensions) is not int:
        raise _invalid("dimensions", "must be an integer")
    return {
        "model": payload["model"],
        "inputs": inputs,
        "dimensions": dimensions,
        "is_base64": payload.get("encoding_format") == "base64",
    }


Input = str | list[int]
"""A text, or its token ids."""


def _inputs(given: Any) -> list[Input]:
    """Return the texts or arrays of tokens of a request."""
    if isinstance(given, str) or _is_tokens(given):
        given = [given]
    if not isinstance(given, list) or not given:
        raise _invalid("input", "must be a text, an array of tokens, or a list of them")
    is_text = all(isinstance(one, str) and one for one in given)
    if not is_text and not all(map(_is_tokens, given)):
        raise _invalid(
            "input", "must hold texts or arrays of token ids, none of them empty"
        )
    found: list[Input] = given
    return found


def _is_tokens(given: Any) -> bool:
    return (
        isinstance(given, list)
        and bool(given)
        and all(type(token) is int and 0 <= token < 2**63 for token in given)
    )


def _invalid(param: str, rule: str) -> InvalidRequestError:
    return InvalidRequestError(f'"{param}" {rule}', param=param, code="invalid_value")


MAX_TEXTS = 2048
"""Most texts in one request; the same as OpenAI's limit."""

WINDOW = 32
"""Most texts of one request under way at once, so that it does not fill the queue."""


def _check_dimensions(dimensions: int | None, model: Model) -> None:
    size = next((s.shape[-1] for s in model.outputs if s.name == model.embedding), -1)
    if dimensions is not None and dimensions != size:
        rule = f"is {dimensions}, but this model returns {size}; leave it out"
        raise _invalid("dimensions", rule)


def _encoded(frontend: Any, inputs: list[Input]) -> list[Tensors]:
    """Return the inputs of stage 0 for each text or array of tokens."""
    if isinstance(inputs[0], str):
        return [frontend.encode(text) for text in inputs]
    encode = getattr(frontend, "encode_tokens", None)
    if encode is None:
        raise _invalid("input", "must be text: this model takes no arrays of tokens")
    return [encode(tokens) for tokens in inputs]


async def _embed(
    gateway: Gateway,
    admitted: AdmittedRequest,
    request: Request,
    parsed: dict[str, Any],
) -> Response:
    name = parsed["model"]
    version, model = gateway.model(name, None, admitted.tenant)
    deadline_s = timeout_of(request, {})
    if deadline_s is None:
        served = gateway.route(name, admitted.tenant)
        deadline_s = gateway.dispatcher.table.routes[served].deadline_s
    clock = gateway.authenticator.clock
    deadline_at = clock() + deadline_s
    _check_dimensions(parsed["dimensions"], model)
    frontend = await gateway.text(name, version, model)
    size = sum(map(len, parsed["inputs"]))
    if size >= OFFLOAD_BYTES // 16:
        inputs = await asyncio.to_thread(_encoded, frontend, parsed["inputs"])
    else:
        inputs = _encoded(frontend, parsed["inputs"])
    window = asyncio.Semaphore(WINDOW)

    async def one(tensors: Tensors) -> Tensors:
        async with window:
            left_s = max(0.001, deadline_at - clock())
            return await gateway.infer(admitted, name, version, tensors, left_s)

    tasks = [asyncio.ensure_future(one(tensors)) for tensors in inputs]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    tokens = sum(next(iter(tensors.values())).numel() for tensors in inputs)
    data = []
    for number, answer in enumerate(answers):
        vector = plain(answer[model.embedding][0].float())
        shown: Any = vector.tolist()
        if parsed["is_base64"]:
            shown = base64.b64encode(bytes(memory_of(vector))).decode()
        data.append({"object": "embedding", "index": number, "embedding": shown})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json_response(
        {"object": "list", "data": data, "model": name, "usage": usage}
    )
