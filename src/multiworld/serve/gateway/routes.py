"""HEAD, a summary and a description for every route of the gateway."""

from __future__ import annotations

import inspect
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import Match, Route


def finish_routes(app: FastAPI) -> None:
    """Add HEAD to every GET route, and describe the routes by their docstrings."""
    for route in [route for route in app.routes if isinstance(route, APIRoute)]:
        summary, _, rest = inspect.cleandoc(route.endpoint.__doc__ or "").partition(
            "\n"
        )
        route.summary, route.description = summary.rstrip("."), rest.strip()
        if "GET" in (route.methods or ()):
            app.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], include_in_schema=False
            )
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]


def allowed(app: FastAPI, request: Request) -> str:
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
        schema.get("components", {}).pop("schemas", None)
        app.openapi_schema = schema
    return app.openapi_schema
