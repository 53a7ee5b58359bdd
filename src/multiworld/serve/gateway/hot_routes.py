"""Routes that most requests take, without the layers of FastAPI.

FastAPI's middleware and routing cost as much as all that the gateway does itself for a
small request. The same endpoints are routes of the FastAPI application as well, which
documents them and serves every other path.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI, Response

from multiworld.serve.gateway.http_request import HttpRequest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

Endpoint = Callable[..., Awaitable[Response]]
"""Coroutine function of the request and the parts of its path, by name."""


class HotRoutes:
    """An ASGI application: a few routes, and another application for all others.

    Args:
        app: The other application.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._routes: list[tuple[re.Pattern[str], Endpoint]] = []

    def post(self, path: str, endpoint: Endpoint) -> None:
        """Add a route for POST.

        Args:
            path: Path in which ``{name}`` stands for a part without a slash.
            endpoint: Returns the response; must not raise.
        """
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path))
        self._routes.append((re.compile(pattern), endpoint))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Cancellation: As for the endpoint.
        """
        if scope["type"] == "http" and scope["method"] == "POST":
            for pattern, endpoint in self._routes:
                if (match := pattern.fullmatch(scope["path"])) is not None:
                    request = HttpRequest(scope, receive)
                    response = await endpoint(request=request, **match.groupdict())
                    await response(scope, receive, send)
                    return
        await self.app(scope, receive, send)
