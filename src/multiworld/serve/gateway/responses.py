"""From a request to its answer: let in, answered, counted; errors in their forms."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import Request, Response

from multiworld.errors import (
    InvalidRequestError,
    ServeError,
    UnauthorizedError,
    UnknownModelError,
)
from multiworld.serve.gateway.gateway import Gateway
from multiworld.serve.tenants.authenticator import AdmittedRequest

logger = logging.getLogger("multiworld.serve")

OFFLOAD_BYTES = 256 * 1024
"""Bodies from this size on are parsed in a thread: others wait on the loop."""


def json_response(data: Any, status: int = 200, headers: Any = None) -> Response:
    """Return an answer in JSON."""
    return Response(orjson.dumps(data), status, headers, "application/json")


def _retry(error: ServeError) -> dict[str, str]:
    after_s = getattr(error, "retry_after_s", None)
    found = {} if after_s is None else {"Retry-After": str(max(1, math.ceil(after_s)))}
    if isinstance(error, UnauthorizedError):
        found["WWW-Authenticate"] = "Bearer"
    return found


def error_response(error: ServeError) -> Response:
    """Return an error as the Open Inference Protocol has it."""
    return json_response({"error": str(error)}, error.status, _retry(error))


def openai_error_response(error: ServeError) -> Response:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code = "model_not_found" if isinstance(error, UnknownModelError) else None
    if error.status == 429:
        kind, code = "requests", "rate_limit_exceeded"
    if isinstance(error, UnauthorizedError):
        code = "invalid_api_key"
    body = {"message": str(error), "type": kind, "param": None, "code": code}
    return json_response({"error": body}, error.status, _retry(error))


Handler = Callable[[AdmittedRequest], Awaitable[Response]]


async def respond(
    gateway: Gateway,
    request: Request,
    name: str | Callable[[], str],
    handler: Handler,
    error_response: Callable[[ServeError], Response],
) -> Response:
    """Let a request in, answer it, and count it, however it ends.

    Cancellation: counted as a request whose client has gone.
    """
    try:
        admitted = gateway.authenticator.admit(request.headers)
    except ServeError as error:
        response = error_response(error)
        gateway.metrics.requests.labels("unknown", response.status_code).inc()
        return response
    status = CLIENT_CLOSED
    try:
        response = await _handled(admitted, handler, error_response)
        admitted.bytes_out = len(response.body)
        status = response.status_code
    finally:
        model = name() if callable(name) else name
        is_known = gateway.may_use(admitted.tenant, model)
        label = model if is_known else "unknown"
        gateway.authenticator.finish(admitted, label, status)
        took_s = time.monotonic() - admitted.started_at
        gateway.metrics.count(label, admitted.tenant.name, status, took_s)
    return response


CLIENT_CLOSED = 499
"""What is counted for a request that nobody waits for any more."""


async def _handled(
    admitted: AdmittedRequest,
    handler: Handler,
    error_response: Callable[[ServeError], Response],
) -> Response:
    try:
        return await handler(admitted)
    except ServeError as error:
        return error_response(error)
    except Exception:
        logger.exception("a request was not understood")
        return error_response(ServeError("an error of the gateway itself; see its log"))


def timeout_of(request: Request, parameters: dict[str, Any]) -> float | None:
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
