"""Routes that most requests take, without the layers of FastAPI, which cost as much as
everything else together. FastAPI documents these routes, too, and serves every other
path."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI, Response

from multiworld.serve.gateway.http.http_request import HttpRequest

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Coroutine function of the request and the parts of its path, by name.
Endpoint = Callable[..., Awaitable[Response]]


class HotRoutes:
    """ASGI application that serves a few routes itself; ``app`` serves the rest."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._routes: list[tuple[re.Pattern[str], Endpoint]] = []

    def post(self, path: str, endpoint: Endpoint) -> None:
        """Add a route; ``{name}`` matches one part. ``endpoint`` must not raise."""
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path))
        self._routes.append((re.compile(pattern), endpoint))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            for pattern, endpoint in self._routes:
                if (match := pattern.fullmatch(scope["path"])) is not None:
                    request = HttpRequest(scope, receive)
                    response = await endpoint(request=request, **match.groupdict())
                    await response(scope, receive, send)
                    return
        await self.app(scope, receive, send)
