"""HTTP application of a gateway."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, RedirectResponse
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.routing import Match, Route

import multiworld
from multiworld.errors import NoReplicaError, OverloadedError, ServeError
from multiworld.serve.gateway.admission.authenticator import AdmittedRequest
from multiworld.serve.gateway.http import open_inference
from multiworld.serve.gateway.http.body_budget import Reservation
from multiworld.serve.gateway.http.embeddings import add_openai
from multiworld.serve.gateway.http.gateway import Gateway, require_tensors
from multiworld.serve.gateway.http.hot_routes import HotRoutes
from multiworld.serve.gateway.http.http_responses import (
    RENDER_BYTES,
    error_response,
    json_response,
    openai_error_response,
    respond,
    timeout_of,
)
from multiworld.serve.gateway.http.openapi import INFER, KNOWN_MODEL
from multiworld.serve.gateway.http.request_body import (
    JSON_LENGTH,
    off_loop,
    while_connected,
)
from multiworld.serve.gateway.http.triton_routes import PLATFORM, add_triton, tensors_of
from multiworld.serve.routing.refusals import OutdatedError
from multiworld.serve.spec.dedicated import is_dedicated
from multiworld.serve.spec.stage import Tensors

# Server metadata in the Open Inference Protocol.
SERVER = {"name": "multiworld", "version": multiworld.__version__}


def make_app(
    gateway: Gateway, more: Iterable[Callable[[FastAPI, Gateway], None]] = ()
) -> HotRoutes:
    """Return the HTTP application; the functions in ``more`` add further routes."""
    app = FastAPIOffline(  # /docs works without internet access
        title="multiworld",
        version=multiworld.__version__,
        description="Models served as replicated pipeline stages.",
        redoc_url=None,
    )
    hot = HotRoutes(app)
    _health(app, gateway)
    _inference(app, hot, gateway)
    add_openai(app, hot, gateway)
    for add in more:
        add(app, gateway)
    add_triton(app, gateway)
    _errors(app)
    _finish_routes(app)
    return hot


def _errors(app: FastAPI) -> None:
    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Any) -> Response:
        status = error.status_code
        what = "not found" if status == 404 else "method not allowed"
        text = f"{request.method} {request.url.path}: {what}; see /docs for the API"
        headers = {"Allow": _allowed(app, request)} if status == 405 else None
        if not request.url.path.startswith("/v1"):
            return json_response({"error": text}, status, headers)
        kind = {"type": "invalid_request_error", "param": None, "code": None}
        return json_response({"error": {"message": text, **kind}}, status, headers)

    @app.exception_handler(ServeError)
    async def refused(request: Request, error: Any) -> Response:
        is_openai = request.url.path.startswith("/v1")
        return openai_error_response(error) if is_openai else error_response(error)


def _health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        """Redirect to the documentation of the API."""
        return RedirectResponse("/docs")

    def readiness() -> tuple[bool, dict[str, Any]]:
        routes = gateway.dispatcher.table.routes
        missing = {n: gateway.missing_stages(n) for n in routes if not is_dedicated(n)}
        is_ready = bool(routes) and not any(missing.values()) and not gateway.is_ending
        return is_ready, missing

    @app.get("/health", tags=["health"])
    async def health() -> Response:
        """Report whether every model is ready; 503 lists stages without a replica."""
        is_ready, missing = readiness()
        status = "ok" if is_ready else "not ready"
        body: dict[str, Any] = {"status": status}
        # Where keys are needed, the names of models are not public.
        if not gateway.authenticator.needs_key:
            body["stages_without_replica"] = missing
        return json_response(body, 200 if is_ready else 503)

    @app.get("/v2/health/live", tags=["health"])
    async def live() -> Response:
        """Report that the gateway runs."""
        return json_response({"live": True})

    @app.get("/v2/health/ready", tags=["health"])
    async def ready() -> Response:
        """Report whether every model is ready."""
        is_ready, _ = readiness()
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    @app.get("/version", tags=["health"])
    async def version() -> Response:
        """Return the version of multiworld."""
        return json_response({"version": multiworld.__version__})

    @app.get("/metrics", tags=["health"], response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return the Prometheus metrics; needs an operator's key if keys are on."""
        gateway.authenticator.check_operator(request.headers)
        text = await gateway.metrics()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _inference(app: FastAPI, hot: HotRoutes, gateway: Gateway) -> None:
    async def infer(
        request: Request,
        name: str,
        version: str | None,
        admitted: AdmittedRequest,
        reservation: Reservation,
    ) -> Response:
        gateway.model(name, version, admitted.tenant)
        body = await gateway.read_body(
            request, admitted, reservation, may_be_binary=True
        )
        current, model = gateway.model(name, version, admitted.tenant)
        require_tensors(name, model)
        default_s = gateway.deadline_s(name, admitted.tenant)
        length = request.headers.get(JSON_LENGTH)
        parse = partial(open_inference.parse, body, length, model)
        parsed = await off_loop(len(body), parse)
        del body, parse  # the tensors are copies
        given = parsed.parameters
        timeout_s = timeout_of(request, given.timeout_s, given.timeout)
        timeout_s = default_s if timeout_s is None else timeout_s
        session = _session(given.sequence_id)
        asked_at = gateway.authenticator.clock()
        tokens, admitted.model = _tokens(parsed.tensors), name
        try:
            while True:
                work = gateway.infer(
                    admitted, name, current, parsed.tensors, timeout_s, session
                )
                try:
                    answer = await while_connected(request, work)
                    break
                except OutdatedError:  # an update was completed meanwhile
                    current, model = gateway.model(name, version, admitted.tenant)
                    require_tensors(name, model)
                    open_inference.check(parsed.tensors, model)
                    spent_s = gateway.authenticator.clock() - asked_at
                    timeout_s = max(0.001, timeout_s - spent_s)
                    asked_at += spent_s
        except (OverloadedError, NoReplicaError):
            tokens = 0
            raise
        finally:
            if tokens:
                gateway.authenticator.count_prompt(admitted, tokens)
        size = sum(tensor.nbytes for tensor in answer.values())
        render = partial(open_inference.render, name, current, parsed, answer)
        content, head = (
            await asyncio.to_thread(render) if size >= RENDER_BYTES else render()
        )
        if head is None:
            return Response(content, media_type="application/json")
        return Response(
            content,
            headers={"Inference-Header-Content-Length": str(head)},
            media_type="application/octet-stream",
        )

    @app.post("/v2/models/{name}/infer", tags=["inference"], openapi_extra=INFER)
    async def infer_active(name: str, request: Request) -> Response:
        """Run inference with the active version of a model."""
        return await respond(
            gateway, request, name, partial(infer, request, name, None), error_response
        )

    @app.post(
        "/v2/models/{name}/versions/{version}/infer",
        tags=["inference"],
        openapi_extra=INFER,
    )
    async def infer_version(name: str, version: str, request: Request) -> Response:
        """Run inference; fail unless this version is active."""
        return await respond(
            gateway,
            request,
            name,
            partial(infer, request, name, version),
            error_response,
        )

    hot.post("/v2/models/{name}/infer", infer_active)
    hot.post("/v2/models/{name}/versions/{version}/infer", infer_version)

    @app.get("/v2", tags=["inference"])
    async def server() -> Response:
        """Return the server's name, version and extensions."""
        return json_response({**SERVER, "extensions": ["binary_tensor_data"]})

    @app.get("/v2/models", tags=["inference"])
    async def models(request: Request) -> Response:
        """List the models that the client may use."""
        names = gateway.names(gateway.authenticator.identify(request.headers))
        return json_response({"models": [{"name": name} for name in names]})

    @app.get("/v2/models/{name}", tags=["inference"], openapi_extra=KNOWN_MODEL)
    @app.get(
        "/v2/models/{name}/versions/{version}",
        tags=["inference"],
        openapi_extra=KNOWN_MODEL,
    )
    async def metadata(
        name: str, request: Request, version: str | None = None
    ) -> Response:
        """Return the inputs and outputs of a model."""
        tenant = gateway.authenticator.identify(request.headers)
        current, model = gateway.model(name, version, tenant)
        inputs, outputs = tensors_of(model)
        return json_response(
            {
                "name": name,
                "versions": [current],
                "platform": PLATFORM,
                "inputs": [_spec(spec) for spec in inputs],
                "outputs": [_spec(spec) for spec in outputs],
            }
        )

    @app.get("/v2/models/{name}/ready", tags=["inference"], openapi_extra=KNOWN_MODEL)
    @app.get(
        "/v2/models/{name}/versions/{version}/ready",
        tags=["inference"],
        openapi_extra=KNOWN_MODEL,
    )
    async def model_ready(
        name: str, request: Request, version: str | None = None
    ) -> Response:
        """Report whether every stage of a model has a replica."""
        tenant = gateway.authenticator.identify(request.headers)
        gateway.model(name, version, tenant)
        is_ready = gateway.is_ready(gateway.route(name, tenant))
        return json_response(
            {"name": name, "ready": is_ready}, 200 if is_ready else 503
        )


def _spec(spec: Any) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _tokens(tensors: Tensors) -> int:
    """Return how many tokens tensors have, by the name that transformers gives them."""
    ids = tensors.get("input_ids")
    return 0 if ids is None else ids.numel()


def _session(given: int | str | None) -> str | None:
    """Return the session, whose requests go to the same replicas."""
    return None if given in (None, 0, "") else str(given)


# All routes.


def _finish_routes(app: FastAPI) -> None:
    """Add HEAD to every GET route, and describe the routes by their docstrings."""
    for route in [route for route in app.routes if isinstance(route, APIRoute)]:
        text = inspect.cleandoc(route.endpoint.__doc__ or "")
        summary, _, rest = text.partition("\n")
        route.summary, route.description = summary.rstrip("."), rest.strip()
        if "GET" in (route.methods or ()):
            app.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False
            )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]


def _allowed(app: FastAPI, request: Request) -> str:
    """Return the methods of the routes that match a request's path."""
    methods: set[str] = set()
    for route in app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description without FastAPI's 422, which is never sent."""
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
        )
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        schemas = getattr(app.state, "schemas", {})
        schema.setdefault("components", {})["schemas"] = schemas
        app.openapi_schema = schema
    return app.openapi_schema
