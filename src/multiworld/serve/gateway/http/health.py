"""Routes for health, version and metrics."""

from __future__ import annotations

from typing import Any

from starlette.responses import RedirectResponse, Response

import multiworld
from multiworld.serve.gateway.http.calls import Call
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_responses import json_response
from multiworld.serve.spec.dedicated import is_dedicated


def _readiness(gateway: Gateway) -> tuple[bool, dict[str, Any]]:
    """Return whether all shared models are ready, and the missing stages of each."""
    routes = gateway.dispatcher.table.routes
    missing = {n: gateway.missing_stages(n) for n in routes if not is_dedicated(n)}
    is_ready = (
        bool(routes) and not any(missing.values()) and not gateway.is_shutting_down
    )
    return is_ready, missing


async def root(call: Call) -> Response:
    """Redirect to the documentation of the API."""
    return RedirectResponse("/docs")


async def health(call: Call) -> Response:
    """Report whether every model is ready, and which stages have no replica."""
    is_ready, missing = _readiness(call.gateway)
    body: dict[str, Any] = {"status": "ok" if is_ready else "not ready"}
    # If keys are needed, model names are not public.
    if not call.gateway.authenticator.needs_key:
        body["stages_without_replica"] = missing
    return json_response(body, 200 if is_ready else 503)


async def live(call: Call) -> Response:
    """Report that the gateway runs."""
    return json_response({"live": True})


async def ready(call: Call) -> Response:
    """Report whether every model is ready."""
    is_ready, _ = _readiness(call.gateway)
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


async def version(call: Call) -> Response:
    """Return the version of multiworld."""
    return json_response({"version": multiworld.__version__})


async def load(call: Call) -> Response:
    """Return the number of requests in flight, as vLLM does."""
    return json_response({"server_load": call.gateway.report().in_flight})


async def metrics(call: Call) -> Response:
    """Return the Prometheus metrics; needs an operator's key if keys are on."""
    text = await call.gateway.metrics()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
