"""Cross-origin resource sharing (CORS): use of the API by pages of other origins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

# Response headers that pages of other origins may read.
EXPOSED = (
    "X-Request-Id",
    "X-Ignored-Fields",
    "Retry-After",
    "Server-Timing",
    "Inference-Header-Content-Length",
)


def with_origins(app: Any, origins: Sequence[str]) -> Any:
    """Return an ASGI application that pages of ``origins`` may use.

    Preflight requests are answered before authentication, because browsers send them
    without a key.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
    )
