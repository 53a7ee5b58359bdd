"""HTTP responses: admission, counting, and the forms of errors."""

from __future__ import annotations

import logging
import math
import re
import reprlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from fastapi import Response
from fastapi.responses import StreamingResponse

from multiworld.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    ModelFailedError,
    NoReplicaError,
    RequestPoisonedError,
    ServeError,
    UnauthorizedError,
    UnknownModelError,
)
from multiworld.serve.gateway.admission.authenticator import AdmittedRequest
from multiworld.serve.gateway.admission.timing import Phases
from multiworld.serve.gateway.http.body_budget import Reservation
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_request import AnyRequest

logger = logging.getLogger("multiworld.serve")

access_logger = logging.getLogger("multiworld.access")

REQUEST_ID = "X-Request-Id"  # with the id of a request: accepted, returned and logged

# Ids that are accepted from clients; they go into a log and a header.
GIVEN_ID = re.compile(r"[!-~]{1,128}")

# Request header that asks for ``Server-Timing`` in the response.
ASK_TIMING = "x-timing"

RENDER_BYTES = 32 * 1024  # from this size on, an answer is rendered in a thread

BUG = "internal error of the gateway; see its log"

# Type and code of errors in OpenAI's API, by the limit that was reached.
REFUSALS = {
    "tpm_limit": ("tokens", "rate_limit_exceeded"),
    "tokens_per_day": ("insufficient_quota", "insufficient_quota"),
    "tokens_per_month": ("insufficient_quota", "insufficient_quota"),
}

# Codes of errors that are no fault of the client. A stream that has begun has no
# status left that tells them apart.
FAILURES = {
    NoReplicaError: "no_replica",
    DeadlineExceededError: "deadline_exceeded",
    ModelFailedError: "model_failed",
    RequestPoisonedError: "poison_request",
}

MAX_TEXT = 1000  # characters of an error text


