"""Rows of the route table, and the checks and errors around each handler."""

from __future__ import annotations

import enum
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.responses import Response

from multiworld.errors import ServeError, UnauthorizedError
from multiworld.log_format import REQUEST
from multiworld.serve.gateway.admission.authenticator import AdmittedRequest
from multiworld.serve.gateway.admission.timing import Phases
from multiworld.serve.gateway.http.access_log import log_access
from multiworld.serve.gateway.http.answer_record import AnswerRecord
from multiworld.serve.gateway.http.body_limits import Reservation
from multiworld.serve.gateway.http.calls import AdmittedCall, Call
from multiworld.serve.gateway.http.gateway import Gateway
from multiworld.serve.gateway.http.http_request import RECORDER, AnyRequest
from multiworld.serve.gateway.http.http_responses import (
    ASK_TIMING,
    BUG,
    CLIENT_CLOSED,
    REQUEST_ID,
    EventStream,
    error_response,
    failed_stream,
    openai_error_response,
    request_id_of,
)
from multiworld.serve.gateway.http.recorder import Unrecorded
from multiworld.serve.gateway.http.request_body import while_connected
from multiworld.serve.tenants.directory import ANONYMOUS
from multiworld.serve.tracing.request_trace import CURRENT, RequestTrace
from multiworld.serve.wire.origin import Origin, parent_of

logger = logging.getLogger("multiworld.serve")


OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
"""OpenTelemetry's operation name of a route, by its path (semantic conventions for
generative AI)."""

OPTIONAL = re.compile(r"\[.*\]")  # the optional part of a path


class Needs(enum.Enum):
    """Requirement that is checked before a route's handler is called."""

    NOTHING = "nothing"
    OPERATOR = "the key of an operator"
    TENANT = "the key of a tenant"
    BODY = "the key of a tenant that is within its limits, and a body"


class Tag(enum.Enum):
    """Part of the API, which determines the format of its errors."""

    HEALTH = "health"
    INFERENCE = "inference"
    OPENAI = "openai"


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the route table."""

    method: str  # ``GET``, which includes ``HEAD``, or ``POST``
    path: str  # ``{name}`` is a parameter; the part in brackets is optional
    # Answers a ``Call``, or an ``AdmittedCall`` if the route needs a body. The
    # handler's docstring describes the route in the API's documentation.
    handler: Callable[[Any], Coroutine[Any, Any, Response]]
    needs: Needs  # checked before the handler is called
    tag: Tag  # part of the API
    # Further fields of the route's OpenAPI description.
    operation: Mapping[str, Any] = field(default_factory=dict)
    is_shown: bool = True  # in the OpenAPI document

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of the route, the shortest first."""
        with_all = self.path.replace("[", "").replace("]", "")
        return tuple(dict.fromkeys((OPTIONAL.sub("", self.path), with_all)))

    @property
    def summary_and_description(self) -> tuple[str, str]:
        """Summary and description of the route; the description may be empty."""
        text = inspect.cleandoc(self.handler.__doc__ or "")
        summary, _, rest = text.partition("\n")
        return summary.rstrip("."), rest.strip()

    def refuse(self, error: ServeError) -> Response:
        is_openai = self.tag is Tag.OPENAI
        return openai_error_response(error) if is_openai else error_response(error)


def pattern_of(path: str) -> re.Pattern[str]:
    """Return a path's regular expression; ``{name}`` matches one segment."""
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(path)))


async def respond(
    gateway: Gateway, route: Route, request: AnyRequest, path: Mapping[str, str]
) -> Response:
    """Answer a request: check it, call the route's handler, and render errors."""
    recorder: Unrecorded = request.scope.get(RECORDER) or Unrecorded()
    record = recorder.begin_answer()
    number = request_id_of(request, record)
    REQUEST.set(number)
    if route.needs is Needs.BODY:
        response = await _respond_counted(gateway, route, request, path, record)
    else:
        answer = _respond(gateway, route, request, path, record)
        response = _continued(await _handled(answer, route), record)
    # Append directly: ``headers`` would first search for a header of this name.
    response.raw_headers.append((REQUEST_ID.lower().encode(), number.encode()))
    return response


async def _respond(
    gateway: Gateway,
    route: Route,
    request: AnyRequest,
    path: Mapping[str, str],
    record: AnswerRecord,
) -> Response:
    tenant = ANONYMOUS
    if route.needs is Needs.OPERATOR:
        gateway.authenticator.check_operator(request.headers)
    elif route.needs is Needs.TENANT:
        tenant = gateway.authenticator.identify(request.headers)
    return await route.handler(Call(gateway, request, path, tenant, record=record))


