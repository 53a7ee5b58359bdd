"""HTTP responses: admission, counting, and the forms of errors. Shell."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import Response

from multiworld.errors import (
    InvalidRequestError,
    ServeError,
    UnauthorizedError,
    UnknownModelError,
)
from multiworld.serve.gateway.body_budget import Reservation
from multiworld.serve.gateway.gateway import Gateway
from multiworld.serve.gateway.http_request import AnyRequest
from multiworld.serve.tenants.authenticator import AdmittedRequest

logger = logging.getLogger("multiworld.serve")

ASK_TIMING = "x-timing"
"""Header of a request whose answer is to say what its time was spent on."""

OFFLOAD_BYTES = 64 * 1024
"""Bytes from which a body is parsed in a thread, so that it does not block the loop."""

RENDER_BYTES = 32 * 1024
"""Bytes of tensors from which an answer is rendered in a thread."""


def json_response(data: Any, status: int = 200, headers: Any = None) -> Response:
    """Return a JSON response.

    Args:
        data: Content, as ``orjson`` encodes it.
        status: HTTP status.
        headers: Additional headers by name; None: none.
    """
    return Response(orjson.dumps(data), status, headers, "application/json")


def _retry(error: ServeError) -> dict[str, str]:
    after_s = getattr(error, "retry_after_s", None)
    found = {} if after_s is None else {"Retry-After": str(max(1, math.ceil(after_s)))}
    if isinstance(error, UnauthorizedError):
        found["WWW-Authenticate"] = "Bearer"
    return found


def error_response(error: ServeError) -> Response:
    """Return an error in the form of the Open Inference Protocol."""
    return json_response({"error": str(error)}, error.status, _retry(error))


def openai_error_response(error: ServeError) -> Response:
    """Return an error in the form of OpenAI's API."""
    return json_response({"error": openai_error(error)}, error.status, _retry(error))


def openai_error(error: ServeError) -> dict[str, Any]:
    """Return the error object of OpenAI's API."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    param, code = getattr(error, "param", ""), getattr(error, "code", "")
    if isinstance(error, UnknownModelError):
        param, code = "model", "model_not_found"
    if error.status == 429:
        kind, code = "requests", "rate_limit_exceeded"
    if isinstance(error, UnauthorizedError):
        code = "invalid_api_key"
    return {
        "message": str(error),
        "type": kind,
        "param": param or None,
        "code": code or None,
    }


Handler = Callable[[AdmittedRequest, Reservation], Awaitable[Response]]
"""Answers an admitted request, whose body takes memory from the reservation."""


async def respond(
    gateway: Gateway,
    request: AnyRequest,
    name: str | Callable[[], str],
    handler: Handler,
    error_response: Callable[[ServeError], Response],
) -> Response:
    """Admit a request, answer it, and count it, whatever its outcome.

    Args:
        gateway: The gateway.
        request: The HTTP request.
        name: Name of the model, or a function that returns it after the answer.
        handler: Answers the admitted request.
        error_response: Renders an error.

    Cancellation: Safe. The request is counted with status ``CLIENT_CLOSED``.
    """
    try:
        admitted = gateway.authenticator.admit(request.headers)
    except ServeError as error:
        response = error_response(error)
        gateway.counts.add("unknown", "", response.status_code, 0.0)
        return response
    status = CLIENT_CLOSED
    reservation = Reservation(gateway.bodies)
    try:
        response = await _handled(
            lambda: handler(admitted, reservation), error_response
        )
        admitted.bytes_out = len(response.body)
        status = response.status_code
    finally:
        reservation.release()
        model = name() if callable(name) else name
        is_known = gateway.may_use(admitted.tenant, model)
        label = model if is_known else "unknown"
        gateway.authenticator.finish(admitted, label, status)
        began_at, now = admitted.started_at, gateway.authenticator.clock()
        phases = admitted.timing.phases(began_at, now)
        tenant = admitted.tenant.name
        gateway.counts.add(label, tenant, status, now - began_at, phases)
    if phases is not None and ASK_TIMING in request.headers:
        response.headers["Server-Timing"] = phases.header
    return response


CLIENT_CLOSED = 499
"""Status counted for a request whose client disconnected; it is nginx's."""


async def _handled(
    answer: Callable[[], Awaitable[Response]],
    error_response: Callable[[ServeError], Response],
) -> Response:
    try:
        return await answer()
    except ServeError as error:
        return error_response(error)
    except Exception:
        logger.exception("gateway failed to handle a request")
        return error_response(ServeError("internal error of the gateway; see its log"))


def timeout_of(
    request: AnyRequest, timeout_s: Any = None, timeout_us: Any = None
) -> float | None:
    """Return the client's timeout of a request in seconds; None: it gave none.

    Args:
        request: The HTTP request; its header ``X-Timeout-S`` counts if the body has no
            ``timeout_s``.
        timeout_s: ``timeout_s`` in its body.
        timeout_us: ``timeout`` in its body: microseconds, as Triton's clients send it.

    Raises:
        InvalidRequestError: The timeout is not valid.
    """
    given = timeout_s
    if given is None:
        given = request.headers.get("x-timeout-s")
    if given is None:
        given = timeout_us / 1e6 if type(timeout_us) is int else timeout_us
    if given is None:
        return None
    try:
        seconds = -1.0 if isinstance(given, bool) else float(given)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds <= 86400:
        raise InvalidRequestError(
            f"timeout {given!r} is not valid; give seconds, above 0 and at most 86400"
        )
    return seconds
