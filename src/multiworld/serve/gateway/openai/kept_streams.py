"""Routes to kept streams, for clients that have lost their connections."""

from __future__ import annotations

from urllib.parse import parse_qs

from starlette.responses import Response

from multiworld.errors import UnknownStreamError, wrong_field
from multiworld.serve.gateway.http.calls import Call
from multiworld.serve.gateway.http.http_request import RECORDER
from multiworld.serve.gateway.http.http_responses import (
    SSE_HEADERS,
    EventStream,
    json_response,
)
from multiworld.serve.gateway.http.kept_events import EventLog
from multiworld.serve.gateway.http.recorder import Unrecorded
from multiworld.serve.keeper.frames import Place

LAST_EVENT = "last-event-id"  # header: number of the last event that the client has
AFTER = "starting_after"  # query parameter of the same meaning, as in OpenAI's API
BEGIN_S = 10.0  # maximum seconds to wait until a lost gateway's stream continues here
DIGITS = 12  # maximum digits of an event's number


class _Continued(EventStream):
    last = b""  # the log itself ends with the event ``[DONE]``


async def read_stream(call: Call) -> Response:
    """Read a stream again, or resume it.

    `Last-Event-ID` or `?starting_after=` gives the number of the last event that the
    client has. The answer has all later events, including those still to come. Streams
    are kept for `detach_s` after their last reader has left.
    """
    response = await events_behind(call, call.path["id"], _after(call))
    if isinstance(response, EventStream):
        response.record = call.record
    return response


async def events_behind(call: Call, name: str, after: int) -> Response:
    """Answer with the events of a stream after number ``after``."""
    log = await _found(call, name)
    if log is None:
        # Nobody reads this response: the connection moves to the gateway that has
        # the stream.
        return Response()
    log.require_all(after)
    if call.request.scope["method"] == "HEAD":
        return Response(headers=SSE_HEADERS, media_type="text/event-stream")
    stream = _Continued(log.read(after))
    stream.on_bytes = log.on_read
    return stream


async def cancel_stream(call: Call) -> Response:
    """Cancel a stream, and remove its events."""
    name = call.path["id"]
    log = await _found(call, name)
    if log is not None:
        log.end()
    return json_response({"id": name, "object": "stream", "cancelled": True})


def _recorder(call: Call) -> Unrecorded:
    return call.request.scope.get(RECORDER) or Unrecorded()


async def _found(call: Call, name: str) -> EventLog | None:
    """Return a stream's log; None if the connection moves to another gateway."""
    logs, tenant = call.gateway.event_logs, call.tenant.name
    log = logs.find(name, tenant)
    if log is None:
        place = await _recorder(call).find(name)
        if place is Place.ELSEWHERE and await _recorder(call).move(name):
            return None
        if place is Place.HERE:  # the stream of a lost gateway is moving here
            log = await logs.expect(name, tenant, BEGIN_S)
    if log is None:
        raise UnknownStreamError(
            f"stream {name!r} is not kept; set detach_s in the request that starts it"
        )
    return log


def _after(call: Call) -> int:
    query = parse_qs(call.request.scope["query_string"].decode("latin-1"))
    given, name = call.request.headers.get(LAST_EVENT, "0"), "Last-Event-ID"
    if AFTER in query:
        given, name = query[AFTER][-1], AFTER
    if not (given.isascii() and given.isdigit() and len(given) <= DIGITS):
        raise wrong_field(name, "must be the number of an event")
    return int(given)
