"""The ASGI application of a gateway, built from the route table."""

from __future__ import annotations

import functools
import mimetypes
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

import multiworld
from multiworld.serve.gateway.http.answer_record import unrecorded
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_request import HttpRequest
from multiworld.serve.gateway.http.http_responses import (
    REQUEST_ID,
    json_response,
    request_id_of,
)
from multiworld.serve.gateway.http.openapi import document_of
from multiworld.serve.gateway.http.route import Needs, Route, pattern_of, respond

CACHED = "public, max-age=86400"  # for the files of the page ``/docs``

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class App:
    """The ASGI application; FastAPI (``rest``) serves only routes without a body.

    For other routes, FastAPI's layers would double the cost of a small request.
    """

    def __init__(
        self, gateway: Gateway, routes: Sequence[Route], rest: FastAPI
    ) -> None:
        self.rest, self._gateway = rest, gateway
        self._routes: list[tuple[str, re.Pattern[str], Route]] = [
            (route.method, pattern_of(path), route)
            for route in routes
            if route.needs is Needs.BODY
            for path in route.paths
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for method, pattern, route in self._routes:
                if method != scope["method"]:
                    continue
                if (match := pattern.fullmatch(scope["path"])) is not None:
                    request, path = HttpRequest(scope, receive), match.groupdict()
                    response = await respond(self._gateway, route, request, path)
                    await response(scope, receive, send)
                    return
        await self.rest(scope, receive, send)


def make_app(
    gateway: Gateway, routes: Sequence[Route], schemas: dict[str, Any] | None = None
) -> App:
    """Return the application for ``routes``; ``schemas`` are OpenAPI components."""
    rest = FastAPIOffline(  # /docs works without internet access
        title="multiworld",
        version=multiworld.__version__,
        description="Models served as replicated pipeline stages.",
        redoc_url=None,
    )
    document = document_of(routes, schemas or {}, rest.description)
    rest.openapi = lambda: document  # type: ignore[method-assign]
    for route in routes:
        for path in route.paths:
            endpoint = _endpoint(gateway, route)
            rest.add_route(path, endpoint, [route.method], include_in_schema=False)
    _send_files_whole(rest)
    _add_errors(rest, routes)
    return App(gateway, routes, rest)


@functools.lru_cache(maxsize=8)
def _content(file: Path) -> bytes:
    return file.read_bytes()


class _WholeFiles(StaticFiles):
    """Sends each file in one piece, because no record tells which part was sent."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        kind, _ = mimetypes.guess_type(full_path)
        headers = {"cache-control": CACHED}
        content = _content(Path(full_path))
        return Response(content, status_code, headers, media_type=kind)


def _send_files_whole(app: FastAPI) -> None:
    """Replace the server of the files that the page ``/docs`` needs."""
    for route in app.routes:
        if isinstance(route, Mount) and isinstance(route.app, StaticFiles):
            route.app = _WholeFiles(directory=route.app.directory)


def _endpoint(
    gateway: Gateway, route: Route
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await respond(gateway, route, request, request.path_params)

    return endpoint


def _add_errors(app: FastAPI, routes: Sequence[Route]) -> None:
    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Any) -> Response:
        status = error.status_code
        what = "not found" if status == 404 else "method not allowed"
        text = f"{request.method} {request.url.path}: {what}; see /docs for the API"
        headers = {}
        if status == 405:
            headers = {"Allow": _allowed(routes, request.url.path)}
        response: Response
        if request.url.path.startswith("/v1"):
            kind = {"type": "invalid_request_error", "param": None, "code": None}
            response = json_response({"error": {"message": text, **kind}}, status)
        else:
            response = json_response({"error": text}, status)
        response.headers.update(headers)
        response.headers[REQUEST_ID] = request_id_of(request, unrecorded())
        return response


def _allowed(routes: Sequence[Route], path: str) -> str:
    """Return the methods that a path allows, for the header ``Allow``."""
    methods = {
        route.method
        for route in routes
        if any(pattern_of(each).fullmatch(path) for each in route.paths)
    }
    # A path that no route has is one of FastAPI's own pages.
    if "GET" in methods or not methods:
        methods |= {"GET", "HEAD"}
    return ", ".join(sorted(methods))