async def _respond_counted(
    gateway: Gateway,
    route: Route,
    request: AnyRequest,
    path: Mapping[str, str],
    record: AnswerRecord,
) -> Response:
    """Admit a request, answer it, and count it, whatever its outcome."""
    # An ``EventStream`` is counted when the stream ends. A cancelled request is counted
    # with the status ``CLIENT_CLOSED``.
    trace = _traced(gateway, route, request, record)
    try:
        admitted = gateway.authenticator.admit(
            request.headers, is_resumed=record.is_resumed
        )
    except ServeError as error:
        refusal = route.refuse(error)
        name = path.get("name", "")
        is_named = name in gateway.models and not isinstance(error, UnauthorizedError)
        label = name if is_named else "unknown"
        gateway.counts.add(label, "", refusal.status_code, 0.0)
        if gateway.logs_access:
            log_access(request, "-", refusal.status_code, 0.0)
        return _continued(refusal, record)
    record.admitted()
    admitted.origin = Origin(REQUEST.get(), None if trace is None else trace.own)
    reservation = Reservation(gateway.bodies, admitted.tenant.name)
    call = AdmittedCall(
        gateway,
        request,
        path,
        admitted.tenant,
        admitted,
        reservation,
        record=record,
    )

    def end(status: int) -> Phases | None:
        call.held.close()
        reservation.release()
        model = call.name or admitted.model
        is_known = gateway.may_use(admitted.tenant, model)
        label = model if is_known else "unknown"
        is_ended = not record.is_abandoned()  # else another gateway continues it
        gateway.authenticator.finish(admitted, label, status if is_ended else None)
        began_at, now = admitted.started_at, gateway.authenticator.clock()
        phases = admitted.timing.phases(began_at, now)
        tenant = admitted.tenant.name
        if is_ended:
            gateway.counts.add(label, tenant, status, now - began_at, phases)
        if is_ended and gateway.logs_access:
            log_access(request, tenant or "-", status, now - began_at)
        if trace is not None and gateway.tracer is not None and trace.is_kept(status):
            _describe(trace, route, admitted)
            what = OPERATIONS.get(route.path, f"{route.method} {route.path}")
            spans = trace.ended(
                f"{what} {label}", now, status, is_continued=not is_ended
            )
            gateway.tracer.export(spans)
        return phases

    status = CLIENT_CLOSED
    response: Response | None = None
    phases = None
    try:
        response = await _handled(while_connected(request, route.handler(call)), route)
        response = _continued(response, record)
        status = response.status_code
    finally:
        if isinstance(response, EventStream):
            response.on_end = end
            response.record = record
            response.on_bytes = partial(gateway.authenticator.count_sent, admitted)
        else:
            if response is not None:
                gateway.authenticator.count_sent(admitted, len(response.body))
            phases = end(status)
    if phases is not None and ASK_TIMING in request.headers:
        response.headers["Server-Timing"] = phases.header
    return response


def _continued(response: Response, record: AnswerRecord) -> Response:
    """Return an answer that can follow the head that another gateway has sent."""
    if not record.has_begun or isinstance(response, EventStream):
        return response
    return failed_stream(bytes(response.body))


async def _handled(answer: Awaitable[Response], route: Route) -> Response:
    try:
        return await answer
    except ServeError as error:
        return route.refuse(error)
    except Exception:
        logger.exception("gateway failed to handle a request")
        return route.refuse(ServeError(BUG))


def _traced(
    gateway: Gateway, route: Route, request: AnyRequest, record: AnswerRecord
) -> RequestTrace | None:
    """Begin the trace of a request; return None if nothing is traced."""
    if gateway.tracer is None:
        return None
    client = parent_of(request.headers.get("traceparent", ""))
    name = f"{route.method} {route.path}"
    ids = record.token("trace", 24)
    own = gateway.tracer.root(client, ids[:32], ids[32:], name)
    trace = RequestTrace(own, client, gateway.authenticator.clock())
    if record.is_resumed:
        trace.is_recovered = True
        trace.event("taken over from another gateway", trace.began_at, {})
    CURRENT.set(trace)
    return trace


def _describe(trace: RequestTrace, route: Route, admitted: AdmittedRequest) -> None:
    """Add attributes of OpenTelemetry's semantic conventions for generative AI."""
    attributes = trace.attributes
    attributes |= {
        "http.request.method": route.method,
        "http.route": route.path,
        "multiworld.request": admitted.origin.request,
        "multiworld.tenant": admitted.tenant.name,
    }
    if route.path in OPERATIONS:
        attributes["gen_ai.operation.name"] = OPERATIONS[route.path]
    if admitted.model:
        attributes["gen_ai.request.model"] = admitted.model
    if admitted.prompt_tokens:
        attributes["gen_ai.usage.input_tokens"] = admitted.prompt_tokens
    if admitted.generated_tokens:
        attributes["gen_ai.usage.output_tokens"] = admitted.generated_tokens
