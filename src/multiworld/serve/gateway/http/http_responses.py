"""HTTP responses: JSON, server-sent events, and the formats of errors."""

from __future__ import annotations

import logging
import math
import re
import reprlib
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from multiworld import errors
from multiworld.serve.gateway.http.answer_record import AnswerRecord, unrecorded
from multiworld.serve.gateway.http.http_request import AnyRequest
from multiworld.serve.gateway.http.kept_events import COMMENT, EventLog

logger = logging.getLogger("multiworld.serve")

# Header with a request's id: clients may set it, and every response has it.
REQUEST_ID = "X-Request-Id"

# Request ids that are accepted from clients, because they are safe in logs and headers.
GIVEN_ID = re.compile(r"[!-~]{1,128}")

# Request header that asks for ``Server-Timing`` in the response.
ASK_TIMING = "x-timing"

RENDER_BYTES = 32 * 1024  # answers of at least this size are rendered in a thread

BUG = "internal error of the gateway; see its log"

# Type and code of an error in OpenAI's API, by the name of the limit that was reached.
REFUSALS = {
    "tpm_limit": ("tokens", "rate_limit_exceeded"),
    "tokens_per_day": ("insufficient_quota", "insufficient_quota"),
    "tokens_per_month": ("insufficient_quota", "insufficient_quota"),
}

# Codes of errors that the client did not cause. In a stream, whose HTTP status is
# already sent, only the code distinguishes these errors.
FAILURES = {
    errors.NoReplicaError: "no_replica",
    errors.KeeperLostError: "keeper_lost",
    errors.DeadlineExceededError: "deadline_exceeded",
    errors.ModelFailedError: "model_failed",
    errors.RequestCancelledError: "cancelled",
    errors.RequestPoisonedError: "poison_request",
}

MAX_TEXT = 1000  # maximum characters of an error text
ERROR = b'data: {"error"'  # first bytes of an event that reports an error


def json_response(data: Any, status: int = 200, headers: Any = None) -> Response:
    return Response(orjson.dumps(data), status, headers, "application/json")


def _retry(error: errors.ServeError) -> dict[str, str]:
    after_s = getattr(error, "retry_after_s", None)
    found = {} if after_s is None else {"Retry-After": str(max(1, math.ceil(after_s)))}
    if isinstance(error, errors.UnauthorizedError):
        found["WWW-Authenticate"] = "Bearer"
    return found


def text_of(error: errors.ServeError) -> str:
    """Return an error's text; truncate it, because it may quote the client's input."""
    return _cut(str(error))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"


def error_response(error: errors.ServeError) -> Response:
    return json_response({"error": text_of(error)}, error.status, _retry(error))


def openai_error_response(error: errors.ServeError) -> Response:
    return json_response({"error": openai_error(error)}, error.status, _retry(error))


def openai_error(error: errors.ServeError) -> dict[str, Any]:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    param, code = getattr(error, "param", ""), getattr(error, "code", "")
    if isinstance(error, errors.UnknownModelError):
        param, code = "model", "model_not_found"
    if error.status == 429:
        limit = getattr(error, "limit", "")
        kind, code = REFUSALS.get(limit, ("requests", "rate_limit_exceeded"))
    if isinstance(error, errors.UnauthorizedError):
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
    """A response of server-sent events; an error becomes an event before ``last``."""

    last = b"data: [DONE]\n\n"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._status = CLIENT_CLOSED
        # Called once, with the status to count.
        self.on_end: Callable[[int], object] = lambda status: None
        # Called with the size of each event, in bytes.
        self.on_bytes: Callable[[int], object] = lambda count: None
        # Record of the answer, which counts the events that the client already has.
        self.record = unrecorded()
        # Begins the log of a stream that clients may read again; None: there is no log.
        self.begin_log: Callable[[Callable[[], None]], EventLog] | None = None
        self._is_logged = False
        super().__init__(
            self._sent(events), headers=SSE_HEADERS, media_type="text/event-stream"
        )

    @staticmethod
    def error_of(error: errors.ServeError) -> Any:
        """Return the content of the event that reports a stream's error."""
        return openai_error(error)

    async def _sent(self, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Yield the events that the client lacks."""
        events = self._all(events)
        if self.begin_log is not None:
            log, self._is_logged = self.begin_log(self.record.log_ended), True
            log.fill(
                events,
                lambda: self.on_end(self._status),
                is_resumed=self.record.is_detached,
            )
            self.record.log_begun(log)
            if self.record.is_detached:
                return
            events = log.read(0)
        is_failed = False
        async with aclosing(events):
            async for event in events:
                is_failed = is_failed or event.startswith(ERROR)
                is_lacking = event.startswith(COMMENT) or self.record.count_event()
                # A resumed request may fail before its first new event. Without the
                # error event, the client would take the stream as complete.
                if is_lacking or is_failed:
                    self.on_bytes(len(event))
                    yield event

    async def _all(self, events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        status = CLIENT_CLOSED
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
            status = 200
        except errors.ServeError as error:
            status = error.status
            yield event_of({"error": self.error_of(error)})
        except Exception:
            status = 500
            logger.exception("the events of a streamed answer failed")
            yield event_of({"error": self.error_of(errors.ServeError(BUG))})
        finally:
            self._status = status
        if self.last:
            yield self.last

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # If the client leaves before the first event, ``_sent`` never starts, and the
        # end must be reported here.
        try:
            await super().__call__(scope, receive, send)
        finally:
            if not self._is_logged:  # else the log calls ``on_end``
                self.on_end(self._status)


def failed_stream(error: bytes) -> EventStream:
    """Return a stream whose only event is ``error``, a JSON text."""

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: %b\n\n" % error

    return EventStream(events())


# Headers that keep proxies from buffering a stream of events.
SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event_of(content: Any) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


def request_id_of(request: AnyRequest, record: AnswerRecord) -> str:
    given = request.headers.get(REQUEST_ID.lower(), "")
    return given if GIVEN_ID.fullmatch(given) else record.token("request", 16)


CLIENT_CLOSED = 499  # nginx's status for a request whose client disconnected


def timeout_of(
    request: AnyRequest, timeout_s: Any = None, timeout_us: Any = None
) -> float | None:
    """Return the client's timeout in seconds; None if it gave none."""
    # The header ``X-Timeout-S`` takes precedence over Triton's ``timeout_us``.
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
        raise errors.InvalidRequestError(
            f"timeout {reprlib.repr(given)} is not valid; give seconds, above 0 and at "
            "most 86400"
        )
    return seconds
