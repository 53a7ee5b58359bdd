"""The HTTP interface of a gateway."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline

import multiworld
from multiworld.backends.dtypes import memory_of, plain
from multiworld.errors import (
    InvalidRequestError,
    NoReplicaError,
    OverloadedError,
    ServeError,
    UnknownModelError,
)
from multiworld.serve.dispatcher import NO_MODEL, Dispatcher
from multiworld.serve.gateway import inference
from multiworld.serve.gateway.body import read_body, while_connected
from multiworld.serve.gateway.metrics import Metrics
from multiworld.serve.gateway.openapi import EMBEDDINGS, INFER
from multiworld.serve.stage import Model, Tensors

logger = logging.getLogger("multiworld.serve")

SERVER = {"name": "multiworld", "version": multiworld.__version__}

OFFLOAD_BYTES = 256 * 1024
"""Bodies from this size on are parsed in a thread: others wait on the loop."""


class Gateway:
    """What the routes need.

    Attributes:
        models: By name and version.
        fleet: What the controller last told of replicas and events, for the metrics.
    """

    def __init__(self, dispatcher: Dispatcher, max_body_bytes: int) -> None:
        self.dispatcher, self.max_body_bytes = dispatcher, max_body_bytes
        self.models: dict[str, dict[str, Model]] = {}
        self.texts: dict[tuple[str, str], Any] = {}
        self.metrics = Metrics(dispatcher.name)
        self.fleet: dict[str, Any] = {}
        self.is_ending = False

    def model(self, name: str, version: str | None = None) -> tuple[str, Model]:
        """Return the version that answers, and its model.

        Raises:
            UnknownModelError: There is none, or another version answers.
        """
        route = self.dispatcher.table.routes.get(name)
        if route is None:
            known = ", ".join(sorted(self.dispatcher.table.routes)) or "none"
            raise UnknownModelError(NO_MODEL.format(name, known))
        if version is not None and version != route.version:
            raise UnknownModelError(
                f"model {name!r} has version {route.version!r} now, not {version!r}"
            )
        model = self.models.get(name, {}).get(route.version)
        if model is None:
            raise NoReplicaError(f"model {name!r} is not loaded here yet; try again")
        return route.version, model

    def forget_versions(self) -> None:
        """Forget the versions that are not in the table any more."""
        routes = self.dispatcher.table.routes
        for name, versions in list(self.models.items()):
            kept = routes[name].stages.keys() if name in routes else ()
            for version in versions.keys() - kept:
                del versions[version]
                self.texts.pop((name, version), None)

    def is_ready(self, name: str) -> bool:
        """Whether every stage of a model has a replica that is ready."""
        return not self.lacking(name)

    def lacking(self, name: str) -> list[int]:
        """Return the stages of a model without a replica that should have one.

        Those that have none while nobody asks are not meant.
        """
        on_demand = self.dispatcher.table.routes[name].on_demand
        return [s for s in self.dispatcher.missing(name) if s not in on_demand]

    async def text(self, name: str, version: str, model: Model) -> Any:
        """Return what turns text into inputs, loaded once.

        Raises:
            InvalidRequestError: The model takes no text.
        """
        if model.text is None:
            raise InvalidRequestError(
                f"model {name!r} takes no text; use /v2/models/{name}/infer"
            )
        if (name, version) not in self.texts:
            self.texts[name, version] = await asyncio.to_thread(model.text)
        return self.texts[name, version]


def _json(data: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(orjson.dumps(data), status, headers, "application/json")


def _retry(error: ServeError) -> dict[str, str]:
    after_s = getattr(error, "retry_after_s", None)
    return {} if after_s is None else {"Retry-After": str(max(1, round(after_s)))}


def _problem(error: ServeError) -> Response:
    """Return an error as the Open Inference Protocol has it."""
    return _json({"error": str(error)}, error.status, _retry(error))


def _openai_problem(error: ServeError) -> Response:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, UnknownModelError) else None
    if isinstance(error, OverloadedError):
        kind, code = "requests", "rate_limit_exceeded"
    body = {"message": str(error), "type": kind, "param": None, "code": code}
    return _json({"error": body}, error.status, _retry(error))


Handler = Callable[[], Awaitable[Response]]


async def _answered(
    gateway: Gateway,
    name: str | Callable[[], str],
    handler: Handler,
    problem: Callable[[ServeError], Response],
) -> Response:
    began = time.monotonic()
    try:
        response = await handler()
    except ServeError as error:
        response = problem(error)
    except Exception:
        logger.exception("a request was not understood")
        response = problem(ServeError("an error of the gateway itself; see its log"))
    asked = name() if callable(name) else name
    label = asked if asked in gateway.dispatcher.table.routes else "unknown"
    gateway.metrics.requests.labels(label, response.status_code).inc()
    if response.status_code == 200:
        gateway.metrics.latency.labels(label).observe(time.monotonic() - began)
    return response


def make_app(gateway: Gateway) -> FastAPI:
    """Return the application of a gateway."""
    app = FastAPIOffline(  # /docs needs no other site
        title="multiworld",
        version=multiworld.__version__,
        description="Models served by replicated stages.",
        redoc_url=None,
    )
    _health(app, gateway)
    _inference(app, gateway)
    _openai(app, gateway)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Any) -> Response:
        status = error.status_code
        what = "no such address" if status == 404 else "not by this method"
        text = f"{request.method} {request.url.path}: {what}; see /docs"
        if not request.url.path.startswith("/v1"):
            return _json({"error": text}, status)
        kind = {"type": "invalid_request_error", "param": None, "code": None}
        return _json({"error": {"message": text, **kind}}, status)

    return app


def _health(app: FastAPI, gateway: Gateway) -> None:
    def readiness() -> tuple[bool, dict[str, Any]]:
        routes = gateway.dispatcher.table.routes
        missing = {name: gateway.lacking(name) for name in routes}
        is_ready = bool(routes) and not any(missing.values()) and not gateway.is_ending
        return is_ready, missing

    @app.get("/health", tags=["health"])
    async def health() -> Response:
        """Whether every model answers; 503 names the stages without a replica."""
        is_ready, missing = readiness()
        status = "ok" if is_ready else "not ready"
        body = {"status": status, "stages_without_replica": missing}
        return _json(body, 200 if is_ready else 503)

    @app.get("/v2/health/live", tags=["health"])
    async def live() -> Response:
        """The gateway runs."""
        return _json({"live": True})

    @app.get("/v2/health/ready", tags=["health"])
    async def ready() -> Response:
        """Whether every model answers."""
        is_ready, _ = readiness()
        return _json({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/version", tags=["health"])
    async def version() -> Response:
        """The version of multiworld."""
        return _json({"version": multiworld.__version__})

    @app.get("/metrics", tags=["health"])
    async def metrics() -> Response:
        """What Prometheus reads."""
        dispatcher = gateway.dispatcher
        text = gateway.metrics.render(
            dispatcher.report(), gateway.fleet, dispatcher.table
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _inference(app: FastAPI, gateway: Gateway) -> None:
    async def infer(name: str, version: str | None, request: Request) -> Response:
        body = await read_body(request, gateway.max_body_bytes)
        current, model = gateway.model(name, version)
        length = request.headers.get("inference-header-content-length")
        if len(body) >= OFFLOAD_BYTES:
            asked = await asyncio.to_thread(inference.parse, body, length, model)
        else:
            asked = inference.parse(body, length, model)
        answer = await while_connected(
            request,
            gateway.dispatcher.infer(
                name,
                asked.tensors,
                deadline_s=_deadline(request, asked.parameters),
                session=_session(asked.parameters),
            ),
        )
        content, head = inference.render(name, current, asked, answer)
        if head is None:
            return Response(content, media_type="application/json")
        return Response(
            content,
            headers={"Inference-Header-Content-Length": str(head)},
            media_type="application/octet-stream",
        )

    @app.post("/v2/models/{name}/infer", tags=["inference"], openapi_extra=INFER)
    async def infer_active(name: str, request: Request) -> Response:
        """Infer, with the version that answers now."""
        return await _answered(
            gateway, name, lambda: infer(name, None, request), _problem
        )

    @app.post(
        "/v2/models/{name}/versions/{version}/infer",
        tags=["inference"],
        openapi_extra=INFER,
    )
    async def infer_version(name: str, version: str, request: Request) -> Response:
        """Infer, with this version only."""
        return await _answered(
            gateway, name, lambda: infer(name, version, request), _problem
        )

    @app.get("/v2", tags=["inference"])
    async def server() -> Response:
        """What this server is."""
        return _json({**SERVER, "extensions": ["binary_tensor_data"]})

    @app.get("/v2/models", tags=["inference"])
    async def models() -> Response:
        """The models that are served."""
        names = sorted(gateway.dispatcher.table.routes)
        return _json({"models": [{"name": name} for name in names]})

    @app.get("/v2/models/{name}", tags=["inference"])
    @app.get("/v2/models/{name}/versions/{version}", tags=["inference"])
    async def metadata(name: str, version: str | None = None) -> Response:
        """Inputs and outputs of a model."""
        try:
            current, model = gateway.model(name, version)
        except ServeError as error:
            return _problem(error)
        return _json(
            {
                "name": name,
                "versions": [current],
                "platform": "multiworld_pytorch",
                "inputs": [_spec(spec) for spec in model.inputs],
                "outputs": [_spec(spec) for spec in model.outputs],
            }
        )

    @app.get("/v2/models/{name}/ready", tags=["inference"])
    @app.get("/v2/models/{name}/versions/{version}/ready", tags=["inference"])
    async def model_ready(name: str, version: str | None = None) -> Response:
        """Whether every stage of a model has a replica."""
        try:
            gateway.model(name, version)
        except ServeError as error:
            return _problem(error)
        is_ready = gateway.is_ready(name)
        return _json({"name": name, "ready": is_ready}, 200 if is_ready else 503)


def _spec(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _deadline(request: Request, parameters: dict[str, Any]) -> float | None:
    """Return the seconds that the client gives the request."""
    given: Any = parameters.get("timeout_s", request.headers.get("x-timeout-s"))
    if given is None and "timeout" in parameters:
        given = parameters["timeout"]  # as Triton's clients give it
        given = given / 1e6 if type(given) is int else given
    if given is None:
        return None
    try:
        seconds = -1.0 if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds <= 86400:
        raise InvalidRequestError(
            f"the time-out is {given!r}; give seconds, more than 0 and at most a day"
        )
    return seconds


def _session(parameters: dict[str, Any]) -> str | None:
    """Return what keeps requests at the same replicas."""
    given = parameters.get("sequence_id")
    return None if given in (None, 0, "") else str(given)


def _openai(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models", tags=["openai"])
    async def models() -> Response:
        """The models that are served."""
        data = [
            {"id": name, "object": "model", "created": 0, "owned_by": "multiworld"}
            for name in sorted(gateway.dispatcher.table.routes)
        ]
        return _json({"object": "list", "data": data})

    @app.get("/v1/models/{name}", tags=["openai"])
    async def model(name: str) -> Response:
        """One model."""
        try:
            gateway.model(name)
        except ServeError as error:
            return _openai_problem(error)
        return _json(
            {"id": name, "object": "model", "created": 0, "owned_by": "multiworld"}
        )

    @app.post("/v1/embeddings", tags=["openai"], openapi_extra=EMBEDDINGS)
    async def embeddings(request: Request) -> Response:
        """Embed texts."""
        asked: dict[str, Any] = {}

        async def answer() -> Response:
            body = await read_body(request, gateway.max_body_bytes)
            if len(body) >= OFFLOAD_BYTES:
                asked.update(await asyncio.to_thread(_embedding_request, body))
            else:
                asked.update(_embedding_request(body))
            return await while_connected(request, _embed(gateway, request, asked))

        def name() -> str:
            return str(asked.get("model", ""))

        return await _answered(gateway, name, answer, _openai_problem)


def _embedding_request(body: bytes) -> dict[str, Any]:
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(said, dict) or not isinstance(said.get("model"), str):
        raise InvalidRequestError('the body needs "model": its name')
    texts = said.get("input")
    texts = [texts] if isinstance(texts, str) else texts
    if (
        not isinstance(texts, list)
        or not texts
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise InvalidRequestError(
            '"input" must be a text or a list of texts, none of them empty (arrays of '
            "tokens are not taken)"
        )
    if len(texts) > MAX_TEXTS:
        raise InvalidRequestError(f'"input" has more than {MAX_TEXTS} texts')
    if said.get("encoding_format", "float") not in ("float", "base64"):
        raise InvalidRequestError('"encoding_format" must be "float" or "base64"')
    dimensions = said.get("dimensions")
    if dimensions is not None and type(dimensions) is not int:
        raise InvalidRequestError('"dimensions" must be a number')
    return {
        "model": said["model"],
        "texts": texts,
        "dimensions": dimensions,
        "is_base64": said.get("encoding_format") == "base64",
    }


MAX_TEXTS = 2048
"""As OpenAI has it."""

WINDOW = 32
"""Texts of one call that are under way at once: it shall not fill the queue."""


def _check_dimensions(dimensions: int | None, model: Model) -> None:
    size = next((s.shape[-1] for s in model.outputs if s.name == model.embedding), -1)
    if dimensions is not None and dimensions != size:
        raise InvalidRequestError(
            f'"dimensions" is {dimensions}, and this model makes {size}; leave it out'
        )


async def _embed(gateway: Gateway, request: Request, asked: dict[str, Any]) -> Response:
    name = asked["model"]
    version, model = gateway.model(name)
    deadline_s = _deadline(request, {})
    if deadline_s is None:
        deadline_s = gateway.dispatcher.table.routes[name].deadline_s
    deadline_at = time.monotonic() + deadline_s
    _check_dimensions(asked["dimensions"], model)
    frontend = await gateway.text(name, version, model)
    size = sum(map(len, asked["texts"]))
    if size >= OFFLOAD_BYTES // 16:
        inputs = await asyncio.to_thread(
            lambda: [frontend.encode(text) for text in asked["texts"]]
        )
    else:
        inputs = [frontend.encode(text) for text in asked["texts"]]
    window = asyncio.Semaphore(WINDOW)

    async def one(tensors: Tensors) -> Tensors:
        async with window:
            left_s = max(0.001, deadline_at - time.monotonic())
            return await gateway.dispatcher.infer(name, tensors, deadline_s=left_s)

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
        if asked["is_base64"]:
            shown = base64.b64encode(bytes(memory_of(vector))).decode()
        data.append({"object": "embedding", "index": number, "embedding": shown})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return _json({"object": "list", "data": data, "model": name, "usage": usage})