def json_response(data: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(orjson.dumps(data), status, headers, "application/json")


def _retry(error: ServeError) -> dict[str, str]:
    after_s = getattr(error, "retry_after_s", None)
    found = {} if after_s is None else {"Retry-After": str(max(1, math.ceil(after_s)))}
    if isinstance(error, UnauthorizedError):
        found["WWW-Authenticate"] = "Bearer"
    return found


def text_of(error: ServeError) -> str:
    """Return the text of an error, cut: it may quote what a client has sent."""
    return _cut(str(error))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"


def error_response(error: ServeError) -> Response:
    return json_response({"error": text_of(error)}, error.status, _retry(error))


def openai_error_response(error: ServeError) -> Response:
    return json_response({"error": openai_error(error)}, error.status, _retry(error))


def openai_error(error: ServeError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    param, code = getattr(error, "param", ""), getattr(error, "code", "")
    if isinstance(error, UnknownModelError):
        param, code = "model", "model_not_found"
    if error.status == 429:
        limit = getattr(error, "limit", "")
        kind, code = REFUSALS.get(limit, ("requests", "rate_limit_exceeded"))
    if isinstance(error, UnauthorizedError):
        code = "invalid_api_key"
    if error.status == 500 or type(error) in FAILURES:
        code = FAILURES.get(type(error), "internal_error")
    return {
        "message": text_of(error),
        "type": kind,
        "param": _cut(param) or None,
        "code": code or None,
    }


class EventStream(StreamingResponse):
    """Server-sent events; a ``ServeError`` becomes the last one, before ``last``."""

    last = b"data: [DONE]\n\n"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        # Called once, with the status to count.
        self.on_end: Callable[[int], object] = lambda status: None
        # Called with the number of bytes of each event.
        self.on_bytes: Callable[[int], object] = lambda count: None
        super().__init__(
            self._all(events), headers=SSE_HEADERS, media_type="text/event-stream"
        )

    @staticmethod
    def error_of(error: ServeError) -> Any:
        """Return the content of a failed stream's last event."""
        return openai_error(error)

    async def _all(self, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        status = CLIENT_CLOSED
        try:
            async with aclosing(events):
                async for event in events:
                    self.on_bytes(len(event))
                    yield event
            status = 200
        except ServeError as error:
            status = error.status
            yield event_of({"error": self.error_of(error)})
        except Exception:
            status = 500
            logger.exception("a stream failed")
            yield event_of({"error": self.error_of(ServeError(BUG))})
        finally:
            self.on_end(status)
        if self.last:
            yield self.last


# Headers that keep proxies from buffering a stream of events.
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event_of(content: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


# Answers an admitted request, whose body takes memory from the reservation.
Handler = Callable[[AdmittedRequest, Reservation], Awaitable[Response]]


async def respond(
    gateway: Gateway,
    request: AnyRequest,
    name: str,
    handler: Handler,
    error_response: Callable[[ServeError], Response],
) -> Response:
    """Admit a request, answer it, and count it, whatever its outcome."""
    # ``name`` is empty if the body names the model: then ``handler`` notes it. An
    # ``EventStream`` is counted when it ends; a cancelled request as ``CLIENT_CLOSED``.
    number = request_id_of(request)
    try:
        admitted = gateway.authenticator.admit(request.headers)
    except ServeError as error:
        refusal = error_response(error)
        refusal.headers[REQUEST_ID] = number
        is_named = name in gateway.models and not isinstance(error, UnauthorizedError)
        label = name if is_named else "unknown"
        gateway.counts.add(label, "", refusal.status_code, 0.0)
        if gateway.logs_access:
            _log_access(request, number, "-", refusal.status_code, 0.0)
        return refusal
    admitted.id = number
    reservation = Reservation(gateway.bodies, admitted.tenant.name)

    def end(status: int) -> Phases | None:
        reservation.release()
        model = name or admitted.model
        is_known = gateway.may_use(admitted.tenant, model)
        label = model if is_known else "unknown"
        gateway.authenticator.finish(admitted, label, status)
        began_at, now = admitted.started_at, gateway.authenticator.clock()
        phases = admitted.timing.phases(began_at, now)
        tenant = admitted.tenant.name
        gateway.counts.add(label, tenant, status, now - began_at, phases)
        if gateway.logs_access:
            _log_access(request, number, tenant or "-", status, now - began_at)
        return phases

    status = CLIENT_CLOSED
    response: Response | None = None
    phases = None
    try:
        response = await _handled(
            lambda: handler(admitted, reservation), error_response
        )
        status = response.status_code
        # It has none of that name, for which ``headers`` would look.
        response.raw_headers.append((REQUEST_ID.lower().encode(), number.encode()))
    finally:
        if isinstance(response, EventStream):
            response.on_end = end
            response.on_bytes = partial(gateway.authenticator.count_sent, admitted)
        else:
            if response is not None:
                gateway.authenticator.count_sent(admitted, len(response.body))
            phases = end(status)
    if phases is not None and ASK_TIMING in request.headers:
        response.headers["Server-Timing"] = phases.header
    return response


def request_id_of(request: AnyRequest) -> str:
    given = request.headers.get(REQUEST_ID.lower(), "")
    return given if GIVEN_ID.fullmatch(given) else secrets.token_hex(16)


def _log_access(
    request: AnyRequest, number: str, tenant: str, status: int, took_s: float
) -> None:
    # As it was sent: decoded, it could have lines of its own.
    method, path = request.scope["method"], request.scope["raw_path"].decode("ascii")
    text = "%s %s %s %s %d %.3f s"
    access_logger.info(text, number, tenant, method, path, status, took_s)


CLIENT_CLOSED = 499  # nginx's status of a request whose client disconnected


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
        return error_response(ServeError(BUG))


def timeout_of(
    request: AnyRequest, timeout_s: Any = None, timeout_us: Any = None
) -> float | None:
    """Return the client's timeout in seconds; None if it gave none."""
    # The header ``X-Timeout-S`` precedes ``timeout_us``, which is Triton's.
    given = timeout_s
    if given is None:
        given = request.headers.get("x-timeout-s")
    per_s = 1.0
    if given is None:
        given, per_s = timeout_us, 1e6 if type(timeout_us) is int else 1.0
    if given is None:
        return None
    try:
        seconds = -1.0 if isinstance(given, bool) else float(given) / per_s
    except (TypeError, ValueError, OverflowError):
        seconds = -1.0
    if not 0 < seconds <= 86400:
        raise InvalidRequestError(
            f"timeout {reprlib.repr(given)} is not valid; give seconds, above 0 and at "
            "most 86400"
        )
    return seconds
