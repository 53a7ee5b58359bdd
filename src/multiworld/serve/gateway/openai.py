"""OpenAI-compatible routes: models and embeddings. Shell."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response

from multiworld.backends.dtypes import memory_of, plain
from multiworld.errors import InvalidRequestError, ServeError
from multiworld.serve.gateway.gateway import Gateway
from multiworld.serve.gateway.openapi import EMBEDDINGS
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

    @app.get("/v1/models/{name}", tags=["openai"])
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
        raise InvalidRequestError('body has no "model"; give the name of a model')
    texts = payload.get("input")
    texts = [texts] if isinstance(texts, str) else texts
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise InvalidRequestError(
            '"input" must be a string or a list of strings, none of them empty; arrays '
            "of tokens are not supported"
        )
    if len(texts) > MAX_TEXTS:
        raise InvalidRequestError(f'"input" has more than {MAX_TEXTS} texts; split it')
    if payload.get("encoding_format", "float") not in ("float", "base64"):
        raise InvalidRequestError('"encoding_format" must be "float" or "base64"')
    dimensions = payload.get("dimensions")
    if dimensions is not None and type(dimensions) is not int:
        raise InvalidRequestError('"dimensions" must be an integer')
    return {
        "model": payload["model"],
        "texts": texts,
        "dimensions": dimensions,
        "is_base64": payload.get("encoding_format") == "base64",
    }


MAX_TEXTS = 2048
"""Most texts in one request; the same as OpenAI's limit."""

WINDOW = 32
"""Most texts of one request under way at once, so that it does not fill the queue."""


def _check_dimensions(dimensions: int | None, model: Model) -> None:
    size = next((s.shape[-1] for s in model.outputs if s.name == model.embedding), -1)
    if dimensions is not None and dimensions != size:
        raise InvalidRequestError(
            f'"dimensions" is {dimensions}, but this model returns {size}; leave it out'
        )


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
    deadline_at = time.monotonic() + deadline_s
    _check_dimensions(parsed["dimensions"], model)
    frontend = await gateway.text(name, version, model)
    size = sum(map(len, parsed["texts"]))
    if size >= OFFLOAD_BYTES // 16:
        inputs = await asyncio.to_thread(
            lambda: [frontend.encode(text) for text in parsed["texts"]]
        )
    else:
        inputs = [frontend.encode(text) for text in parsed["texts"]]
    window = asyncio.Semaphore(WINDOW)

    async def one(tensors: Tensors) -> Tensors:
        async with window:
            left_s = max(0.001, deadline_at - time.monotonic())
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
