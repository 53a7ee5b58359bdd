"""Use of the API from pages of other origins, in browsers (CORS)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware

# Headers of responses that pages may read.
EXPOSED = (
    "X-Request-Id",
    "X-Ignored-Fields",
    "Retry-After",
    "Server-Timing",
    "Inference-Header-Content-Length",
)


def with_origins(app: Any, origins: Sequence[str]) -> Any:
    """Return an ASGI application that pages of some origins may use.

    A preflight is answered before keys are looked at: browsers send none with it.
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
